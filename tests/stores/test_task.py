"""Executions in an application's own task table: with `replace_task` shared and fenced; without it, one at a time."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import (
    CodecError,
    ConfigError,
    CorruptDataError,
    ExecutionExistsError,
    ExecutionNotFoundError,
    LeaseLostError,
    NewerFormatError,
    StoreSettingsError,
    StoreUnavailableError,
)
from longrun.records import ExecutionState
from longrun.stored import Head, Query
from longrun.stores._task.document import decode
from longrun.stores._task.table import TaskTable
from longrun.stores._task.work import TaskWork
from longrun.stores.store import CheckpointStore
from longrun.stores.task import STATUSES, TaskBackend, TaskCheckpointStore, TaskRecord
from longrun.testing import StoreConformance
from longrun.testing.samples import EVERY_STATE, NOW, boundary, change, claim, create, owned, send, step

ME = frozenset({"me"})


class SixMethods:
    """The least that an application has to write. Its rows are text where text is, and bytes where bytes are."""

    def __init__(self) -> None:
        self.rows: dict[str, TaskRecord] = {}
        self.calls: list[str] = []

    async def save_task(self, record: TaskRecord) -> None:
        self.calls.append("save_task")
        self.rows[record.id] = record

    async def get_task(self, task_id: str) -> TaskRecord | None:
        self.calls.append("get_task")
        return self.rows.get(task_id)

    async def list_tasks(self) -> list[TaskRecord]:
        self.calls.append("list_tasks")
        return list(self.rows.values())

    async def delete_task(self, task_id: str) -> None:
        self.calls.append("delete_task")
        self.rows.pop(task_id, None)

    async def update_progress(self, task_id: str, progress: float) -> None:
        self.calls.append("update_progress")
        self.rows[task_id] = attrs.evolve(self.rows[task_id], progress=progress)

    async def update_status(self, task_id: str, status: str) -> None:
        self.calls.append("update_status")
        self.rows[task_id] = attrs.evolve(self.rows[task_id], status=status)


class SevenMethods(SixMethods):
    """With the seventh, and with `list_tasks` by status."""

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        self.calls.append("replace_task")
        stored = self.rows.get(record.id)
        if (None if stored is None else stored.revision) != expected_revision:
            return False
        self.rows[record.id] = record
        return True

    async def list_tasks(self, *, status: str | None = None) -> list[TaskRecord]:
        self.calls.append("list_tasks")
        return [record for record in self.rows.values() if status in (None, record.status)]


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "run"))


@pytest.mark.thorough  # the SQLAlchemy store has the seventh method too, and runs the whole suite in tests/campaign
class TestFencedTaskStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.adapter = SevenMethods()

    def make_store(self) -> CheckpointStore:
        return TaskCheckpointStore(self.adapter)

    def damage_definition(self, id: str) -> None:
        self.adapter.rows[id] = attrs.evolve(self.adapter.rows[id], data=b"changed")


class TestTaskStoreOfSixMethods(StoreConformance):
    fenced = False
    shared = False

    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.adapter: Any = SixMethods()  # its `list_tasks` takes no status, which will do as well

    def make_store(self) -> CheckpointStore:
        return TaskCheckpointStore(self.adapter)

    def damage_definition(self, id: str) -> None:
        self.adapter.rows[id] = attrs.evolve(self.adapter.rows[id], data=b"changed")


@contextlib.contextmanager
def opened(adapter: Any, **options: Any) -> Iterator[TaskBackend]:
    backend = TaskBackend(adapter, **options)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def run(backend: TaskBackend, id: str, steps: int, *, history: int = 3) -> Head:
    """An execution of "me" that has finished so many steps; the newest few states are kept."""
    new = owned(id)
    assert backend.commit([new]) == [True]
    head = new.head
    for _ in range(steps):
        save = step(id, head, keep_from=head.seq + 2 - history)
        assert backend.commit([save]) == [None]
        head = save.head
    return head


# --- the record ------------------------------------------------------------------------------------------------------


def test_the_record_tells_the_applications_screens() -> None:
    adapter = SevenMethods()
    with opened(adapter) as backend:
        fields = {"owner": "me", "fence": 2, "progress": 0.25, "step": 1}
        backend.commit([create("a", head_fields=fields, workflow="crawl", queue="q", parent_id="p")])
    record = adapter.rows["a"]
    assert (record.status, record.progress, record.revision) == ("running", 0.25, 1)
    shown = {"workflow": "crawl", "state": "running", "queue": "q", "owner": "me", "step": "1", "parent": "p"}
    assert shown.items() <= record.metadata.items()
    assert all(isinstance(value, str) for value in record.metadata.values())


def test_the_data_is_one_json_document_with_its_format() -> None:
    adapter = SevenMethods()
    with opened(adapter) as backend:
        backend.commit([create("a", data=b'{"x": 1}', blobs={"b": b"\xff\x00"})])
    document = json.loads(adapter.rows["a"].data)
    assert (document["longrun"], document["id"]) == (1, "a")
    parts = {key: value for part in document["parts"] for key, value in part.items()}
    assert parts["boundary"]["data"] == '{"x": 1}'
    assert parts["blob"] == {"name": "b", "data": {"base64": "/wA="}}


@pytest.mark.parametrize("state", list(ExecutionState))
def test_every_state_has_its_status(state: ExecutionState) -> None:
    adapter = SevenMethods()
    with opened(adapter) as backend:
        backend.commit([create("a", state)])
    assert adapter.rows["a"].status == STATUSES[state]


def test_one_save_is_one_write_and_nothing_else() -> None:
    """No second call that could fail alone, and no read: what this process wrote last is known."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        new = owned("a")
        backend.commit([new])
        (given,) = backend.claim(claim(dead=ME))
        adapter.calls.clear()
        second = step("a", given.head)
        assert backend.commit([second, step("a", second.head)]) == [None, None]
        assert adapter.calls == ["replace_task"]


