"""Every command takes a pair of stores, named by its URL."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from longrun.cli._settings import Settings
from tests.cli.conftest import APP, call, finished, prepare, read, shown, submitted, until
from tests.servers import RedisServer


@pytest.fixture
def url(tmp_path: Path) -> str:
    a, b = f"file:{tmp_path / 'a'}", f"sqlite:///{tmp_path / 'b.db'}"
    return f"replicated:?primary={a}&secondary={b}&witness=file:{tmp_path / 'w'}"


def test_commands_look_at_a_pair_and_control_it(url: str) -> None:
    prepare(url, finished("approve", {}, "waiting"), submitted("site", "queued", queue="slow"))
    assert len(read("list", "--store", url)["executions"]) == 2
    call("signal", "waiting", "approval", "--store", url)
    call("queues", "limit", "slow", "--concurrency", "2", "--store", url)
    call("cancel", "queued", "--store", url)
    assert shown(url, "queued")["execution"]["state"] == "cancelled"
    call("delete", "queued", "--store", url)
    call("show", "queued", "--store", url, code=3)
    facts = read("store", "info", "--store", url)["facts"]
    wanted = {"kind": "replicated", "active": "primary", "primary.kind": "file", "secondary.kind": "sqlite"}
    assert {name: facts[name] for name in wanted} == wanted


def test_a_worker_runs_from_a_pair(url: str, process: Callable[..., Any]) -> None:
    prepare(url, submitted("site", "x", {"pages": 2}))
    worker = process("worker", APP, "--store", url)
    until(lambda: shown(url, "x").get("execution", {}).get("state") == "completed", "the worker runs it")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_a_pair_is_copied_from_and_to(url: str, tmp_path: Path) -> None:
    prepare(url, finished("site", {"pages": 2}, "done"), submitted("site", "queued"))
    third = f"sqlite:///{tmp_path / 'c.db'}"
    assert "2 copied" in call("store", "copy", url, third).stdout
    back = f"replicated:?primary=file:{tmp_path / 'd'}&secondary=file:{tmp_path / 'e'}"
    assert "2 copied" in call("store", "copy", third, back).stdout
    for single in ("d", "e"):
        assert shown(f"file:{tmp_path / single}", "done")["execution"]["state"] == "completed"


def test_looking_makes_no_pair_where_there_is_none_and_sees_one_of_which_a_half_is_gone(
    url: str, tmp_path: Path
) -> None:
    assert "there is none at" in call("list", "--store", url, code=5).stderr
    assert not (tmp_path / "a").exists()
    prepare(url, submitted("site", "x"))
    shutil.rmtree(tmp_path / "a")
    assert [one["id"] for one in read("list", "--store", url)["executions"]] == ["x"]
    assert not (tmp_path / "a").exists()


def test_doctor_looks_at_both(url: str, tmp_path: Path) -> None:
    prepare(url, submitted("site", "x"))
    checks = {one["name"]: one for one in read("doctor", "--store", url)["checks"]}
    assert checks["pair"]["message"] == "the primary is active, the standby is level, sync"
    assert {"primary: durable", "primary: permissions", "secondary: store versions"} <= set(checks)
    by_hand = url.partition("&witness")[0]
    assert "no witness" in call("doctor", "--store", by_hand).stdout


def test_a_wrong_url_is_one_line_and_no_password_is_shown(url: str) -> None:
    bad = "replicated:?primary=postgresql%3A%2F%2Fme%3As3cret%40127.0.0.1%3A1%2Fdb&secondary=redis://me:s3cret@127.0.0.1:1/0"
    for words in (["list"], ["doctor"], ["store", "info"], ["run", APP, "site", "--id", "a"]):
        assert "s3c" not in call(*words, "--store", bad, code=5).output
    said = call("list", "--store", f"{url}&witnes=s3cret", code=5).stderr
    assert (said.count("\n"), "write replicated:?primary=URL&secondary=URL" in said, "s3c" in said) == (1, True, False)


def test_a_failover_by_hand(tmp_path: Path, disposable_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a witness: one that is level at once, one that may not be by force alone."""
    monkeypatch.setattr("longrun.stores._redis.link.PAUSES", (0.01, 0.02, 0.05))  # it does not come back meanwhile
    url = f"replicated:?primary={quote(disposable_redis.url, safe='')}&secondary=file:{tmp_path / 'b'}"
    prepare(url, submitted("site", "x"))
    assert call("store", "failover", "--store", url).stdout == "the secondary is active now, the standby is level\n"
    assert call("store", "failover", "--store", url).stdout == "the primary is active now, the standby is level\n"
    disposable_redis.stop()
    assert "failover() with force=True decides" in call("list", "--store", url, code=5).stderr
    call("store", "failover", "--store", url, code=5)
    forced = call("store", "failover", "--force", "--store", url).stdout
    assert forced == "the secondary is active now, the standby is behind\n"
    assert [one["id"] for one in read("list", "--store", url)["executions"]] == ["x"]
    call("store", "failover", "--store", f"file:{tmp_path / 'b'}", code=2)


def test_relative_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    inside = "replicated:?primary=file:a%20b&secondary=sqlite:///b.db&witness=redis%3A%2F%2Fh&mode=async"
    (tmp_path / "longrun.toml").write_text(f'store = "{inside}"\n')
    found = Settings({}, tmp_path / "deeper").store()
    assert found == (
        f"replicated:?primary=file:{tmp_path}/a%20b&secondary=sqlite:///{tmp_path}/b.db&witness=redis://h&mode=async"
    )


@pytest.mark.parametrize("there", [False, True])
def test_a_look_with_a_mistyped_secondary_changes_nothing(url: str, tmp_path: Path, there: bool) -> None:
    """It is not made; and where there is an empty store, it is not taken for the secondary of the pair."""
    prepare(url, submitted("site", "x"))
    before = [file.read_text() for file in sorted((tmp_path / "w").iterdir())]
    wrong = url.replace("b.db", "typo.db")
    if there:
        prepare(f"sqlite:///{tmp_path / 'typo.db'}")
        assert "knows nothing of this pair" in call("list", "--store", wrong, code=5).stderr
    else:
        assert [one["id"] for one in read("list", "--store", wrong)["executions"]] == ["x"]
        assert "not tried" in call("doctor", "--store", wrong).stdout
    call("store", "failover", "--store", wrong, code=5)
    assert (tmp_path / "typo.db").exists() is there
    assert [file.read_text() for file in sorted((tmp_path / "w").iterdir())] == before
    assert "the standby is level" in call("doctor", "--store", url).stdout


def test_a_worker_is_refused_a_mistyped_store_and_a_lost_one_is_replaced(url: str, tmp_path: Path) -> None:
    prepare(url, submitted("site", "x"))
    wrong = url.replace("b.db", "typo.db")
    said = call("run", APP, "site", "--id", "y", "--store", wrong, code=5).stderr
    assert "the secondary is empty and knows nothing of this pair" in said
    assert "longrun store replace secondary" in said
    new = url.replace("b.db", "new.db")
    said = call("store", "replace", "secondary", "--store", new).stdout
    assert said == "the secondary is a new store now, and is brought up to date when a worker uses the pair\n"
    assert "the standby is behind" in call("doctor", "--store", new).stdout
    assert "is not in the pair any more" in call("list", "--store", url, code=5).stderr
    assert "in this pair already" in call("store", "replace", "secondary", "--store", new, code=5).stderr
    call("store", "replace", "secondary", "--store", f"file:{tmp_path / 'a'}", code=2)
