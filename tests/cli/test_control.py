"""The commands that change something: by id, by filter with a count and a confirmation, from any process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from longrun import ExecutionState, Executor, schema
from longrun.testing.samples import NOW, create
from tests.cli.conftest import APP, call, finished, interrupted, prepare, read, shown, submitted, until


def states(url: str) -> dict[str, str]:
    return {one["id"]: one["state"] for one in read("list", "--store", url)["executions"]}


def test_pause_holds_and_resume_frees(url: str) -> None:
    prepare(url, submitted("site", "a"), interrupted("b"))
    assert call("pause", "a", "b", "--store", url).stdout == "a: paused\nb: paused\n"
    found = read("show", "b", "--store", url)["execution"]
    assert (found["state"], found["hold"]) == ("paused", True)
    assert "‖ paused (held)" in call("list", "--store", url).stdout
    assert read("plan", "b", "--store", url)["plans"][0]["action"] == "stay"
    call("resume", "a", "b", "--store", url)
    assert read("show", "b", "--store", url)["execution"]["state"] == "resuming"


def test_pause_without_hold(url: str) -> None:
    prepare(url, submitted("site", "a"))
    call("pause", "a", "--no-hold", "--store", url)
    assert read("show", "a", "--store", url)["execution"]["hold"] is False


def test_what_the_state_forbids_is_refused_with_1(url: str) -> None:
    prepare(url, finished("site", {}, "a"), submitted("site", "b"))
    for verb in ("pause", "resume", "cancel", "retry"):
        assert "it is completed" in call(verb, "a", "--store", url, code=1).stderr
    assert "cancel it first" in call("delete", "b", "--store", url, code=1).stderr
    call("signal", "a", "go", "--store", url, code=1)


def test_cancel_retry_delete(url: str) -> None:
    prepare(url, submitted("site", "a"), finished("bad", {}, "b"))
    call("cancel", "a", "--reason", "no longer \x1b[31mwanted", "--store", url)
    found = read("show", "a", "--store", url)
    assert (found["execution"]["state"], found["reason"]) == ("cancelled", "no longer \x1b[31mwanted")
    assert "no longer \\x1b[31mwanted" in call("show", "a", "--store", url).stdout
    call("retry", "b", "--set-state", '{"mended": true}', "--store", url)
    assert read("show", "b", "--store", url)["execution"]["state"] == "resuming"
    call("run", APP, "bad", "--id", "b", "--store", url)
    call("delete", "a", "b", "--store", url)
    assert states(url) == {}


def test_by_filter_only_what_fits_and_only_with_yes(url: str) -> None:
    prepare(
        url,
        submitted("site", "a", queue="slow"),
        submitted("site", "b"),
        submitted("approve", "c"),
        finished("site", {}, "d"),
    )
    refused = call("cancel", "--workflow", "site", "--store", url, code=2)
    assert "this would cancel 2 executions; add --yes" in refused.stderr
    assert states(url)["a"] == "initialized"
    result = call("cancel", "--workflow", "site", "--queue", "slow", "--yes", "--store", url)
    assert result.stdout == "a: cancelled\n"
    found = json.loads(call("cancel", "--workflow", "site", "--yes", "--store", url, "--json").stdout)
    assert schema.problems(found) == []
    assert [one["id"] for one in found["changes"]] == ["b"]
    assert states(url) == {"a": "cancelled", "b": "cancelled", "c": "initialized", "d": "completed"}
    assert "0 cancelled" in call("cancel", "--state", "running", "--yes", "--store", url).stderr
    assert "2 deleted" in call("delete", "--state", "cancelled", "--yes", "--store", url).stderr


def test_ids_or_a_filter_but_not_both_and_not_neither(url: str) -> None:
    prepare(url)
    assert "not both" in call("cancel", "a", "--workflow", "site", "--store", url, code=2).stderr
    call("cancel", "--store", url, code=2)
    call("cancel", "--yes", "--store", url, code=2)


def test_some_may_fail_and_the_others_are_changed(url: str) -> None:
    prepare(url, submitted("site", "a"), finished("site", {}, "b"))
    result = call("cancel", "a", "b", "nope", "--store", url, code=1)
    assert result.stdout == "a: cancelled\n"
    assert "1 cancelled, 2 not" in result.stderr


@pytest.mark.parametrize(
    ("answer", "code", "state"), [(b"y\n", 0, "cancelled"), (b"n\n", 1, "initialized"), (None, 130, "initialized")]
)
def test_a_terminal_is_asked(
    file_url: str, process: Callable[..., subprocess.Popen[str]], answer: bytes | None, code: int, state: str
) -> None:
    prepare(file_url, submitted("site", "a"))
    ours, theirs = pty.openpty()
    asked = process("cancel", "--workflow", "site", "--store", file_url, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while b"[y/N]" not in text:
        text += os.read(ours, 1000)
    assert b"cancel 1 execution? [y/N]" in text
    if answer is None:
        _interrupt(asked)
    else:
        os.write(ours, answer)
    assert asked.wait(60) == code
    os.close(ours)
    assert states(file_url) == {"a": state}


def _interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and again if need be: one that comes just before Python begins to read a line is noticed only then."""
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(6)
            return


