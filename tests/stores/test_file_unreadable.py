"""Executions in the file store that cannot be read at all: listed, reported, kept, deletable; never silent (I5)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import (
    CorruptDataError,
    ExecutionBlockedError,
    ExecutionNotFoundError,
    Executor,
    ExecutorConfig,
    FileCheckpointStore,
    NewerFormatError,
    StepRegistry,
)
from longrun.errors import LeaseLostError
from longrun.records import ExecutionState
from longrun.stored import Query
from longrun.stores._file.lines import Identity, pack, unpack
from longrun.stores._file.reading import START_SIZE
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.crashing import CrashableExecutor, crash
from tests.stores.file_tools import created, done, ids_of, loaded, opened

BLOCKED = ExecutionState.BLOCKED
NO_RESUME = ExecutorConfig(auto_resume=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Program:
    """Two steps; the second one waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()
        self.registry.register("first", self.first)
        self.registry.register("second", self.second)
        self.registry.workflow("work", ["first", "second"])

    async def first(self, state: int) -> int:
        return state + 1

    async def second(self, state: int) -> int:
        self.begun.set()
        await self.go.wait()
        return state + 1


async def left(path: Path, *ids: str) -> Program:
    """A program that crashed in the second step of these executions."""
    program = Program()
    async with CrashableExecutor(program.registry, store=FileCheckpointStore(path)) as dying:
        for id in ids:
            program.begun = anyio.Event()
            await dying.start("work", 1, id=id, metadata={"of": id})
            await program.begun.wait()
        await crash(dying)
    program.go.set()
    return program


# ways to damage a journal


