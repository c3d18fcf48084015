"""`longrun run` and `longrun worker`: real processes, real signals, a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import Executor, FileCheckpointStore, StoreUnavailableError, schema
from longrun.cli import run as run_module
from longrun.cli._bars import Lines
from longrun.cli._signals import Stop
from longrun.client import Client
from longrun.testing import FaultyStore
from tests.cli.conftest import (
    APP,
    ROOT,
    call,
    environment,
    finished,
    interrupted,
    prepare,
    progress_of,
    read,
    shown,
    submitted,
    until,
)
from tests.cli.sample_app import config, registry

LONG = '{"pages": 100000, "pause": 0.002}'
Process = Callable[..., subprocess.Popen[str]]


# --- in this process --------------------------------------------------------------------------------------------------


def test_the_result_is_data_and_the_rest_is_not(url: str) -> None:
    result = call("run", APP, "site", "--store", url, "--state", '{"pages": 2}', "--meta", "customer=ACME", "--id", "a")
    assert json.loads(result.stdout) == {"pages": 2, "prepared": True, "reported": True}
    assert [line.split(" in ")[0] for line in result.stderr.splitlines()] == [
        "✓ step 1/3 prepare",
        "✓ step 2/3 crawl",
        "✓ step 3/3 report",
        "✓ completed",
    ]
    assert read("show", "a", "--store", url)["execution"]["metadata"] == {"customer": "ACME"}


def test_quiet_and_json(url: str) -> None:
    assert call("run", APP, "site", "--store", url, "--quiet", "--state", "{}").stderr == ""
    failed = call("run", APP, "bad", "--store", url, "--quiet", "--state", "{}", code=1)
    assert (failed.stdout, "ValueError" in failed.stderr) == ("", True)
    found = read("run", APP, "site", "--store", url, "--state", "{}", "--id", "b")
    assert (found["exit_code"], found["result"]["reported"]) == (0, True)
    assert found["execution"]["progress"] == {
        "fraction": 1.0,
        "remaining_seconds": 0.0,
        "items_per_second": None,
        "basis": "none",
    }


def test_an_execution_without_an_id_gets_one_and_says_it(url: str) -> None:
    said = call("run", APP, "site", "--store", url, "--state", "{}").stderr
    id = re.search(r"^execution (run-\w+)$", said, re.MULTILINE)
    assert id is not None
    assert read("show", id[1], "--store", url)["execution"]["state"] == "completed"


def test_a_failed_execution_is_1_and_can_be_retried(url: str) -> None:
    result = call("run", APP, "bad", "--store", url, "--state", "{}", "--id", "a", code=1)
    assert "✗ failed at step 2/2 boom, attempt 2: ValueError: bad \\x1b[31mred" in result.stderr
    assert f"longrun run {APP} bad --id a --store {url} --retry" in result.stderr
    assert result.stdout == ""
    call("run", APP, "bad", "--store", url, "--id", "a", code=1)
    again = read("run", APP, "bad", "--store", url, "--id", "a", "--retry", code=1)
    assert (again["exit_code"], again["execution"]["state"]) == (1, "failed")
    assert again["error"].startswith("ValueError: bad")


def test_cancelled_and_blocked_are_1(url: str) -> None:
    prepare(url, submitted("site", "a"))
    call("cancel", "a", "--store", url)
    assert "∅ cancelled" in call("run", APP, "site", "--id", "a", "--store", url, code=1).stderr
    prepare(url, interrupted("b"))
    said = call("run", "tests.cli.sample_app:later", "site", "--id", "b", "--store", url, code=1).stderr
    assert "⊘ blocked at step 2/3 crawl: no step named 'crawl'" in said


def test_the_id_of_a_finished_run_gives_its_result_again(url: str) -> None:
    words = ["run", APP, "site", "--id", "a", "--store", url, "--state", '{"pages": 1}']
    assert call(*words).stdout == call(*words).stdout
    assert len(read("show", "a", "--store", url)["steps"]) == 4
    assert "exists already" in call("run", APP, "bad", "--id", "a", "--store", url, code=2).stderr


def test_the_id_of_an_interrupted_held_or_submitted_run_takes_it_up(url: str) -> None:
    prepare(url, interrupted("a"), submitted("site", "b"), submitted("site", "c"))
    call("pause", "b", "--store", url)
    assert "✓ step 1/3" not in call("run", APP, "site", "--id", "a", "--store", url).stderr
    assert "it was paused: resuming it" in call("run", APP, "site", "--id", "b", "--store", url).stderr
    call("run", APP, "site", "--id", "c", "--store", url)
    assert {one["state"] for one in read("list", "--store", url)["executions"]} == {"completed"}


def test_running_one_leaves_the_others_alone(url: str) -> None:
    prepare(url, interrupted("a"))
    call("run", APP, "site", "--id", "b", "--store", url, "--state", "{}")
    assert read("show", "a", "--store", url)["execution"]["state"] == "running"


def test_the_first_state_is_typed_and_checked(url: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"amount": 41}')
    words = ["run", APP, "order", "--store", url, "--state"]
    assert "stored state" in call(*words, '{"amount": "much"}', code=2).stderr
    assert "no JSON" in call(*words, "{", code=2).stderr
    assert "No such file" in call(*words, "@nowhere.json", code=2).stderr
    prepare(url)
    assert read("list", "--store", url)["executions"] == []


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_either_loop(file_url: str, loop: str) -> None:
    call("run", APP, "site", "--store", file_url, "--state", "{}", "--loop", loop)
    call("run", APP, "site", "--store", file_url, "--loop", "twisted", code=2)


def test_an_application_in_a_file(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "little_app.py").write_text(
        "from longrun import StepRegistry\nregistry = StepRegistry()\n"
        "@registry.step\ndef one(state):\n    return [state, 1]\nregistry.workflow('w', [one])\n"
    )
    shown = call("run", "little_app.py", "--state", "null", "--store", file_url)
    assert json.loads(shown.stdout) == [None, 1]


# --- signals ----------------------------------------------------------------------------------------------------------


def test_a_signal_brings_it_to_a_checkpoint_and_its_id_resumes_it(url: str, process: Process) -> None:
    number = signal.SIGINT if url.startswith("file") else signal.SIGTERM
    run = process("run", APP, "site", "--id", "a", "--store", url, "--state", LONG)
    until(lambda: progress_of(url, "a") > 5, "it crawls")
    run.send_signal(number)
    out, said = run.communicate(timeout=60)
    assert run.returncode == 4, said
    assert out == ""
    found = re.search(r"paused at step 2/3 crawl, pages: from item (\d+) of 100000, resume with:\n  (.*)\n", said)
    assert found is not None
    assert found[2] == f"longrun run {APP} site --id a --store {url}"
    stored = shown(url, "a")
    assert (stored["execution"]["state"], stored["execution"]["owner"]) == ("running", None)
    assert stored["inside"][0]["done"] + 1 == int(found[1])
    again = process(*found[2].split()[1:])
    until(lambda: progress_of(url, "a") > int(found[1]), "it goes on behind")
    again.send_signal(signal.SIGINT)
    assert again.communicate(timeout=60)[1].count("✓ step 1/3") == 0
    assert again.returncode == 4


def test_interrupted_in_a_wait_it_says_what_it_waits_for(file_url: str, process: Process) -> None:
    run = process("run", APP, "approve", "--id", "a", "--store", file_url, "--state", "{}")
    until(lambda: shown(file_url, "a").get("execution", {}).get("state") == "waiting", "it waits")
    run.send_signal(signal.SIGINT)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 4
    assert "paused at step 3/3 report, waits for signal 'approval': longrun signal a approval, resume with:" in told


def test_a_second_signal_cuts_the_patience_short(file_url: str, process: Process) -> None:
    """A step without checkpoints would take the whole drain_timeout, which is an hour here."""
    patient = environment(LONGRUN_DRAIN_TIMEOUT="3600")
    run = process("run", APP, "stuck", "--id", "a", "--store", file_url, "--state", "{}", env=patient)
    until(lambda: (shown(file_url, "a").get("execution") or {}).get("step") == 1, "it is stuck")
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    lines = iter(run.stderr.readline, "")
    assert any("again to cut it short" in line for line in lines)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 4
    assert "paused at step 2/2 stuck, resume with:" in said


def test_whoever_looks_on_can_leave_without_stopping_it(file_url: str, process: Process) -> None:
    words = ["run", APP, "site", "--id", "a", "--store", file_url, "--state", LONG]
    run = process(*words)
    until(lambda: progress_of(file_url, "a") > 5, "it crawls")
    onlooker = process(*words)
    assert onlooker.stderr is not None
    assert "runs it; looking on" in onlooker.stderr.readline()
    onlooker.send_signal(signal.SIGINT)
    assert "it goes on without us" in onlooker.communicate(timeout=60)[1]
    assert onlooker.returncode == 130
    assert run.poll() is None
    call("cancel", "a", "--store", file_url)
    run.communicate(timeout=60)
    assert run.returncode == 1


@pytest.mark.parametrize("words", [["watch"], ["events", "a", "--follow"]])
def test_ctrl_c_is_130_elsewhere(file_url: str, process: Process, words: list[str]) -> None:
    prepare(file_url, finished("approve", {}, "a"))
    looking = process(*words, "--store", file_url)
    assert looking.stdout is not None
    assert looking.stdout.readline()
    looking.send_signal(signal.SIGINT)
    assert looking.communicate(timeout=60)[1].strip() == ""
    assert looking.returncode == 130


def test_events_can_be_followed_while_another_process_runs_it(url: str, process: Process) -> None:
    run = process("run", APP, "site", "--id", "a", "--store", url, "--state", LONG)
    until(lambda: progress_of(url, "a") > 5, "it crawls")
    following = process("events", "a", "--follow", "--json", "--store", url)
    assert following.stdout is not None
    found: list[dict[str, Any]] = []
    while len([one for one in found if one["type"] == "progress"]) < 2:
        found.append(json.loads(following.stdout.readline()))
    call("cancel", "a", "--store", url)
    found += [json.loads(line) for line in following.communicate(timeout=60)[0].splitlines()]
    run.communicate(timeout=60)
    assert following.returncode == 0
    assert [problem for one in found for problem in schema.problems(one)] == []
    kinds = [one["type"] for one in found if one["type"] != "progress"]
    assert kinds == ["execution_started", "step_completed", "execution_cancelled"]
    data = [one["data"] for one in found if one["type"] == "progress"]
    assert [one["done"] for one in data] == sorted({one["done"] for one in data})
    assert all(one["total"] == 100_000 and 0.3 < one["fraction"] < 1 for one in data)
    assert data[1]["items_per_second"] > 0


# --- workers ----------------------------------------------------------------------------------------------------------


def submit(url: str, *ids: str, state: Any = None, queue: str = "default") -> None:
    async def run() -> None:
        async with Client(url) as client:
            for id in ids:
                await client.submit("site", state or {}, id=id, queue=queue)

    anyio.run(run)


def test_a_worker_runs_what_was_submitted_to_its_queues_and_drains_on_sigterm(url: str, process: Process) -> None:
    prepare(url)
    submit(url, "a", "b")
    submit(url, "other", queue="other")
    submit(url, "long", state=json.loads(LONG))
    options = ("--queue", "default", "--concurrency", "2", "--metrics-port", "0")
    worker = process("worker", APP, "--store", url, *options)
    assert worker.stderr is not None
    metrics = worker.stderr.readline().split()[-1]
    until(lambda: all(shown(url, id)["execution"]["state"] == "completed" for id in ("a", "b")), "both are done")
    until(lambda: progress_of(url, "long") > 5, "the long one crawls")
    (found,) = read("workers", "--store", url)["workers"]
    assert (found["status"], found["pid"], found["queues"], found["executions"]) == (
        "alive",
        worker.pid,
        ["default"],
        1,
    )
    with urllib.request.urlopen(metrics, timeout=10) as answer:
        assert 'longrun_executions_ended_total{state="completed",workflow="site"} 2.0' in answer.read().decode()
    worker.send_signal(signal.SIGTERM)
    said = worker.communicate(timeout=60)[1]
    assert worker.returncode == 0, said
    assert "takes default of the" in said
    assert "SIGTERM: draining" in said
    assert shown(url, "other")["execution"]["state"] == "initialized"
    left = shown(url, "long")["execution"]
    assert (left["state"], left["owner"]) == ("running", None)
    assert read("workers", "--store", url)["workers"] == []


def test_a_worker_does_not_wait_for_what_nobody_could_submit() -> None:
    said = call("worker", APP, "--store", "memory:", code=2)
    assert "nobody could submit to a store in memory: give the URL of another --store" in said.stderr


def test_a_dead_worker_is_seen_and_swept_up(file_url: str, process: Process) -> None:
    prepare(file_url)
    submit(file_url, "a", state=json.loads(LONG))
    worker = process("worker", APP, "--store", file_url)
    until(lambda: progress_of(file_url, "a") > 5, "it crawls")
    worker.kill()
    worker.communicate()
    assert [one["status"] for one in read("workers", "--store", file_url)["workers"]] == ["dead"]
    checks = {one["name"]: one["message"] for one in read("doctor", "--store", file_url)["checks"]}
    assert "1 execution of 1 dead owner" in checks["owners"]
    plan = read("plan", "a", "--store", file_url, "--app", APP)["plans"][0]
    assert (plan["action"], plan["owner_alive"]) == ("run-again", False)
    call("cancel", "a", "--store", file_url)
    assert read("gc", "--older-than", "1h", "--store", file_url)["owners"] in (0, 1)
    assert read("workers", "--store", file_url)["workers"] == []


# --- a terminal -------------------------------------------------------------------------------------------------------


def on_terminal(*words: str, width: int = 150, **more: str) -> tuple[int, str]:
    """Run a command on a terminal; its exit code, and everything it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = environment(TERM="xterm-256color", **more)
    command = [sys.executable, "-m", "longrun", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT) as run:
        os.close(theirs)
        text = b""
        while chunk := _read(ours):
            text += chunk
        os.close(ours)
        return run.wait(60), text.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end of a terminal is closed
        return b""


