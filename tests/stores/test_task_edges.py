"""The task store at its edges: adapters that break their word, tables that others change, users that went away."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from longrun.errors import (
    ConfigError,
    CorruptDataError,
    NotStorableError,
    StoreSettingsError,
    StoreUnavailableError,
)
from longrun.life import LifeLock
from longrun.stored import Owner
from longrun.stores._task import document, lines
from longrun.stores._task.records import INTERNAL
from longrun.stores._task.single import USER, _is_alive
from longrun.stores.task import TaskBackend, TaskRecord
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.stores.test_task import SevenMethods, SixMethods, opened


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


# --- what an adapter must keep to -------------------------------------------------------------------------------------


class Immortal(SevenMethods):
    """Deletes nothing but its own memory of having been asked."""

    async def delete_task(self, task_id: str) -> None:
        pass


class Stubborn(SevenMethods):
    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        return False


class Empty(SevenMethods):
    async def get_task(self, task_id: str) -> TaskRecord | None:
        return None


class Rounding(SevenMethods):
    async def get_task(self, task_id: str) -> TaskRecord | None:
        found = self.rows.get(task_id)
        return found and attrs.evolve(found, progress=float(round(found.progress)))


@pytest.mark.parametrize(
    ("adapter", "word"),
    [
        (Immortal, "still finds a record after delete_task"),
        (Stubborn, "refused the right revision"),
        (Empty, "finds nothing"),
        (Rounding, "`progress` back changed"),
    ],
)
def test_an_adapter_that_breaks_its_word_is_refused_when_the_store_is_opened(
    adapter: type[SevenMethods], word: str
) -> None:
    with pytest.raises(StoreSettingsError, match=word):
        TaskBackend(adapter()).open()


@pytest.mark.parametrize("name", ["poll_interval", "timeout", "concurrency"])
def test_a_setting_that_is_not_above_zero_is_refused(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match="above 0"):
        TaskBackend(SevenMethods(), **options)


def test_a_store_that_is_not_open_does_not_answer() -> None:
    with pytest.raises(StoreUnavailableError, match="it is not open"):
        TaskBackend(SevenMethods()).ping()


class Changing(SevenMethods):
    """Turns bytes into text once it has been found good."""

    spoils = False

    async def list_tasks(self, *, status: str | None = None) -> list[TaskRecord]:
        found = await super().list_tasks(status=status)
        text: Any = "text"
        return [attrs.evolve(one, data=text) for one in found] if self.spoils else found


def test_bytes_that_stop_being_bytes_are_damage() -> None:
    adapter = Changing()
    with opened(adapter) as backend:
        backend.commit([create("a")])
        adapter.spoils = True
        with pytest.raises(CorruptDataError, match="bytes must stay bytes"):
            backend.claim(claim())


# --- others, at the same time ----------------------------------------------------------------------------------------


class Restless(SevenMethods):
    """Somebody else is always a revision ahead."""

    ahead = False

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        return False if self.ahead else await super().replace_task(record, expected_revision=expected_revision)


def test_a_record_that_others_change_again_and_again_is_given_up() -> None:
    adapter = Restless()
    with opened(adapter) as backend:
        new = owned("a")
        backend.commit([new])
        backend.register(Owner(id="me", life={}, remaining=0), 60)
        adapter.ahead = True
        (refused,) = backend.commit([step("a", new.head)])
        assert isinstance(refused, StoreUnavailableError)
        assert "changed too quickly" in str(refused)
        with pytest.raises(StoreUnavailableError, match="changed too quickly"):
            backend.claim(claim("you", dead=frozenset({"me"})))
        with pytest.raises(StoreUnavailableError, match="owner 'me' is changed too quickly"):
            backend.renew("me", 60)
        adapter.ahead = False
        assert backend.commit([step("a", new.head)]) == [None]


class Failing(SevenMethods):
    fails_for = ""

    async def get_task(self, task_id: str) -> TaskRecord | None:
        if task_id == self.fails_for:
            raise ConnectionResetError
        return await super().get_task(task_id)


def test_one_that_fails_among_many_ends_the_whole_call() -> None:
    adapter = Failing()
    with opened(adapter, concurrency=2) as backend:
        backend.commit([owned(f"run-{n}") for n in range(6)])
        adapter.fails_for = "run-0"
        adapter.calls.clear()
        with pytest.raises(StoreUnavailableError, match="get_task of the adapter raised ConnectionResetError"):
            backend.claim(claim(ids=tuple(f"run-{n}" for n in range(6)), dead=frozenset({"me"})))
        assert adapter.calls.count("get_task") < 5, "after the failure no new call begins"


def test_the_history_of_an_execution_that_is_being_deleted_is_what_is_left_of_it() -> None:
    adapter = SevenMethods()
    with opened(adapter) as backend:
        new = owned("a")
        backend.commit([new])
        head = new.head
        for _ in range(300):
            save = step("a", head, keep_from=head.seq)
            assert backend.commit([save]) == [None]
            head = save.head
        pages = [id for id in adapter.rows if adapter.rows[id].metadata.get("longrun") == "history"]
        assert pages
        assert len(backend.boundaries("a")) == 301
        adapter.rows[pages[0]] = attrs.evolve(adapter.rows[pages[0]], data=adapter.rows[pages[0]].data[:-40])
        assert 0 < len(backend.boundaries("a")) < 301
        assert any(one.metadata.get("longrun") == "damaged" for one in adapter.rows.values())
        del adapter.rows[pages[0]]
        assert 0 < len(backend.boundaries("a")) < 301


def test_a_write_that_json_does_not_take_is_refused_and_the_others_are_made() -> None:
    with opened(SevenMethods()) as backend:
        refused, done = backend.commit([create("a", metadata={"client": object()}), create("b")])
        assert isinstance(refused, NotStorableError)
        assert done is True
        assert backend.load("a") is None


@pytest.mark.parametrize("value", [5, [1], {}, {"base64": 3}, {"base64": "%"}])
def test_stored_bytes_that_are_neither_text_nor_base64_are_damage(value: object) -> None:
    with pytest.raises(CorruptDataError, match="neither text nor base64"):
        lines.bytes_of(value)


def test_keys_of_messages_are_remembered_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat is recognised for long after its message was taken; the oldest are forgotten first."""
    monkeypatch.setattr(document, "KEYS_REMEMBERED", 2)
    with opened(SevenMethods()) as backend:
        new = owned("a")
        backend.commit([new])
        assert backend.sent("a") == (0, {})
        head = new.head
        for number in (1, 2, 3, 4):
            assert backend.commit([send("a", key=f"key-{number}")]) == [number]
            taken = change("a", head, take=(number,))
            assert backend.commit([taken]) == [None]
            head = taken.head
        assert backend.sent("a") == (4, {"key-2": 2, "key-3": 3, "key-4": 4})
        assert backend.commit([send("a", key="key-2"), send("a", key="key-1")]) == [2, 5]
        assert backend.sent("nowhere") == (0, {})