def test_a_long_execution_keeps_a_small_record() -> None:
    """Its cost a save does not grow with its steps (I16), and every row stays readable for its life (I7)."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        run(backend, "a", 99)
        small = len(adapter.rows["a"].data)
        head = backend.claim(claim(dead=ME))[0].head
        for _ in range(400):
            save = step("a", head, keep_from=head.seq - 1)
            assert backend.commit([save]) == [None]
            head = save.head
        assert len(adapter.rows["a"].data) < 1.5 * small
        assert [row.seq for row in backend.boundaries("a")] == list(range(1, 501))
        assert [row.seq for row in backend.boundaries("a", after=100, limit=70)] == list(range(101, 171))
        assert backend.boundaries("a", after=41, limit=1)[0].name == "step 41"
        found = backend.checkpoint("a", 500)
        assert found is not None
        assert found[0].data == b"state 500"
        assert backend.size("a") > len(adapter.rows["a"].data)
        backend.commit([change("a", head, head_fields={"state": ExecutionState.COMPLETED, "owner": None})])
        assert backend.delete(["a"]) == [True]
    assert adapter.rows == {}


# --- beside the application's own ------------------------------------------------------------------------------------


def test_tasks_of_the_application_are_left_alone() -> None:
    adapter = SevenMethods()
    theirs = TaskRecord("mail-7", "running", 0.5, b"\x80 not ours", {"to": "somebody"})
    adapter.rows[theirs.id] = theirs
    with opened(adapter) as backend:
        backend.commit([create("a")])
        assert [found.definition.id for found in backend.find(Query())] == ["a"]
        assert backend.count(Query()) == {ExecutionState.RUNNING: 1}
        assert [given.definition.id for given in backend.claim(claim(ids=("a", "mail-7")))] == ["a"]
        answers = backend.commit([create("mail-7"), send("mail-7")])
        assert [type(answer) for answer in answers] == [ExecutionExistsError, ExecutionNotFoundError]
        assert backend.delete(["mail-7"]) == [False]
        assert backend.load("mail-7") is None
    assert adapter.rows["mail-7"] == theirs


def test_a_status_that_the_application_changed_hides_nothing_for_long() -> None:
    """I4: the status is for people; once a minute every task is looked at, whatever it says."""
    clock = Later()
    adapter = SevenMethods()
    with opened(adapter, clock=clock) as backend:
        backend.commit([create("a")])
        backend.next_due()
        adapter.rows["a"] = attrs.evolve(adapter.rows["a"], status="on hold")
        clock.offset = 61.0
        assert [given.definition.id for given in backend.claim(claim())] == ["a"]
        assert adapter.rows["a"].status == "running"


class Later(Clock):
    """The system's clock, and some seconds more."""

    offset = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.offset


