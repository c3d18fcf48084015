"""Many rows, few statements.

Place in the life of an execution: claim, checkpoint. While a statement runs the interpreter is free for the steps,
which it is not in between two rows that are written one by one.
"""

from __future__ import annotations

import sqlite3
from sqlite3 import SQLITE_LIMIT_VARIABLE_NUMBER
from typing import Any

from longrun.stores._sqlite import sql

MOST_ROWS = 128
"""That one statement writes. All sizes are powers of two: they are few, so that the statements are prepared once. To
prepare one takes as long for each of its rows as to write several."""
MOST_ONCE = 32
"""The same for what is written once in the life of an execution, or twice."""


def insert(connection: sqlite3.Connection, statement: str, values: list[Any], most_rows: int = MOST_ROWS) -> None:
    """The columns of one row after the other."""
    if not values:
        return
    width, done = statement.count("?"), 0
    rows = len(values) // width
    most = min(most_rows, connection.getlimit(SQLITE_LIMIT_VARIABLE_NUMBER) // width)
    while rows:
        number = 1 << (min(rows, max(most, 1)).bit_length() - 1)
        connection.execute(sql.for_many(statement, number), values[done : done + number * width])
        done += number * width
        rows -= number
