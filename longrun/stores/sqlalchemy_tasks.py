"""A ready task table in any SQL database: `SQLAlchemyTaskStore`, an adapter for `TaskCheckpointStore`.

Place in the life of an execution: checkpoint::

    store = TaskCheckpointStore(SQLAlchemyTaskStore("postgresql://…"))

One table, portable SQL, a synchronous engine in worker threads: so it is the same on asyncio and trio. Calls of
`replace_task` that come while one is under way share the next transaction.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio
import anyio.to_thread

from longrun.errors import ConfigError, MissingExtraError, StoreSettingsError, StoreUnavailableError
from longrun.loops import Loop, current_loop
from longrun.stores._task.records import TaskRecord

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine, Table

T = TypeVar("T")

KIND = "SQLAlchemy task"
THREADS = 8
SQLITE_PATIENCE = 30
"""Seconds that SQLite waits for another writer."""

_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,62}\.)?[A-Za-z_][A-Za-z0-9_]{0,62}")
_DRIVERS = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}


class SQLAlchemyTaskStore:
    """Tasks in one SQL table, with all seven methods of `FencedTaskStoreAdapter`.

    Given an engine, it uses that and never closes it; given a URL, it makes one of its own. The table is created if it
    is missing; the application may add columns to it that can be null or have a default.
    """

    concurrency = 256
    """How many calls a `TaskCheckpointStore` makes at a time; those that write share transactions, not connections."""

    def __init__(self, engine_or_url: Engine | URL | str, table: str = "longrun_tasks") -> None:
        try:
            import sqlalchemy
        except ImportError as error:
            raise MissingExtraError("SQLAlchemyTaskStore", "sqlalchemy") from error
        if not _NAME.fullmatch(str(table)):
            raise ConfigError("table", table, "give a plain name, or schema.name: letters, digits and _")
        given = engine_or_url if isinstance(engine_or_url, sqlalchemy.Engine) else None
        self._owns_engine = given is None
        self._engine = _make_engine(engine_or_url) if given is None else given
        _refuse_memory(self._engine)
        self._table = _define(table)
        self._ready = False
        self._isolation: str | None = None
        self._making_ready = threading.Lock()
        self._lanes = threading.local()

    def __repr__(self) -> str:
        return f"<SQLAlchemyTaskStore {self._table.fullname} in {self.place}>"

    @property
    def place(self) -> str:
        """Where the database is; neither user nor password nor options."""
        url = self._engine.url
        return f"{url.get_backend_name()}://{url.host or ''}/{url.database or ''}"

    def describe(self) -> Mapping[str, object]:
        """Facts for `longrun doctor`."""
        return {"place": self.place, "table": self._table.fullname, "driver": self._engine.driver}

    # life

    async def close(self) -> None:
        """Give the connections back, if the engine is its own. It can be used again afterwards."""
        if self._owns_engine:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._engine.dispose)

    store_closed = close
    """Called by the `TaskCheckpointStore` that used it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # the six methods, and the seventh

    async def save_task(self, record: TaskRecord) -> None:
        await self._write(lambda: self._upsert(record))

    async def get_task(self, task_id: str) -> TaskRecord | None:
        rows = await self._read(self._table.c.id == task_id)
        return rows[0] if rows else None

    async def list_tasks(self, *, status: str | None = None) -> list[TaskRecord]:
        return await self._read(None if status is None else self._table.c.status == status)

    async def delete_task(self, task_id: str, *, expected_revision: int | None = None) -> bool:
        """Whether there was one; with `expected_revision`, only that one is removed."""
        columns = self._table.c
        statement = self._table.delete().where(columns.id == task_id)
        if expected_revision is not None:
            statement = statement.where(columns.revision == expected_revision)
        return await self._write(lambda: self._execute(statement))

    async def update_progress(self, task_id: str, progress: float) -> None:
        await self._set(task_id, progress=progress)

    async def update_status(self, task_id: str, status: str) -> None:
        await self._set(task_id, status=status)

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        lane = self._lane()
        job = _Job(record, expected_revision)
        lane.jobs.append(job)
        try:
            async with lane.turn:
                if not job.done:
                    batch, lane.jobs = lane.jobs, []
                    await self._thread(lambda: self._replace_all(batch))
        finally:
            if job in lane.jobs:  # cancelled before its turn: it must not be written later
                lane.jobs.remove(job)
        if job.error is not None:
            raise job.error
        return job.replaced

    # in a thread

    def _replace_all(self, batch: list[_Job]) -> None:
        """All in one transaction if every one of them fits, else each in its own."""
        try:
            together = len(batch) > 1 and self._replace_together(batch)
            for job in batch:
                job.replaced = together or self._replace(job)
                job.done = True
        except (StoreUnavailableError, StoreSettingsError) as error:
            for job in batch:
                if not job.done:
                    job.error, job.done = error, True

    def _replace_together(self, batch: list[_Job]) -> bool:
        """Whether all fitted; if not, nothing has changed."""
        from sqlalchemy.exc import IntegrityError

        if not self._engine.dialect.supports_sane_multi_rowcount:
            return False
        jobs = sorted(batch, key=lambda job: job.record.id)  # the same order everywhere, so that nobody deadlocks
        new = [self._new_row(job.record) for job in jobs if job.expected is None]
        old = [_bound(job) for job in jobs if job.expected is not None]

        def write(connection: Connection) -> bool:
            if old and connection.execute(self._update, old).rowcount != len(old):
                raise _DoesNotFitError
            if new:
                connection.execute(self._table.insert(), new)
            return True

        try:
            return self._transaction(write)
        except (IntegrityError, _DoesNotFitError):
            return False

    def _replace(self, job: _Job) -> bool:
        if job.expected is None:
            return self._insert(job.record)
        bound = _bound(job)
        return self._transaction(lambda connection: connection.execute(self._update, bound).rowcount == 1)

    def _upsert(self, record: TaskRecord) -> None:
        """By hand, since every database spells it differently: one statement writes, whichever it is."""
        update = self._table.update().where(self._table.c.id == record.id).values(**_row(record))
        while not self._execute(update):
            if self._insert(record):
                return

    def _insert(self, record: TaskRecord) -> bool:
        """False if the id is taken."""
        from sqlalchemy.exc import IntegrityError

        try:
            return self._execute(self._table.insert().values(**self._new_row(record)))
        except IntegrityError:
            return False

    def _execute(self, statement: Any) -> bool:
        """Whether it changed a row."""
        return self._transaction(lambda connection: bool(connection.execute(statement).rowcount))

    @cached_property
    def _update(self) -> Any:
        """The statement that replaces: to build it costs as much as to run it."""
        from sqlalchemy import bindparam

        columns = self._table.c
        wanted = (columns.id == bindparam("b_id")) & (columns.revision == bindparam("b_expected"))
        names = ("status", "progress", "data", "metadata", "revision", "updated_at")
        return self._table.update().where(wanted).values({name: bindparam(f"b_{name}") for name in names})

    def _new_row(self, record: TaskRecord) -> dict[str, Any]:
        row = _row(record)
        return {"id": record.id, "created_at": row["updated_at"], **row}

    def _transaction(self, work: Callable[[Connection], T]) -> T:
        from sqlalchemy.exc import IntegrityError, SQLAlchemyError

        try:
            self._make_ready()
            with self._engine.connect() as connection:
                if self._isolation is not None:
                    connection.execution_options(isolation_level=self._isolation)
                with connection.begin():
                    return work(connection)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise StoreUnavailableError(KIND, _plain(error)) from error

    def _make_ready(self) -> None:
        """Create the table, or see that the one of that name is ours. Processes may do so at the same time."""
        from sqlalchemy.exc import SQLAlchemyError

        if self._ready:
            return
        with self._making_ready:
            with contextlib.suppress(SQLAlchemyError):  # another process was quicker, or the next line finds it out
                self._table.create(self._engine, checkfirst=True)
            _check_columns(self._engine, self._table)
            self._isolation = _needed_isolation(self._engine)
            self._ready = True

    # plumbing

    async def _read(self, condition: Any) -> list[TaskRecord]:
        columns = self._table.c
        statement = self._table.select().with_only_columns(
            columns.id, columns.status, columns.progress, columns.data, columns.metadata
        )
        if condition is not None:
            statement = statement.where(condition)

        def read(connection: Connection) -> list[TaskRecord]:
            return [
                TaskRecord(id, status, progress, bytes(data), dict(metadata))
                for id, status, progress, data, metadata in connection.execute(statement)
                if data is not None and isinstance(metadata, Mapping)  # else it is a task of somebody else
            ]

        return await self._thread(lambda: self._transaction(read))

    async def _set(self, task_id: str, **values: Any) -> None:
        statement = self._table.update().where(self._table.c.id == task_id).values(updated_at=_now(), **values)
        await self._write(lambda: self._execute(statement))

    async def _write(self, function: Callable[[], T]) -> T:
        """One at a time: SQLite has no more than one writer, and others gain nothing by a crowd."""
        async with self._lane().turn:
            return await self._thread(function)

    async def _thread(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, limiter=self._lane().threads)

    def _lane(self) -> _Lane:
        """What belongs to the loop that runs this code."""
        loop = current_loop()
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None or lane.loop is not loop:
            lane = self._lanes.lane = _Lane(loop)
        return lane