# --- damage ----------------------------------------------------------------------------------------------------------


def broken(record: TaskRecord, kind: str, *, last: bool = True) -> TaskRecord:
    """The record with one byte changed in a line of this kind."""
    lines = record.data.split(b"\n")
    numbers = [n for n, line in enumerate(lines) if line[18:].startswith(f'"{kind}"'.encode())]
    number = numbers[-1 if last else 0]
    line = lines[number]
    lines[number] = line[:-5] + bytes([line[-5] ^ 1]) + line[-4:]
    return attrs.evolve(record, data=b"\n".join(lines))


def quarantined(adapter: SixMethods) -> list[bytes]:
    return [row.data for id, row in adapter.rows.items() if id.startswith("~damaged~")]


def test_a_damaged_checkpoint_takes_the_execution_back_to_the_one_before() -> None:
    """I5: found by its checksum, kept in quarantine, and said; entries of another visit go."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        head = run(backend, "a", 3)
        saved = change("a", head, put={"cursor": b"9"}, head_fields={"attempt": 2})
        backend.commit([saved, create("b")])
        damaged = adapter.rows["a"] = broken(adapter.rows["a"], "boundary")
        found = backend.load("a")
        assert found is not None
        assert (found.boundary.seq, found.boundary.data) == (3, b"state 3")
        moved: dict[str, Any] = {"step": 2, "visit": 3, "attempt": 0}
        assert found.head == attrs.evolve(saved.head, **moved)
        assert (found.entries, [seq for seq, _ in found.kept]) == ({}, [2, 3])
        assert any("taken back to checkpoint 3" in sentence for sentence in found.damage)
        assert quarantined(adapter) == [damaged.data]
        with pytest.raises(CorruptDataError):
            backend.checkpoint("a", 4)
        assert backend.load("b") is not None


def test_a_claim_mends_what_is_damaged_and_goes_on_behind_it() -> None:
    """I5, I7: the report stays until the new owner has written, and the numbers go on behind the highest."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        run(backend, "a", 3)
        adapter.rows["a"] = broken(adapter.rows["a"], "boundary")
        assert backend.commit([send("a")]) == [1]
        (given,) = backend.claim(claim("new", dead=ME))
        assert given.damage
        assert (given.head.seq, given.head.step, given.boundary.seq) == (4, 2, 3)
        assert backend.commit([step("a", given.head)]) == [None]
        found = backend.load("a")
        assert found is not None
        assert (found.damage, found.boundary.seq, found.head.seq) == ((), 5, 5)
        assert [row.seq for row in backend.boundaries("a")] == [1, 2, 3, 5]
        assert backend.checkpoint("a", 4) is None


def test_a_lost_blob_makes_its_checkpoint_unreadable() -> None:
    adapter = SevenMethods()
    with opened(adapter) as backend:
        new = owned("a")
        backend.commit([new, step("a", new.head, blobs={"b": b"blob"}, boundaries=(boundary(2, blobs=("b",)),))])
        adapter.rows["a"] = broken(adapter.rows["a"], "blob")
        found = backend.load("a")
        assert found is not None
        assert (found.boundary.seq, found.head.step) == (1, 0)
        with pytest.raises(CorruptDataError):
            backend.checkpoint("a", 2)


def test_the_head_is_there_twice() -> None:
    adapter = SevenMethods()
    with opened(adapter) as backend:
        head = run(backend, "a", 2)
        adapter.rows["a"] = broken(adapter.rows["a"], "head")
        found = backend.load("a")
        assert found is not None
        assert (found.head, len(found.damage)) == (head, 1)
        assert [one.head for one in backend.find(Query())] == [head]


def test_without_any_head_the_newest_boundary_tells() -> None:
    """I3, I5: the fence is not lost with it, so that an owner from before is still refused."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        head = run(backend, "a", 2)
        adapter.rows["a"] = broken(broken(adapter.rows["a"], "head"), "end")
        (given,) = backend.claim(claim("new", dead=ME))
        assert (given.head.fence, given.head.revision, given.head.seq, given.head.step) == (2, 2, 3, 2)
        (refusal,) = backend.commit([step("a", head)])
        assert isinstance(refusal, LeaseLostError)


def test_a_finished_execution_without_a_head_stays_finished() -> None:
    """I8."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        new = owned("a")
        end = step("a", new.head, boundaries=(boundary(2, kind="finish"),))
        ended: dict[str, Any] = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
        backend.commit([new, attrs.evolve(end, head=attrs.evolve(end.head, **ended))])
        adapter.rows["a"] = broken(broken(adapter.rows["a"], "head"), "end")
        found = backend.load("a")
        assert found is not None
        assert found.head.state is ExecutionState.COMPLETED
        assert backend.claim(claim()) == []