def flipped(*kinds: str) -> Callable[[bytes], bytes]:
    """One bit in every line of these kinds."""

    def damage(data: bytes) -> bytes:
        lines = [bytearray(line) for line in data.splitlines(keepends=True)]
        for line in lines:
            if json.loads(line)["kind"] in kinds:
                line[len(line) // 2] ^= 0x04
        return b"".join(lines)

    return damage


def flipped_once(number: int) -> Callable[[bytes], bytes]:
    """One bit in the line of this number."""

    def damage(data: bytes) -> bytes:
        lines = [bytearray(line) for line in data.splitlines(keepends=True)]
        lines[number][len(lines[number]) // 2] ^= 0x04
        return b"".join(lines)

    return damage


def cut_behind_the_first(data: bytes) -> bytes:
    return data[: data.index(b"\n") + 20]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "holds no whole line"),
    "cut in the first line": (lambda data: data[:40], "holds no whole line"),
    "cut in the second line": (cut_behind_the_first, "list of steps and its position cannot be read"),
    "zeros": (lambda data: bytes(len(data)), "holds no whole line"),
    "every line": (flipped("definition", "steps", "save"), "nothing of it is readable"),
    "both definitions": (flipped("definition"), "its definition cannot be read"),
    "both lists of steps": (flipped("steps"), "its list of steps cannot be read"),
    "all of the first lines": (flipped("definition", "steps"), "definition and its list of steps cannot be read"),
    "every state": (flipped("save"), "its position cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGE)
async def test_what_cannot_be_read_is_listed_reported_logged_and_can_be_deleted(
    path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """I5: one damaged journal, and nothing else is lost; the bytes outlive even the deletion."""
    program = await left(path, "a", "b", "c")
    damage, says = DAMAGE[how]
    journal = path / "live" / "b.0.jsonl"
    bad = damage(journal.read_bytes())
    journal.write_bytes(bad)
    with caplog.at_level(logging.ERROR, "longrun"):
        async with Executor(program.registry, store=FileCheckpointStore(path), config=NO_RESUME) as executor:
            report = await executor.auto_resume_all()
            assert (sorted(report.resumed), list(report.blocked)) == (["a", "c"], ["b"])
            assert says in report.blocked["b"]
            await check_listed(executor, "b", says)
            assert [one.id for one in await executor.list(after="b")] == [
                one.id for one in await executor.list(after=await executor.get("b"))
            ]
            await check_refused(executor, "b", says)
            await check_next_step(executor, path, "b", bad)
            for id in "ac":
                assert await (await executor.handle(id)).result() == 3
            await check_deleted(executor, "b")
    assert {"execution.unreadable", "store.unreadable"} <= {record.getMessage().split()[0] for record in caplog.records}
    if bad:
        assert bad in [kept.read_bytes() for kept in (path / "quarantine").iterdir()]


async def check_listed(executor: Executor, id: str, says: str) -> None:
    (found,) = await executor.list(state="blocked")
    assert (found.id, found.owner) == (id, None)
    assert says in str(found.reason)
    assert id in [one.id for one in await executor.list()]
    assert (await executor.count())[BLOCKED] == 1


async def check_refused(executor: Executor, id: str, says: str) -> None:
    """Every call on it says what is wrong, and looking at it shows what a listing shows."""
    found = await executor.get(id)
    assert found.state == BLOCKED
    assert re.search(says, str(found.reason))
    with pytest.raises(ExecutionBlockedError, match=says):
        await (await executor.handle(id)).result()
    calls: list[Callable[[str], Any]] = [executor.cancel, executor.resume, executor.history]
    for call in calls:
        with pytest.raises(CorruptDataError, match=says):
            await call(id)


async def check_next_step(executor: Executor, path: Path, id: str, bad: bytes) -> None:
    """The error tells where the bytes are, and what can be done; a listing says the same."""
    with pytest.raises(CorruptDataError, match="`delete` removes it") as raised:
        await executor.history(id)
    (kept,) = re.findall(rf"its bytes are kept in (quarantine/{id}\.0\.jsonl\S+),", str(raised.value))
    assert (path / kept).read_bytes() == bad
    (found,) = await executor.list(state="blocked")
    assert found.reason == str(raised.value)


async def check_deleted(executor: Executor, id: str) -> None:
    """It is gone, and its id is free."""
    await executor.delete(id)
    assert id not in [one.id for one in await executor.list()]
    with pytest.raises(ExecutionNotFoundError):
        await executor.get(id)
    assert BLOCKED not in await executor.count()
    assert await (await executor.start("work", 5, id=id)).result() == 7


async def test_a_renamed_journal_is_listed_under_the_id_of_its_name(path: Path) -> None:
    """I5: it is nobody's: neither the one that it names nor the one that it holds is run from it."""
    program = await left(path, "a", "b")
    (path / "live" / "b.0.jsonl").rename(path / "live" / "other%3A1.0.jsonl")
    async with Executor(program.registry, store=FileCheckpointStore(path), config=NO_RESUME) as executor:
        report = await executor.auto_resume_all()
        assert (report.resumed, list(report.blocked)) == (("a",), ["other:1"])
        says = "its journal belongs to execution 'b'"
        await check_listed(executor, "other:1", says)
        await check_refused(executor, "other:1", says)
        await check_deleted(executor, "other:1")
    assert any((path / "quarantine").iterdir())


async def test_a_journal_under_another_generation_is_found_again(path: Path) -> None:
    """I5: the first journal of an execution shows that its id is taken; without it a listing does."""
    program = await left(path, "a")
    (path / "live" / "a.0.jsonl").rename(path / "live" / "a.3.jsonl")
    async with Executor(program.registry, store=FileCheckpointStore(path), config=NO_RESUME) as executor:
        assert list((await executor.auto_resume_all()).blocked) == ["a"]
        await check_listed(executor, "a", "generation 0")
        await check_refused(executor, "a", "generation 0")
        await check_deleted(executor, "a")


@pytest.mark.parametrize("number", [0, 1, 2, 3])
async def test_one_damaged_first_line_costs_nothing(path: Path, number: int) -> None:
    """I5, I2: definition and steps stand there twice; the execution goes on where it was."""
    program = await left(path, "a")
    journal = path / "live" / "a.0.jsonl"
    journal.write_bytes(flipped_once(number)(journal.read_bytes()))
    async with Executor(program.registry, store=FileCheckpointStore(path), config=NO_RESUME) as executor:
        (found,) = await executor.list()
        assert (found.name, found.state, found.metadata) == ("work", "running", {"of": "a"})
        assert (await executor.auto_resume_all()).resumed == ("a",)
        run = await executor.handle("a")
        assert await run.result() == 3
        assert (await run.info()).step_names == ("first", "second")
    assert len(list((path / "quarantine").iterdir())) == 1


async def test_damage_that_costs_nothing_blocks_where_that_is_asked_for(path: Path) -> None:
    """I5: `on_corruption="block"`, and `resume` frees it."""
    program = await left(path, "a")
    journal = path / "live" / "a.0.jsonl"
    journal.write_bytes(flipped_once(0)(journal.read_bytes()))
    config = ExecutorConfig(auto_resume=False, on_corruption="block")
    async with Executor(program.registry, store=FileCheckpointStore(path), config=config) as executor:
        assert list((await executor.auto_resume_all()).blocked) == ["a"]
        assert (await executor.get("a")).state is BLOCKED
        await executor.resume("a")
        assert await (await executor.handle("a")).result() == 3


async def test_a_newer_format_is_refused(path: Path) -> None:
    """I14."""
    program = await left(path, "a")
    (path / "longrun.json").write_text(json.dumps({"store": "file", "format": 2}))
    with pytest.raises(NewerFormatError, match="upgrade longrun"):
        async with Executor(program.registry, store=FileCheckpointStore(path)):
            pass


# the backend


def test_journals_of_the_first_kind_are_read(path: Path) -> None:
    """I14: definition and steps once, as they were written at first."""
    with opened(FileBackend(path)) as backend:
        created(backend, owned("a"))
        known = loaded(backend, "a")
    journal = path / "live" / "a.0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    identity = Identity("a", 0)
    save = unpack(lines[4].rstrip(b"\n"), identity)
    journal.write_bytes(b"".join([*lines[:2], pack(identity, 3, save.fields, save.payloads)]))
    with opened(FileBackend(path)) as backend:
        assert loaded(backend, "a") == known
        assert [one.definition.id for one in backend.find(Query())] == ["a"]
        (given,) = backend.claim(claim("new", dead=frozenset({"me"})))
        done(backend, step("a", given.head))
        assert loaded(backend, "a").boundary.seq == 2


def test_in_step_progress_outlives_a_damaged_first_line(path: Path) -> None:
    """I5: entries are dropped only where the damage can have touched them."""
    with opened(FileBackend(path)) as backend:
        new = owned("a")
        done(backend, new, change("a", new.head, put={"cursor": b"7"}))
    journal = path / "live" / "a.0.jsonl"
    journal.write_bytes(flipped_once(1)(journal.read_bytes()))
    with opened(FileBackend(path)) as other:
        found = other.load("a")
        assert found is not None
        assert (found.entries, bool(found.damage)) == ({"cursor": b"7"}, True)
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
        assert given.entries == {"cursor": b"7"}


def test_a_claim_that_finds_it_unreadable_blocks_it_for_everybody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I3, I5: a large journal looks whole by its ends; who claims it finds out, and the old owner, who was away for a
    while, is shut out and leaves no trace."""
    monkeypatch.setattr("longrun.stores._file.journal.FRESH", -1.0)
    backend, other = FileBackend(path), FileBackend(path)
    with opened(backend), opened(other):
        new = owned("a", data=b"x" * 40_000)
        saves = [new.head]
        done(backend, new, owned("b"))
        for _ in range(90):
            save = change("a", saves[-1], head_fields={"note": "n" * 400})
            done(backend, save)
            saves.append(save.head)
        journal = path / "live" / "a.0.jsonl"
        journal.write_bytes(journal.read_bytes().replace(b'"kind":"state","seq":1', b'"kind":"state","seq":2'))
        assert {one.head.state for one in other.find(Query())} == {ExecutionState.RUNNING}
        assert ids_of(other.claim(claim("new", dead=frozenset({"me"})))) == ["b"]
        for one in (backend, other):
            (found,) = one.find(Query(states=frozenset({BLOCKED})))
            assert (found.definition.id, found.definition.workflow, found.head.owner) == ("a", "flow", None)
            assert "no state of it is readable" in str(found.head.reason)
            assert one.claim(claim("new", ids=("a",))) == []
            with pytest.raises(CorruptDataError):
                one.load("a")
        (answer,) = backend.commit([step("a", saves[-1])])
        assert isinstance(answer, LeaseLostError)
        assert sorted(name.name for name in (path / "live").glob("a.*")) == ["a.0.jsonl", "a.1.jsonl"]
        assert other.delete(["a"]) == [True]
        assert [one.definition.id for one in backend.find(Query())] == ["b"]
        assert list((path / "live").glob("a.*")) == []


def test_a_journal_that_is_damaged_under_its_owner_spoils_no_other_write(path: Path) -> None:
    """I5: the answer to its save says so; the others of the batch are stored."""
    with opened(FileBackend(path)) as backend:
        a, b = owned("a"), owned("b")
        created(backend, a, b)
        (path / "live" / "a.0.jsonl").write_bytes(b"")
        first, second, third = backend.commit([step("a", a.head), step("b", b.head), send("a")])
        assert second is None
        assert isinstance(first, CorruptDataError)
        assert isinstance(third, CorruptDataError)
        assert loaded(backend, "b").boundary.seq == 2
        assert backend.commit([create("a")]) == [False]


@pytest.mark.parametrize("how", ["empty", "zeros", "both definitions", "both lists of steps"])
def test_what_is_finished_and_cannot_be_read_stays_listed(path: Path, how: str) -> None:
    """I5, I8: by the index, and where that is lost too by what is left of the journal."""
    ended = ExecutionState.COMPLETED
    with opened(FileBackend(path)) as backend:
        created(backend, create("a", ended), create("b", ended))
    journal = path / "done" / "b.jsonl"
    journal.write_bytes(DAMAGE[how][0](journal.read_bytes()))
    with opened(FileBackend(path)) as backend:
        assert [one.definition.id for one in backend.find(Query())] == ["b", "a"]
        assert backend.count(Query()) == {ended: 2}
        assert "it is completed, but" in check_same(backend, "b", ended)
    (path / "finished.jsonl").unlink()
    with opened(FileBackend(path)) as backend:
        found = {one.definition.id: one.head for one in backend.find(Query())}
        assert set(found) == {"a", "b"}
        assert found["b"].state in (ended, BLOCKED)
        check_same(backend, "b", found["b"].state)
        assert sum(backend.count(Query()).values()) == 2
        assert backend.delete(["b", "b"]) == [True, False]
        assert [one.definition.id for one in backend.find(Query())] == ["a"]
        assert backend.load("b") is None


def check_same(backend: StoreBackend, id: str, state: ExecutionState) -> str:
    """A listing shows an execution with what `load` says of it."""
    with pytest.raises(CorruptDataError) as raised:
        backend.load(id)
    (found,) = [one for one in backend.find(Query()) if one.definition.id == id]
    assert (found.head.state, found.head.reason) == (state, str(raised.value))
    return str(raised.value)


@pytest.mark.parametrize("index", ["index", "no index"])
def test_a_finished_journal_that_lost_its_last_line_does_not_run_again(path: Path, index: str) -> None:
    """I8: what stands before it says `running`, and that is over; nobody gets it, and no older state is its result."""
    with opened(FileBackend(path)) as backend:
        new = owned("b")
        over = {"state": ExecutionState.COMPLETED, "owner": None}
        done(backend, new, change("b", new.head, head_fields=over))
    journal = path / "done" / "b.jsonl"
    journal.write_bytes(flipped_once(-1)(journal.read_bytes()))
    if index == "no index":
        (path / "finished.jsonl").unlink()
    with opened(FileBackend(path)) as backend:
        state = ExecutionState.COMPLETED if index == "index" else BLOCKED
        assert "its end is not readable" in check_same(backend, "b", state)
        assert backend.count(Query()) == {state: 1}
        assert backend.claim(claim("new", ids=("b",), dead=frozenset({"me"}))) == []
        assert backend.delete(["b"]) == [True]
        assert backend.load("b") is None
        assert backend.find(Query()) == []


def retried(path: Path, **fields: Any) -> Path:
    """The journal in done/ of an execution that failed, and ended well when it was retried."""
    failed = frozenset({ExecutionState.FAILED})
    with opened(FileBackend(path)) as backend:
        created(backend, create("a", ExecutionState.FAILED, **fields))
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        (given,) = backend.claim(claim("me", ids=("a",), states=failed))
        journal = backend._open.writes.journals.get("a")
        assert journal is not None
        journal.compact()
        over = {"state": ExecutionState.COMPLETED, "owner": None}
        done(backend, change("a", given.head, head_fields=over))
    return path / "done" / "a.jsonl"


def test_what_was_retried_and_has_a_long_definition_is_sound(path: Path) -> None:
    """I5: of which generation it is stands in a first line of any length."""
    journal = retried(path, metadata={"note": "x" * 3 * START_SIZE})
    assert b'"gen":1,"n":1,"kind":"definition"' in journal.read_bytes()[:100]
    with opened(FileBackend(path)) as backend:
        assert loaded(backend, "a").head.state is ExecutionState.COMPLETED
    assert not list((path / "quarantine").iterdir())


@pytest.mark.parametrize("note", ["x", "x" * 3 * START_SIZE], ids=["short", "long"])
def test_a_damaged_first_line_costs_nothing_of_what_was_retried(path: Path, note: str) -> None:
    """I5: each other line says as well of which generation it is."""
    journal = retried(path, metadata={"note": note})
    journal.write_bytes(b"#" + journal.read_bytes()[1:])
    with opened(FileBackend(path)) as backend:
        found = backend.load("a")
        assert found is not None
        assert (found.head.state, found.definition.metadata) == (ExecutionState.COMPLETED, {"note": note})
        assert len(found.damage) == 1
    assert len(list((path / "quarantine").iterdir())) == 1
