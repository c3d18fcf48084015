"""Listings and counts: a `Query` as SQL whose every value is bound.

Place in the life of an execution: looking at it from outside.

For each state that is asked for there is a select of its own over the index of that state, newest first and cut at the
limit; so a page costs what it shows, however many finished executions there are. Without states the index of the
workflow, queue, parent, owner or creation time serves.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Definition, Head, Query, Stored, same_value, searched_texts
from longrun.stores import rows
from longrun.stores._sqlite import pack, sql

_CONTAINS = "longrun_contains"
_EQUALS = "longrun_equals"
_DEFINITION_END = len(rows.DEFINITION_COLUMNS)


def add_functions(connection: sqlite3.Connection) -> None:
    """What SQLite cannot say by itself: letters of either case beyond ASCII, and equality of nested metadata."""
    connection.create_function(_CONTAINS, 3, _contains, deterministic=True)
    connection.create_function(_EQUALS, 3, _equals, deterministic=True)


def find(connection: sqlite3.Connection, query: Query) -> list[Stored]:
    conditions, values = _conditions(query)
    if query.after is not None:
        conditions.append("(created, id) < (:after_created, :after_id)")
        values |= {"after_created": query.after[0], "after_id": query.after[1]}
    values["limit"] = query.limit
    order = "ORDER BY created DESC, id DESC LIMIT :limit"
    if query.states is None:
        statement = f"SELECT {sql.LISTED} FROM {sql.LISTING}{_where(conditions)} {order}"
    else:
        states = sorted(query.states)
        values |= {f"state{n}": state.value for n, state in enumerate(states)}
        wheres = [_where([f"state = :state{n}", *conditions]) for n in range(len(states))]
        parts = [f"SELECT * FROM (SELECT {sql.LISTED} FROM {sql.LISTING}{where} {order})" for where in wheres]
        if not parts:
            return []
        statement = f"SELECT * FROM ({' UNION ALL '.join(parts)}) {order}"
    return [_stored(row) for row in connection.execute(statement, values)]


def count(connection: sqlite3.Connection, query: Query) -> dict[ExecutionState, int]:
    conditions, values = _conditions(query)
    if query.states is not None:
        conditions.append("state IN (SELECT value FROM json_each(:states))")
        values["states"] = json.dumps([state.value for state in query.states])
    statement = f"SELECT state, count(*) FROM execution{_where(conditions)} GROUP BY state"
    return rows.counts_from(connection.execute(statement, values))


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _conditions(query: Query) -> tuple[list[str], dict[str, Any]]:
    """Everything but states and the page's place. A `+` keeps an index from being used: that of the state is better."""
    plus = "" if query.states is None else "+"
    conditions: list[str] = []
    values: dict[str, Any] = {}

    def add(condition: str, **bound: Any) -> None:
        conditions.append(condition)
        values.update(bound)

    if query.workflows is not None:
        add(f"{plus}workflow IN (SELECT value FROM json_each(:workflows))", workflows=json.dumps([*query.workflows]))
    for column in ("queue", "parent_id", "owner"):
        if getattr(query, column) is not None:
            add(f"{plus if column == 'queue' else ''}{column} = :{column}", **{column: getattr(query, column)})
    if query.owned is not None:
        add("owner IS NOT NULL" if query.owned else "owner IS NULL")
    if query.created_after is not None:
        add("created >= :created_after", created_after=query.created_after)
    if query.created_before is not None:
        add("created < :created_before", created_before=query.created_before)
    if query.ended_before is not None:
        add("ended < :ended_before", ended_before=query.ended_before)
    if query.text is not None:
        add(f"{_CONTAINS}(id, metadata, :text)", text=rows.json_text(query.text.casefold()))
    for n, (key, value) in enumerate(query.metadata.items()):
        condition, bound = _metadata(n, key, value)
        add(condition, **bound)
    return conditions, values


def _metadata(n: int, key: str, value: Any) -> tuple[str, dict[str, Any]]:
    """As `same_value` compares; a missing value is None. Text that is not Unicode, or has a NUL in it, SQLite cannot
    compare."""
    if any(isinstance(text, str) and rows.clean(text) != text for text in (key, value)):
        return f"{_EQUALS}(metadata, :key{n}, :value{n})", _as_json(n, key, value)
    one = f"EXISTS (SELECT 1 FROM json_each(execution.metadata) AS j WHERE j.key = :key{n} AND "
    if value is None:
        return f"NOT {one} j.type <> 'null')", {f"key{n}": key}
    if isinstance(value, str):
        return f"{one} j.type = 'text' AND j.value = :value{n})", {f"key{n}": key, f"value{n}": value}
    if isinstance(value, bool):
        return f"{one} j.type = :value{n})", {f"key{n}": key, f"value{n}": "true" if value else "false"}
    if isinstance(value, int | float) and abs(value) <= 1 << 53:  # beyond that SQLite takes neighbours for equal
        return f"{one} j.type IN ('integer', 'real') AND j.value = :value{n})", {f"key{n}": key, f"value{n}": value}
    return f"{_EQUALS}(metadata, :key{n}, :value{n})", _as_json(n, key, value)


def _as_json(n: int, key: str, value: Any) -> dict[str, str]:
    """For the functions above: JSON has an escape for what SQLite cannot hold."""
    return {f"key{n}": rows.json_text(key), f"value{n}": rows.json_text(value)}


_value = lru_cache(64)(json.loads)
"""What is looked for, which is the same for every row."""


def _contains(id: str, metadata: str, text: str) -> bool:
    folded = _value(text)
    return any(folded in value.casefold() for value in searched_texts(id, _mapping(metadata)))


def _equals(metadata: str, key: str, value: str) -> bool:
    return same_value(_mapping(metadata).get(_value(key)), _value(value))


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:  # damaged: a search must not stop at it, and loading will say so
        return {}
    return value if isinstance(value, dict) else {}


def _stored(row: tuple[Any, ...]) -> Stored:
    try:
        head = pack.head_from(*row[_DEFINITION_END:])
        return Stored(definition=rows.definition_from(row[:_DEFINITION_END]), head=head)
    except (*pack.UNREADABLE, CorruptDataError):
        return _unreadable(row)


def _unreadable(row: tuple[Any, ...]) -> Stored:
    """A damaged row must not keep the others from being listed; loading it says what is wrong with it."""
    id, workflow, *_, created = row[:_DEFINITION_END]
    moment = float(created) if isinstance(created, int | float) else 0.0
    head = Head(state=ExecutionState.BLOCKED, updated=moment, reason="its row in the database is damaged")
    return Stored(definition=Definition(id=str(id), workflow=str(workflow), created=moment), head=head)