def test_a_record_in_the_place_of_another_is_found_out() -> None:
    """I5: the checksums hold the execution's id. What cannot be read is shown as blocked, and its bytes stay."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        backend.commit([create("a"), create("b")])
        strayed = adapter.rows["b"] = attrs.evolve(adapter.rows["a"], id="b")
        with pytest.raises(CorruptDataError):
            backend.load("b")
        assert backend.claim(claim(ids=("b",))) == []
        assert [given.definition.id for given in backend.claim(claim())] == ["a"]
        assert (adapter.rows["b"].status, adapter.rows["b"].data) == ("blocked", strayed.data)
        assert quarantined(adapter) == [strayed.data]


def test_no_changed_byte_goes_unnoticed() -> None:
    """I5: whatever byte is flipped or wherever it is cut, the answer is the same, or says that something is wrong."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        new = owned("a", blobs={"b": b"\xff blob"})
        saved = step("a", new.head, put={"e": b"1"}, boundaries=(boundary(2, blobs=("b",)),))
        backend.commit([new, saved, send("a", key="k", payload=b"p")])
    good = adapter.rows["a"]
    whole = decode("a", good.data, {}).loaded()
    assert whole.damage == ()
    for place in range(len(good.data)):
        flipped = bytearray(good.data)
        flipped[place] ^= 1 << place % 8
        for data in (bytes(flipped), good.data[:place]):
            with contextlib.suppress(CodecError):
                found = decode("a", data, good.metadata).loaded()
                assert found.damage or found == whole, place


def test_a_newer_format_is_refused() -> None:
    """I14: and the others go on."""
    adapter = SevenMethods()
    with opened(adapter) as backend:
        backend.commit([create("a"), create("b")])
        row = adapter.rows["a"]
        newer = adapter.rows["a"] = attrs.evolve(row, data=row.data.replace(b'{"longrun":1', b'{"longrun":2', 1))
        with pytest.raises(NewerFormatError):
            backend.load("a")
        assert [given.definition.id for given in backend.claim(claim())] == ["b"]
        (answer,) = backend.commit([send("a")])
        assert isinstance(answer, NewerFormatError)
    assert adapter.rows["a"] == newer


# --- adapters that fail ----------------------------------------------------------------------------------------------


class Base64Tasks(SevenMethods):
    async def get_task(self, task_id: str) -> Any:
        record = self.rows.get(task_id)
        changed: Any = base64.b64encode(b"" if record is None else record.data).decode()
        return record and attrs.evolve(record, data=changed)


class NewIdTasks(SixMethods):
    """Gives a record that is saved again a place of its own."""

    async def list_tasks(self) -> list[TaskRecord]:
        return [record for record in self.rows.values() for _ in range(2)]


class CarelessTasks(SevenMethods):
    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        self.rows[record.id] = record
        return True


class ForgetfulTasks(SevenMethods):
    async def get_task(self, task_id: str) -> TaskRecord | None:
        record = self.rows.get(task_id)
        return record and attrs.evolve(record, metadata={})


@pytest.mark.parametrize(
    ("adapter", "word"),
    [(Base64Tasks, "bytes"), (NewIdTasks, "2 records"), (CarelessTasks, "replace_task"), (ForgetfulTasks, "metadata")],
)
def test_an_adapter_that_does_not_keep_records_is_refused(adapter: type[SixMethods], word: str) -> None:
    """Found out when the store is opened, not by the first crash; nothing is left in the table."""
    made: Any = adapter()
    backend = TaskBackend(made)
    with pytest.raises(StoreSettingsError, match=word):
        backend.open()
    assert made.rows == {}


def test_an_object_without_the_six_methods_is_refused() -> None:
    with pytest.raises(ConfigError, match="list_tasks"):
        TaskCheckpointStore(object())  # type: ignore[arg-type]