class _Job:
    """One `replace_task` that waits for its transaction."""

    __slots__ = ("done", "error", "expected", "record", "replaced")

    def __init__(self, record: TaskRecord, expected: int | None) -> None:
        self.record, self.expected = record, expected
        self.done = self.replaced = False
        self.error: Exception | None = None


class _Lane:
    """The queue of one event loop: whose turn it is to write, and which threads do it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.turn = anyio.Lock()
        self.threads = anyio.CapacityLimiter(THREADS)
        self.jobs: list[_Job] = []


class _DoesNotFitError(Exception):
    """Rolls a transaction back."""


def _row(record: TaskRecord) -> dict[str, Any]:
    return {
        "status": record.status,
        "progress": record.progress,
        "data": record.data,
        "metadata": dict(record.metadata),
        "revision": record.revision,
        "updated_at": _now(),
    }


def _bound(job: _Job) -> dict[str, Any]:
    values = {"id": job.record.id, "expected": job.expected, **_row(job.record)}
    return {f"b_{name}": value for name, value in values.items()}


def _now() -> datetime:
    return datetime.now(UTC)


def _define(name: str) -> Table:
    from sqlalchemy import JSON, BigInteger, Column, DateTime, Double, LargeBinary, MetaData, String, Table

    schema, _, table = name.rpartition(".")
    binary = LargeBinary(2**32 - 1)  # the length makes it a LONGBLOB where a plain BLOB holds 64 KiB
    return Table(
        table,
        MetaData(schema=schema or None),
        Column("id", String(255), primary_key=True),
        Column("status", String(32), nullable=False, index=True),
        Column("progress", Double, nullable=False),
        Column("data", binary, nullable=False),
        Column("metadata", JSON, nullable=False),
        Column("revision", BigInteger, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("updated_at", DateTime(timezone=True), nullable=False),
    )


def _needed_isolation(engine: Engine) -> str | None:
    """What connections are to be set to because those of the application's engine commit each statement by themselves
    (AUTOCOMMIT): what is written together must be taken back together. None if they have transactions."""
    with engine.connect() as connection:
        own = _commits_by_itself(connection.connection.dbapi_connection)
        return str(connection.default_isolation_level) if own else None


def _commits_by_itself(connection: Any) -> bool:
    """By what drivers call it: most have an attribute, some a method, and sqlite3 no isolation level then."""
    setting = getattr(connection, "autocommit", None)
    if isinstance(setting, bool):
        return setting
    ask = getattr(connection, "get_autocommit", None)
    return bool(ask()) if callable(ask) else getattr(connection, "isolation_level", "") is None


def _check_columns(engine: Engine, table: Table) -> None:
    """Refuse somebody else's table of the same name."""
    from sqlalchemy import inspect

    inspector = inspect(engine)
    found = {column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)}
    wanted = {column.name for column in table.columns}
    missing = sorted(wanted - found.keys())
    strange = sorted(name for name in found.keys() - wanted if not _is_optional(found[name]))
    if missing or strange:
        problems = [f"it lacks {', '.join(missing)}"] if missing else []
        problems += [f"it demands {', '.join(strange)}"] if strange else []
        raise StoreSettingsError(KIND, f"table {table.fullname} is another one: {' and '.join(problems)}")
    if _python_type(found["data"]["type"]) is not bytes:
        raise StoreSettingsError(KIND, f"table {table.fullname} is another one: its column data holds no bytes")
    key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    if key != ["id"]:
        raise StoreSettingsError(KIND, f"table {table.fullname} is another one: its primary key is not id")


