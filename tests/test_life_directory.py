"""Where lock files live: a directory that only its user can write to, swept of what the dead have left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun import life as life_module
from longrun.errors import StoreSettingsError
from longrun.life import Life, LifeLock, is_dead, run_directory, sweep_run_directory

IMPORT_PATH = os.pathsep.join([str(Path(life_module.__file__).resolve().parents[1]), *sys.path])
NOBODY = 65534


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(path))
    return path


def dead_life() -> Life:
    lock = LifeLock.acquire()
    lock.abandon()
    return lock.life


def make_old(path: str | os.PathLike[str], hours: float = 24.0) -> None:
    past = time.time() - hours * 3600
    os.utime(path, (past, past))


# -- the run directory -------------------------------------------------------------------------------------------------


def mode_of(path: str | os.PathLike[str]) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "above").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "above" / "run"))
    with pytest.raises(StoreSettingsError, match=r"above/run cannot be made; .*LONGRUN_RUN_DIR"):
        LifeLock.acquire()


@pytest.mark.usefixtures("umask")
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Directories 0700, files 0600, and so are the directories made on the way."""
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "above" / "run"))
    lock = LifeLock.acquire()
    assert mode_of(tmp_path / "above") == 0o700
    assert mode_of(tmp_path / "above" / "run") == 0o700
    assert mode_of(lock.life.path) == 0o600
    lock.release()