class FailingTasks(SevenMethods):
    """Fails on some ids: before it has written, or after."""

    def __init__(self) -> None:
        super().__init__()
        self.before: set[str] = set()
        self.after: set[str] = set()

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        if record.id in self.before:
            raise OSError("password=secret")
        done = await super().replace_task(record, expected_revision=expected_revision)
        if record.id in self.after:
            raise ConnectionResetError
        return done


def test_a_failing_write_is_an_error_and_the_others_go_on() -> None:
    """I10: no false acknowledgement; the adapter's words are not repeated, its error is kept as the cause."""
    adapter = FailingTasks()
    with opened(adapter) as backend:
        a, b = owned("a"), owned("b")
        backend.commit([a, b])
        adapter.before.add("a")
        refused, done = backend.commit([step("a", a.head), step("b", b.head)])
        assert isinstance(refused, StoreUnavailableError)
        assert isinstance(refused.__cause__, OSError)
        assert "secret" not in str(refused)
        assert done is None
        adapter.before.clear()
        assert backend.commit([step("a", a.head)]) == [None]


def test_a_write_whose_answer_was_lost_is_not_written_twice() -> None:
    """I9."""
    adapter = FailingTasks()
    with opened(adapter) as backend:
        new = owned("a")
        backend.commit([new])
        backend.claim(claim(dead=ME))
        save = step("a", attrs.evolve(new.head, fence=2))
        adapter.after.add("a")
        (unknown,) = backend.commit([save])
        assert isinstance(unknown, StoreUnavailableError)
        adapter.after.clear()
        assert backend.commit([save]) == [None]
        assert [row.seq for row in backend.boundaries("a")] == [1, 2]


def test_a_claim_whose_answer_was_lost_is_not_lost_itself() -> None:
    """I4, I9: the owner lives and does not know what it was given; its next claim tells, due or not."""
    adapter = FailingTasks()
    with opened(adapter) as backend:
        backend.commit([create("a", ExecutionState.WAITING, head_fields={"signal": "go", "woken": True})])
        adapter.after.add("a")
        with pytest.raises(StoreUnavailableError):
            backend.claim(claim())
        adapter.after.clear()
        (given,) = backend.claim(claim())
        assert (given.head.owner, given.head.fence) == ("me", 2)
        assert backend.claim(claim()) == []


class HangingTasks(SevenMethods):
    hanging = False

    async def get_task(self, task_id: str) -> TaskRecord | None:
        if self.hanging:
            await anyio.sleep_forever()
        return await super().get_task(task_id)


def test_an_adapter_that_hangs_is_given_up() -> None:
    adapter = HangingTasks()
    with opened(adapter, timeout=0.05) as backend:
        adapter.hanging = True
        with pytest.raises(StoreUnavailableError, match=r"0\.05 s"):
            backend.load("a")


# --- other processes -------------------------------------------------------------------------------------------------