# --- one user at a time ----------------------------------------------------------------------------------------------


def user_record(life: Any, until: float) -> TaskRecord:
    text = lines.document(USER, [lines.line(USER, "user", {"life": life, "until": until})])
    return TaskRecord(USER, INTERNAL, 0.0, text, {"longrun": "user", "revision": "1"})


@pytest.fixture
def lock(run_directory: Path) -> Iterator[LifeLock]:
    made = LifeLock.acquire()
    yield made
    made.release()


def test_a_user_whose_life_cannot_be_seen_is_believed_until_its_lease_runs_out(lock: LifeLock) -> None:
    """It may be on another machine."""
    elsewhere = attrs.evolve(lock.life, boot="another", host="elsewhere").to_dict()
    adapter: Any = SixMethods()
    adapter.rows[USER] = user_record(elsewhere, until=2e10)
    with pytest.raises(StoreSettingsError, match="a process whose lease has not run out uses it"):
        TaskBackend(adapter).open()
    adapter.rows[USER] = user_record(elsewhere, until=0.0)
    with opened(adapter) as backend:
        assert backend.commit([create("a")]) == [True]


def test_a_damaged_name_of_a_user_keeps_nobody_out() -> None:
    adapter: Any = SixMethods()
    for record in (user_record({"no": "life"}, 2e10), attrs.evolve(user_record({}, 0.0), data=b"nonsense")):
        adapter.rows[USER] = record
        with opened(adapter):
            pass


def test_a_life_is_believed_only_with_the_very_lock_it_names(lock: LifeLock) -> None:
    assert _is_alive(lock.life)
    assert not _is_alive(attrs.evolve(lock.life, boot="another"))
    assert not _is_alive(attrs.evolve(lock.life, inode=lock.life.inode + 1))


def test_without_a_lock_file_nobody_is_let_in(run_directory: Path) -> None:
    """Two could come at the same time, and neither would see the other."""
    run_directory.mkdir(mode=0o700)
    (run_directory / "task-stores.lock").symlink_to(run_directory / "elsewhere")
    adapter: Any = SixMethods()
    with pytest.raises(StoreUnavailableError, match="no lock file"):
        TaskBackend(adapter).open()
    assert USER not in adapter.rows
    assert not [name for name in os.listdir(run_directory) if name.endswith(".life")], "its own lock is given back"


class Leaving(SixMethods):
    away = False

    async def delete_task(self, task_id: str) -> None:
        if self.away:
            raise ConnectionResetError
        await super().delete_task(task_id)


def test_a_table_that_is_away_when_its_user_leaves_is_free_for_the_next() -> None:
    """The name stays in the table; the lock behind it proves that nobody is there any more."""
    adapter: Any = Leaving()
    with opened(adapter):
        adapter.away = True
    assert USER in adapter.rows
    adapter.away = False
    with opened(adapter) as backend:
        assert backend.commit([create("a")]) == [True]


class Waiting(SevenMethods):
    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()

    async def get_task(self, task_id: str) -> TaskRecord | None:
        if task_id == "forever":
            self.began.set()
            await anyio.sleep_forever()
        return await super().get_task(task_id)


def test_a_call_in_flight_when_the_store_is_closed_is_told_so() -> None:
    """Its thread must not wait for an answer that nobody gives any more."""
    adapter = Waiting()
    with ThreadPoolExecutor(1) as threads, opened(adapter) as backend:
        answer = threads.submit(backend.load, "forever")
        assert adapter.began.wait(20)
        backend.close()
        with pytest.raises(StoreUnavailableError, match="the event loop in which it was opened has ended"):
            answer.result(20)