def test_bars_on_a_terminal(file_url: str) -> None:
    code, text = on_terminal(
        "run", APP, "site", "--id", "a", "--store", file_url, "--state", '{"pages": 60, "pause": 0.01}'
    )
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"2/3 crawl\s+━+.*▸\s+\d+/60", plain)
    assert re.search(r"a\s+━+.*\d+%", plain)
    assert re.search(r"1/3 prepare\s+━+\s+✓", plain)
    assert "\x1b[34m━" in text, "a bar has the colour of the state: red is for what failed"
    assert "100% completed" in plain, "and at the end no time is left to tell"
    assert '"reported": true' in plain


def test_bars_without_colour_still_tell(file_url: str) -> None:
    code, text = on_terminal(
        "run", APP, "site", "--id", "a", "--store", file_url, "--state", '{"pages": 60, "pause": 0.01}', NO_COLOR="1"
    )
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*m", text)
    assert re.search(r"crawl +━+[╸╺]? +▸ +\d+/60", text), "what is not done is blank, not of another colour"


def test_log_lines_and_prints_stand_above_the_bars(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "talking_app.py").write_text(
        "from longrun import StepRegistry\nregistry = StepRegistry()\n"
        "@registry.step\ndef one(ctx, state):\n    print('printed')\n    ctx.log.warning('logged')\n    return 1\n"
        "registry.workflow('w', [one])\n"
    )
    code, text = on_terminal("run", str(tmp_path / "talking_app.py"), "--store", file_url)
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"(^|[\r\n])printed[\r\n]", plain)
    assert "logged" in plain