class InterruptedTasks(SevenMethods):
    """Lets something else happen just before a record is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        if self.first is not None:
            happen, self.first = self.first, None
            await happen()
        return await super().replace_task(record, expected_revision=expected_revision)


@pytest.fixture
def crossed() -> Iterator[tuple[InterruptedTasks, TaskBackend, TaskWork]]:
    """An adapter, a store on it, and the work of another store that can be put between two acts of the first."""
    adapter = InterruptedTasks()
    with opened(adapter) as backend:
        other = TaskWork(TaskTable(adapter, clock=SYSTEM_CLOCK, timeout=5.0, concurrency=1))
        yield adapter, backend, other


Crossed = tuple[InterruptedTasks, TaskBackend, TaskWork]


def test_a_message_that_crosses_a_save_is_not_lost(crossed: Crossed) -> None:
    """I1: whoever comes second looks again, and both are there."""
    adapter, backend, other = crossed
    new = owned("a")
    backend.commit([new])
    (given,) = backend.claim(claim(dead=ME))
    adapter.first = lambda: other.commit([send("a", payload=b"hello")])
    assert backend.commit([step("a", given.head)]) == [None]
    found = backend.load("a")
    assert found is not None
    assert (found.boundary.seq, [m.payload for m in found.messages]) == (2, [b"hello"])


def test_a_takeover_that_crosses_a_save_refuses_it(crossed: Crossed) -> None:
    """I3: between the look and the write, at the latest moment there is."""
    adapter, backend, other = crossed
    backend.commit([owned("a")])
    (given,) = backend.claim(claim(dead=ME))
    adapter.first = lambda: other.claim(claim("new", dead=ME))
    (refused,) = backend.commit([step("a", given.head)])
    assert isinstance(refused, LeaseLostError)
    assert [row.seq for row in backend.boundaries("a")] == [1]


def test_a_claim_that_crosses_a_claim_gets_nothing(crossed: Crossed) -> None:
    """I3."""
    adapter, backend, other = crossed
    backend.commit([create("a")])
    adapter.first = lambda: other.claim(claim("quicker"))
    assert backend.claim(claim("slower")) == []


def test_a_retry_that_crosses_a_delete_wins(crossed: Crossed) -> None:
    """A failed execution that somebody has just claimed, to retry it, is not removed."""
    adapter, backend, other = crossed
    backend.commit([create("a", ExecutionState.FAILED)])
    adapter.first = lambda: other.claim(claim(ids=("a",), states=EVERY_STATE))
    assert backend.delete(["a"]) == [False]
    assert backend.load("a") is not None


def test_a_delete_that_a_crash_cut_short_is_finished_by_the_next_who_looks(crossed: Crossed) -> None:
    """What was marked is no execution any more, and its id is free."""
    adapter, backend, _ = crossed
    backend.commit([create("a", ExecutionState.COMPLETED)])

    class CrashError(BaseException):
        pass

    async def crash(task_id: str) -> None:
        raise CrashError

    adapter.delete_task = crash  # type: ignore[method-assign]
    with pytest.raises(BaseException):  # noqa: B017, PT011 -- alone or in a group, as the task group has it
        backend.delete(["a"])
    del adapter.delete_task
    assert backend.find(Query()) == []
    assert backend.load("a") is None
    assert backend.commit([create("a", data=b"new")]) == [True]
    found = backend.load("a")
    assert found is not None
    assert found.boundary.data == b"new"


def test_without_replace_task_a_second_user_is_refused() -> None:
    """`fenced` is False and says so; the next one may come when the first has gone."""
    adapter: Any = SixMethods()
    with opened(adapter) as backend:
        assert backend.fenced is False
        assert backend.describe()["fenced"] is False
        with pytest.raises(StoreSettingsError, match="one at a time"):
            TaskBackend(adapter).open()
        backend.commit([create("a")])
    with opened(adapter) as backend:
        assert backend.load("a") is not None
    assert set(adapter.rows) == {"a"}


# --- loops -----------------------------------------------------------------------------------------------------------


class HomeTasks(SevenMethods):
    """Notes in which thread its coroutines run."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    async def get_task(self, task_id: str) -> TaskRecord | None:
        self.threads.add(threading.get_ident())
        await anyio.lowlevel.checkpoint()
        return await super().get_task(task_id)

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        self.threads.add(threading.get_ident())
        return await super().replace_task(record, expected_revision=expected_revision)


async def test_an_adapters_coroutines_run_in_the_loop_that_opened_the_store() -> None:
    """Its pools live there. Writer, readers and watcher are threads; none of them runs a coroutine of its own."""
    adapter = HomeTasks()
    async with TaskCheckpointStore(adapter, poll_interval=0.01) as store:
        changed = anyio.Event()
        stop = store.watch(changed.set)
        assert await store.create(owned("a"))
        await store.save(step("a", owned("a").head))
        assert (await store.load("a")).boundary.seq == 2
        await changed.wait()
        stop()
    assert adapter.threads == {threading.get_ident()}


def test_a_loop_that_has_ended_is_said_to_be_gone(anyio_backend: str) -> None:
    store = TaskCheckpointStore(SevenMethods())

    async def forget_to_close() -> None:
        await store.open()

    anyio.run(forget_to_close, backend=anyio_backend)
    with pytest.raises(StoreUnavailableError, match="loop"):
        store.backend.load("a")

    async def use_again() -> None:
        async with store:
            assert await store.create(create("a"))
        await store.aclose()

    anyio.run(use_again, backend=anyio_backend)


def test_what_this_process_did_is_noticed_at_once_and_a_plain_save_by_nobody() -> None:
    adapter = SevenMethods()
    with opened(adapter, poll_interval=3600.0) as backend:
        new = owned("a")
        backend.commit([new])
        assert backend.wait(0.0) is True
        backend.wait(0.0)
        assert backend.wait(0.0) is False
        backend.commit([step("a", new.head)])
        assert backend.wait(0.0) is False
        backend.commit([send("a")])
        assert backend.wait(3600.0) is True