def test_signals_reach_what_waits(url: str, tmp_path: Path) -> None:
    prepare(url, finished("approve", {}, "a"))
    (tmp_path / "payload.json").write_text('{"by": "chief"}')
    for _ in range(2):
        call("signal", "a", "approval", "--payload", "@payload.json", "--key", "k", "--store", url)
    assert [one["name"] for one in read("show", "a", "--store", url)["messages"]] == ["approval"]
    assert json.loads(call("run", APP, "approve", "--id", "a", "--store", url).stdout)["reported"] is True
    call("signal", "a", "approval", "--key", "k", "--store", url)
    call("signal", "a", "approval", "--key", "l", "--store", url, code=1)
    assert "no JSON" in call("signal", "a", "x", "--payload", "{", "--store", url, code=2).stderr
    assert "No such file" in call("signal", "a", "x", "--payload", "@nowhere", "--store", url, code=2).stderr


def test_fork_from_a_step(url: str) -> None:
    prepare(url, finished("site", {"pages": 2}, "a"))
    words = ["fork", "a", "--from", "report", "--new-id", "b", "--set-state", '{"other": 1}']
    assert call(*words, "--store", url).stdout == "b\n"
    assert json.loads(call("run", APP, "site", "--id", "b", "--store", url).stdout) == {"other": 1, "reported": True}
    assert read("show", "b", "--store", url)["execution"]["metadata"] == {"forked_from": "a@3"}
    made = json.loads(call("fork", "a", "--checkpoint", "1", "--store", url, "--json").stdout)
    assert read("show", made["id"], "--store", url)["execution"]["step"] == 0
    call("fork", "a", "--checkpoint", "99", "--store", url, code=2)
    call("fork", "a", "--from", "nothing", "--store", url, code=2)
    call("fork", "a", "--new-id", "b", "--store", url, code=2)


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, set()), (b"n\n", 1, {"a"})])
def test_gc_asks_on_a_terminal(
    file_url: str, process: Callable[..., subprocess.Popen[str]], answer: bytes, code: int, left: set[str]
) -> None:
    prepare(file_url, finished("site", {}, "a"))
    ours, theirs = pty.openpty()
    asked = process("gc", "--older-than", "0s", "--store", file_url, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while b"[y/N]" not in text:
        text += os.read(ours, 1000)
    assert b"delete 1 execution that ended 0.0 s ago or earlier?" in text
    os.write(ours, answer)
    assert asked.wait(60) == code
    os.close(ours)
    assert set(states(file_url)) == left


def test_gc_removes_what_is_old_and_only_that(url: str) -> None:
    prepare(url, finished("site", {}, "a"), submitted("site", "b"))
    call("gc", "--store", url, code=2)
    assert read("gc", "--older-than", "1h", "--store", url)["executions"] == 0
    assert "add --yes" in call("gc", "--older-than", "0s", "--store", url, code=2).stderr
    assert (
        "1 execution and 0 dead owners would be removed"
        in call("gc", "--older-than", "0s", "--dry-run", "--store", url).stdout
    )
    assert set(states(url)) == {"a", "b"}
    assert read("gc", "--older-than", "0s", "--yes", "--store", url) == schema.document(
        "collected", executions=1, owners=0, dry_run=False
    )
    assert set(states(url)) == {"b"}


def test_gc_counts_and_removes_no_child_of_what_is_not_finished(file_url: str) -> None:
    async def children(executor: Executor) -> None:
        for parent in ("done", "left"):
            state, ended = ExecutionState.COMPLETED, {"ended": NOW}
            await executor.store.create(create(f"{parent}-child", state, parent_id=parent, head_fields=ended))

    prepare(file_url, finished("site", {}, "done"), submitted("site", "left"), children)
    counted = call("gc", "--older-than", "0s", "--dry-run", "--store", file_url).stdout
    assert "2 executions and 0 dead owners would be removed" in counted
    assert "this would delete 2 executions" in call("gc", "--older-than", "0s", "--store", file_url, code=2).stderr
    assert read("gc", "--older-than", "0s", "--yes", "--store", file_url)["executions"] == 2
    assert set(states(file_url)) == {"left", "left-child"}


def test_a_running_execution_is_paused_and_resumed_in_its_own_process(
    url: str, process: Callable[..., subprocess.Popen[str]]
) -> None:
    """The one that runs it obeys; `run` ends with 4 when somebody pauses it, and its id resumes it."""
    run = process("run", APP, "site", "--id", "a", "--store", url, "--state", '{"pages": 100000, "pause": 0.002}')
    until(lambda: (shown(url, "a").get("execution") or {}).get("owner"), "it runs")
    until(lambda: (shown(url, "a")["execution"]["step_progress"] or {}).get("done"), "it crawls")
    call("pause", "a", "--store", url)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 4
    assert "paused at step 2/3 crawl, pages: from item" in said
    assert shown(url, "a")["execution"]["hold"] is True


def test_a_request_that_takes_too_long_stays(file_url: str, process: Callable[..., subprocess.Popen[str]]) -> None:
    run = process("run", APP, "stuck", "--id", "a", "--store", file_url, "--state", "{}")
    until(lambda: (shown(file_url, "a").get("execution") or {}).get("step") == 1, "it is stuck")
    assert "has not taken effect" in call("pause", "a", "--timeout", "0.2s", "--store", file_url, code=1).stderr
    assert [one["kind"] for one in shown(file_url, "a")["messages"]] == ["pause"]
    call("cancel", "a", "--store", file_url)
    run.communicate(timeout=60)
    assert run.returncode == 1
