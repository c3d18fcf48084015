"""The driver, or the one line that says how to get it.

Place in the life of an execution: none of its own; every part of the PostgreSQL store imports psycopg from here.
"""

from __future__ import annotations

from longrun.errors import MissingExtraError

try:
    import psycopg as psycopg
    from psycopg import errors as errors
    from psycopg.adapt import Dumper as Dumper
    from psycopg.adapt import Transformer as Transformer
    from psycopg.conninfo import conninfo_to_dict as conninfo_to_dict
    from psycopg.pq import ExecStatus as ExecStatus
    from psycopg.pq import Format as Format
    from psycopg.rows import tuple_row as tuple_row
except ImportError as error:
    raise MissingExtraError("PostgresCheckpointStore", "postgres") from error