def use_temporary(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    monkeypatch.delenv("LONGRUN_RUN_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path / f"longrun-{os.geteuid()}"


def test_without_settings_it_is_the_users_own_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = use_temporary(monkeypatch, tmp_path)
    assert run_directory() == expected
    assert mode_of(expected) == 0o700
    assert run_directory() == expected


def test_the_runtime_directory_of_the_session_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_temporary(monkeypatch, tmp_path)
    (tmp_path / "xdg").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_directory() == tmp_path / "xdg" / "longrun"


@pytest.mark.parametrize("runtime", ["missing", "file", "link", "relative", "another's"])
def test_a_runtime_directory_that_will_not_do_is_passed_over(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After `su` the variable still names the directory of another user."""
    expected = use_temporary(monkeypatch, tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    value = (
        "." if runtime == "relative" else others_directory(tmp_path) if runtime == "another's" else tmp_path / runtime
    )
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(value))
    assert run_directory() == expected


def others_directory(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        return Path("/")
    path = tmp_path / "others"
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)
    return path


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(others_directory(tmp_path)))
    with pytest.raises(StoreSettingsError, match=r"belongs to user .* set LONGRUN_RUN_DIR"):
        LifeLock.acquire()


def test_a_symbolic_link_is_refused(directory: Path, tmp_path: Path):
    (tmp_path / "target").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "target")
    with pytest.raises(StoreSettingsError, match="symbolic link"):
        run_directory()
    directory.unlink()
    directory.symlink_to(tmp_path / "missing")
    with pytest.raises(StoreSettingsError, match="symbolic link"):
        run_directory()
    assert not (tmp_path / "missing").exists()


def test_what_is_not_a_directory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch):
    directory.touch()
    with pytest.raises(StoreSettingsError, match="is not a directory"):
        run_directory()
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory / "below"))
    with pytest.raises(StoreSettingsError, match="Not a directory"):
        run_directory()


def test_a_name_that_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "a\udcff"))
    with pytest.raises(StoreSettingsError, match="UTF-8"):
        run_directory()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_named_directory_that_others_can_write_to_is_refused_and_left_as_it_is(directory: Path, mode: int):
    """It may be /tmp itself, named by root: to mend that mode would break the machine."""
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(StoreSettingsError, match="written to by others"):
        run_directory()
    assert mode_of(directory) == mode


def test_a_named_directory_that_others_can_only_read_is_used_as_it_is(directory: Path):
    directory.mkdir()
    directory.chmod(0o755)
    assert run_directory() == directory
    assert mode_of(directory) == 0o755


def test_the_mode_of_our_own_default_directory_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = use_temporary(monkeypatch, tmp_path)
    expected.mkdir()
    expected.chmod(0o777)
    assert run_directory() == expected
    assert mode_of(expected) == 0o700


def test_a_relative_name_gives_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Other processes, elsewhere, have to find the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGRUN_RUN_DIR", "here/../there/")
    assert run_directory() == tmp_path / "there"


# -- the sweep ---------------------------------------------------------------------------------------------------------


def test_the_sweep_removes_the_long_dead_and_nothing_else(directory: Path):
    living, fresh, old = LifeLock.acquire(), dead_life(), dead_life()
    draft, foreign, folder, link = (directory / name for name in ("a.life.new", "notes", "b.life", "c.life"))
    draft.touch()
    foreign.touch()
    folder.mkdir()
    link.symlink_to(foreign)
    for path in (living.life.path, old.path, draft, foreign, folder):
        make_old(path)
    assert sweep_run_directory() == 2
    left = {path.name for path in directory.iterdir()}
    assert left == {Path(living.life.path).name, Path(fresh.path).name, "notes", "b.life", "c.life"}
    assert not is_dead(living.life)
    assert is_dead(fresh)
    assert sweep_run_directory() == 0
    living.release()


def test_the_sweep_takes_its_age_and_its_bound_from_the_caller(directory: Path):
    for _ in range(5):
        make_old(dead_life().path, hours=2)
    assert sweep_run_directory() == 0
    assert sweep_run_directory(older_than=3600, limit=3) == 3
    assert len(list(directory.iterdir())) == 2


def test_the_sweep_of_a_crowded_directory_looks_at_some_files_and_in_time_at_all(monkeypatch: pytest.MonkeyPatch):
    """None that cannot be removed, first in the directory's order, hides the others for ever."""
    for _ in range(10):
        make_old(dead_life().path)
    held = [LifeLock.acquire() for _ in range(10)]
    for lock in held:
        make_old(lock.life.path)
    looks: list[str] = []
    is_stale = life_module._is_stale

    def look(path: str, before: float) -> bool:
        looks.append(path)
        return is_stale(path, before)

    monkeypatch.setattr(life_module, "_is_stale", look)
    monkeypatch.setattr(life_module, "LOOKED_AT", 5)
    removed, sweeps = 0, 0
    while removed < 10:
        removed, sweeps = removed + sweep_run_directory(limit=1), sweeps + 1
        assert len(looks) <= 5 * sweeps
    for lock in held:
        assert lock.touch()
        lock.release()


def test_the_sweep_leaves_what_has_such_a_name_and_is_no_lock_file(directory: Path):
    run_directory()
    pattern, cut = directory / "glider.life", directory / "left-by-a-power-cut.life"
    pattern.write_text("#Life 1.06")
    cut.write_text("")
    for path in (pattern, cut):
        make_old(path)
    assert sweep_run_directory() == 1
    assert list(directory.iterdir()) == [pattern]


def test_the_sweep_leaves_a_file_that_was_replaced_under_its_hands(monkeypatch: pytest.MonkeyPatch):
    """It removes the file that it has locked, not whatever has the name by then."""
    life = dead_life()
    make_old(life.path)
    is_lock_free = life_module._is_lock_free

    def replace_meanwhile(descriptor: int) -> bool:
        os.rename(life.path, life.path + ".moved")
        Path(life.path).write_text("another's")
        return is_lock_free(descriptor)

    monkeypatch.setattr(life_module, "_is_lock_free", replace_meanwhile)
    assert sweep_run_directory() == 0
    assert Path(life.path).read_text() == "another's"


SWEEP = """
import sys
from longrun.life import sweep_run_directory
print("ready", flush=True)
sys.stdin.readline()
print(sweep_run_directory())
"""


def start_sweep() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SWEEP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
    )


def test_sweeps_of_two_processes_at_once_remove_every_dead_file(directory: Path):
    """Two may both find a file free; the one that comes second to remove it goes on with the next."""
    for _ in range(100):
        make_old(dead_life().path)
    with start_sweep() as first, start_sweep() as second:
        for sweep in (first, second):
            assert sweep.stdout is not None
            assert sweep.stdout.readline() == "ready\n"
        for sweep in (first, second):
            assert sweep.stdin is not None
            sweep.stdin.write("go\n")
            sweep.stdin.flush()
        assert sum(int(sweep.communicate()[0]) for sweep in (first, second)) == 100
    assert list(directory.iterdir()) == []