def _is_optional(column: Mapping[str, Any]) -> bool:
    return bool(column["nullable"]) or any(column.get(name) is not None for name in ("default", "identity", "computed"))


def _python_type(type: Any) -> Any:
    try:
        return type.python_type
    except NotImplementedError:
        return None


def _make_engine(url: Any) -> Engine:
    from sqlalchemy import URL, create_engine, event, make_url
    from sqlalchemy.exc import ArgumentError

    if not isinstance(url, str | URL):
        raise StoreSettingsError(KIND, f"give a synchronous engine or a URL, not {type(url).__name__}")
    try:
        parsed = make_url(url)
        if parsed.drivername in _DRIVERS:
            parsed = parsed.set(drivername=_DRIVERS[parsed.drivername])
        sqlite = parsed.get_backend_name() == "sqlite"
        options = {"connect_args": {"timeout": SQLITE_PATIENCE}} if sqlite else {}
        engine = create_engine(parsed, hide_parameters=True, pool_pre_ping=True, **options)
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        # Neither the URL nor the driver's words: a password may stand in them.
        problem = "its driver is not installed" if isinstance(error, ImportError) else "the URL cannot be used"
        raise StoreSettingsError(KIND, problem) from None
    if sqlite:
        event.listen(engine, "connect", _make_durable)
    return engine


def _make_durable(connection: Any, _record: object) -> None:
    """EXTRA is FULL plus a sync of the directory, without which the last commit can be lost with the power."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=EXTRA")
    cursor.close()


def _refuse_memory(engine: Engine) -> None:
    url = engine.url
    if url.get_backend_name() == "sqlite" and (not url.database or ":memory:" in url.database):
        raise StoreSettingsError(KIND, "SQLite in memory is lost with the process; name a file, or use memory:")


def _plain(error: Exception) -> str:
    """Kinds of errors only: a message can hold the statement, its values, or where the server is."""
    cause = getattr(error, "orig", None)
    kinds: Iterable[object] = (error,) if cause is None else (error, cause)
    return " from ".join(type(kind).__name__ for kind in kinds)