def test_many_quick_steps_are_folded(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LOOKS", 1.0)  # on a slow machine too, many steps end between two looks
    (tmp_path / "quick_app.py").write_text(
        "from longrun import StepRegistry\nregistry = StepRegistry()\n"
        "@registry.step\nasync def one(state):\n    return state + 1\nregistry.workflow('w', [one] * 1000)\n"
    )
    result = call("run", "quick_app.py", "--state", "0", "--store", file_url)
    assert result.stdout == "1000\n"
    assert len(result.stderr.splitlines()) < 200
    assert re.search(r"✓ \d+ steps", result.stderr)


def test_watch_on_a_terminal_is_a_table(file_url: str) -> None:
    prepare(file_url, interrupted("a"), finished("approve", {}, "b"))
    code, text = on_terminal("watch", "--once", "--store", file_url)
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for word in ("state", "progress", "rate", "left", "checkpoint", "owner", "▸ running (interrupted)", "━━━"):
        assert word in plain
    assert "◷ waiting" in plain
    assert "…" not in on_terminal("watch", "--once", "--store", file_url, width=105)[1], "columns are left out, not cut"
    narrow = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_terminal("watch", "--once", "--store", file_url, width=80)[1])
    assert "rate" not in narrow
    assert "…" not in narrow
    assert re.search(r"▸ running \(interrupted\)  a .* 2/3 \(\d+/1,000\)", narrow)


