"""Files are their owner's alone, whatever the umask; another user gets nothing; a swapped link leads nowhere."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from longrun import Executor, StepRegistry
from longrun.errors import LongrunError
from longrun.stores.file import FileBackend
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import owned, send, step
from tests.stores.file_tools import done, opened

READER = """
import os, sys
top = sys.argv[1]
os.chdir(top)  # so that nothing but the store's own modes stands in the way
known = [os.path.relpath(os.path.join(folder, name), top) for folder, _, names in os.walk(top) for name in names]
os.setgid(65534); os.setuid(65534)
seen = []
for what in [".", "planted", *known]:
    try:
        os.listdir(what) if what == "." else open(what, "w" if what == "planted" else "r").close()
        seen.append(what)
    except OSError:
        pass
print(len(known) > 0, seen)
"""


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def work(url: str, run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that an executor writes: run it, with a signal, a child process for its lock, and a failed one."""
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(run_directory))
    registry = StepRegistry()

    @registry.step
    async def first(state: dict[str, str]) -> dict[str, str]:
        return {**state, "large": "x" * 200_000}

    registry.workflow("work", [first, first])

    async def main() -> None:
        async with Executor(registry, store=url) as executor:
            run = await executor.start("work", {"a": "b"})
            await run.result()

    anyio.run(main)


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_everything_a_program_writes_is_private_under_umask_0(
    kind: str, tmp_path: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories 0700, files 0600."""
    place = tmp_path / "new" / "place"
    url = f"file:{place}" if kind == "file" else f"sqlite:///{place / 'store.db'}"
    work(url, tmp_path / "run", monkeypatch)
    found = [path for top in (place, tmp_path / "run") for path in [top, *top.rglob("*")]]
    assert len(found) > 3
    for path in found:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_another_user_reads_and_plants_nothing(
    kind: str, tmp_path: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    url = f"file:{place}" if kind == "file" else f"sqlite:///{place / 'store.db'}"
    work(url, tmp_path / "run", monkeypatch)
    for top in (place, tmp_path / "run"):
        (top / "something").write_text("to be read")
        (top / "something").chmod(0o644)  # the directory alone must be enough
        done = subprocess.run([sys.executable, "-c", READER, str(top)], capture_output=True, text=True, check=True)
        assert done.stdout == "True []\n"


def test_a_folder_that_is_swapped_for_a_link_while_it_is_open_leads_nowhere(tmp_path: Path) -> None:
    """The store holds its folders by their descriptors: a name that changes its meaning changes nothing."""
    path, trap = tmp_path / "store", tmp_path / "trap"
    trap.mkdir()
    with opened(FileBackend(path)) as backend:
        new = owned("a")
        done(backend, new)
        for name in ("live", "inbox", "tmp", "done", "history", "quarantine"):
            (path / name).rename(path / f"{name}-before")
            (path / name).symlink_to(trap, target_is_directory=True)
        with contextlib.suppress(LongrunError):  # refusing is as good
            backend.commit([step("a", new.head), send("a"), owned("b")])
    assert list(trap.iterdir()) == []


def test_a_journal_that_is_swapped_for_a_link_is_not_written_through(tmp_path: Path) -> None:
    path, victim = tmp_path / "store", tmp_path / "victim"
    victim.write_text("untouched")
    with opened(FileBackend(path)) as backend:
        new = owned("a")
        done(backend, new)
    journal = path / "live" / "a.0.jsonl"
    journal.unlink()
    journal.symlink_to(victim)
    with opened(FileBackend(path)) as backend, contextlib.suppress(LongrunError):  # refusing all of it is as good
        (answer,) = backend.commit([step("a", new.head)])
        assert isinstance(answer, LongrunError)
    assert victim.read_text() == "untouched"


def test_a_database_that_is_swapped_for_a_link_is_not_written_through(tmp_path: Path) -> None:
    path, victim = tmp_path / "store.db", tmp_path / "victim.db"
    with opened(SQLiteBackend(victim)) as other:
        done(other, owned("theirs"))
    before = victim.read_bytes()
    with opened(SQLiteBackend(path)) as backend:
        new = owned("a")
        done(backend, new)
        path.rename(tmp_path / "aside.db")
        path.symlink_to(victim)
        with pytest.raises(LongrunError):
            backend.commit([step("a", new.head)])
    with pytest.raises(LongrunError), opened(SQLiteBackend(path)):
        pass
    assert victim.read_bytes() == before