def test_watch_on_a_terminal_says_that_there_is_nothing(file_url: str) -> None:
    prepare(file_url, finished("site", {}, "a"))
    assert "nothing is under way here" in on_terminal("watch", "--once", "--store", file_url)[1]


def test_a_copy_on_a_terminal_counts_and_says_what_it_left_behind(
    file_url: str, process: Process, tmp_path: Path
) -> None:
    prepare(file_url, finished("site", {}, "a"))
    run = process("run", APP, "site", "--id", "b", "--store", file_url, "--state", LONG)
    until(lambda: progress_of(file_url, "b") > 5, "it crawls")
    code, text = on_terminal("store", "copy", file_url, f"sqlite:///{tmp_path / 'copy.db'}")
    assert code == 1
    assert "\r1 copied" in text
    assert "left behind: b: " in text
    assert "1 copied, 0 there already, 1 left behind" in text
    call("cancel", "b", "--store", file_url)
    run.communicate(timeout=60)


def test_a_worker_can_tell_open_telemetry(file_url: str, process: Process) -> None:
    prepare(file_url)
    submit(file_url, "a")
    worker = process("worker", APP, "--store", file_url, "--otel")
    until(lambda: shown(file_url, "a")["execution"]["state"] == "completed", "it is done")
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=60)
    assert worker.returncode == 130


def test_events_of_a_run_in_flight_are_lines_for_people(file_url: str, process: Process) -> None:
    run = process("run", APP, "site", "--id", "a", "--store", file_url, "--state", LONG)
    until(lambda: progress_of(file_url, "a") > 5, "it crawls")
    following = process("events", "a", "--follow", "--store", file_url)
    assert following.stdout is not None
    assert any(re.search(r"progress .*\d+/100,000", line) for line in iter(following.stdout.readline, ""))
    call("cancel", "a", "--store", file_url)
    following.communicate(timeout=60)
    run.communicate(timeout=60)


def test_a_run_goes_on_when_its_store_comes_back(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is away the display says so; what the step does is saved when it is there again."""
    store = FaultyStore(FileCheckpointStore(file_url.removeprefix("file:")))
    display = Heard()

    async def run() -> Any:
        async with Executor(registry, store=store, config=config) as executor:
            handle = await executor.start("site", {"pages": 20, "pause": 0.01}, id="a")
            store.fail("load", error=StoreUnavailableError("file", "the cable is out"))
            stop = Stop()
            await run_module._follow(executor, handle.id, display, stop, 0)
            return await handle.result()

    monkeypatch.setattr(run_module, "STORE_AWAY", 0.0)
    assert anyio.run(run)["reported"] is True
    assert any("the cable is out; trying again" in line for line in display.said)
    assert store.fired["load"] == 1


class Heard(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)
