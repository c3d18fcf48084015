"""The child's side of `run_in="process"`: a real child, whose pipe is in the test's own hands."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longrun.child import LOOK_EVERY
from longrun.pipe import Pipe
from tests import process_steps

ROOT = str(Path(__file__).parent.parent)
CALM = {"attention": False, "shutting_down": False, "time_left": None}


class Child:
    def __init__(self, pipe: Pipe, process: subprocess.Popen[bytes], bell: socket.socket) -> None:
        self.pipe, self.process, self.bell = pipe, process, bell
        self.code = 0
        """How it is to end."""

    def run(self, function: Any, state: Any = None, *, context: bool = True, **more: Any) -> None:
        """Give it a step to run."""
        info = {"execution_id": "x", "workflow": "w", "step": "s", "step_index": 0, "attempt": 1, "iteration": 0}
        job = {
            "path": [ROOT, *sys.path],
            "main": None,
            "module": function.__module__,
            "name": function.__qualname__,
            "takes_context": context,
            "info": {**info, "visit": 1, "metadata": {}},
            "entries": {},
            "interval": None,
            "state": state if state is not None else {},
            "carrier": {},
        }
        self.pipe.send({**job, **more})

    def says(self) -> dict[str, Any]:
        message = self.pipe.receive()
        assert message is not None
        return message

    def to_the_end(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What it says on the way, everything answered calmly, and its last word."""
        said: list[dict[str, Any]] = []
        while (message := self.says())["op"] not in ("returned", "raised"):
            said.append(message)
            if message["op"] in ("obey", "look") or message.get("force"):
                self.pipe.send(CALM)
        return said, message

    def ends(self) -> int:
        """Close the pipe: its exit code."""
        self.pipe.close()
        return self.process.wait(30)


@pytest.fixture
def child() -> Iterator[Child]:
    with started("-m", "longrun.child") as child:
        yield child


@pytest.fixture
def calm_child() -> Iterator[Child]:
    """One that is in no hurry to ask whether to stop: what it says does not depend on how busy the machine is."""
    with started("-c", "from longrun import child; child.LOOK_EVERY = 3600.0; child.main()") as child:
        yield child


@contextlib.contextmanager
def started(*words: str) -> Iterator[Child]:
    (ours, theirs), (bell, heard) = socket.socketpair(), socket.socketpair()
    with theirs, heard:
        numbers = (theirs.fileno(), heard.fileno())
        process = subprocess.Popen([sys.executable, *words, *map(str, numbers)], pass_fds=numbers, cwd=ROOT)
    made = Child(Pipe(ours), process, bell)
    try:
        yield made
        assert made.ends() == made.code  # whatever happened in it: a closed pipe is how it is told to leave
    finally:
        process.kill()
        process.wait()
        bell.close()
        with contextlib.suppress(OSError):
            ours.close()


def test_one_child_runs_step_after_step(child: Child) -> None:
    for n in (1, 2):
        child.run(process_steps.double, {"n": n}, context=False)
        said, last = child.to_the_end()
        assert said == []
        assert last["state"] == {"n": 2 * n, "pid": child.process.pid}
        assert last["directive"] is None
    child.run(process_steps.jump, {"n": 1}, context=False)
    assert child.to_the_end()[1] == {
        "op": "returned",
        "directive": "Goto",
        "fields": {"step": "double"},
        "class": None,
        "state": {"n": 1},
    }


def test_it_saves_and_asks_and_believes_the_answer(calm_child: Child) -> None:
    calm_child.run(process_steps.ask)
    save = calm_child.says()
    assert (save["op"], save["force"], save["drop"]) == ("save", True, [])
    assert save["put"] == {"local": '{"asked":true}'}
    calm_child.pipe.send({**CALM, "time_left": 5.0, "shutting_down": True})
    said, last = calm_child.to_the_end()
    assert said == []  # the answer is still fresh: nothing was asked again
    assert 0 < last["state"]["time_left"] <= 5.0
    assert last["state"]["shutting_down"] is True


def test_after_a_while_it_asks_whether_to_go_on(child: Child) -> None:
    """What it has to save goes first, so that a pause finds it stored."""
    child.run(process_steps.ask_late, {"seconds": 2 * LOOK_EVERY})
    said: list[dict[str, Any]] = []
    while (message := child.says())["op"] != "returned":
        said.append(message)
        if message["op"] in ("obey", "look"):
            child.pipe.send({**CALM, "time_left": 3.0, "shutting_down": message["op"] == "look"})
    assert [one["op"] for one in said] == ["save", "obey", "look"]
    assert said[0]["put"] == {"local": '{"asked":true}'}
    assert message["state"] is True


@pytest.mark.parametrize("how", ["each", "once", "force"])
def test_a_step_that_saves_often_hears_with_the_answer_that_it_must_obey(child: Child, how: str) -> None:
    child.run(process_steps.save_often, {"how": how, "times": 2})
    while not (message := child.says()).get("force"):
        if message["op"] == "obey":  # it was slow to begin
            child.pipe.send(CALM)
    child.pipe.send({**CALM, "attention": True})
    while (message := child.says())["op"] == "progress" or message.get("force") is False:
        pass
    assert message["op"] == "obey"
    child.pipe.send(CALM)
    assert child.to_the_end()[1]["op"] == "returned"


def test_a_step_stands_in_the_trace_of_its_parent(child: Child) -> None:
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    child.run(process_steps.trace, context=False, carrier=parent)
    assert child.to_the_end()[1]["state"] == "0af7651916cd43dd8448eb211c80319c"
    child.run(process_steps.trace, context=False)
    assert child.to_the_end()[1]["state"] == "0" * 32, "and only while it runs"


def test_a_save_is_handed_over_when_it_is_due_and_needs_no_answer(calm_child: Child) -> None:
    calm_child.run(process_steps.checkpoint_once, interval=0.0)
    (save,), last = calm_child.to_the_end()
    assert (save["op"], save["force"], save["put"]) == ("save", False, {"local": '{"n":1}'})
    assert last["op"] == "returned"
    calm_child.run(process_steps.tell, interval=0.0)
    said, last = calm_child.to_the_end()
    assert last["op"] == "returned"
    saves = [one for one in said if one["op"] == "save"]
    assert saves[-1]["put"] == {"each:items": '{"n":3,"of":3,"end":true}'}
    assert not any(one["force"] for one in saves)


def test_what_the_step_says_of_its_progress_is_not_overwritten_by_its_loop(child: Child) -> None:
    child.run(process_steps.tell)
    shown = [one for one in child.to_the_end()[0] if one["op"] == "progress"]
    assert shown[-1] == {"op": "progress", "done": 7, "total": 9, "message": "by hand"}
    assert {one["total"] for one in shown[:-1]} <= {3}


def test_an_attempt_goes_on_behind_the_entries_it_is_given(calm_child: Child, tmp_path: Path) -> None:
    state = {"items": 5, "dies_at": -1, "ledger": str(tmp_path / "ledger")}
    calm_child.run(process_steps.count, state, entries={"each:items": '{"n":3,"of":5}', "local": '{"sum":3}'})
    said, last = calm_child.to_the_end()
    assert last["state"]["sum"] == 10
    assert (tmp_path / "ledger").read_text().split() == ["3", "4"]
    assert [one["put"].get("each:items") for one in said if one["op"] == "save"][:2] == [
        '{"n":4,"of":5}',
        '{"n":5,"of":5}',
    ]


def test_a_coroutine_that_needs_no_loop_runs_and_one_that_does_is_refused(calm_child: Child) -> None:
    calm_child.run(process_steps.remember)
    said, last = calm_child.to_the_end()
    assert last["state"] == "at once"
    assert said[0]["put"] == {"once:answer": '"at once"'}
    calm_child.run(process_steps.remember_later)
    assert calm_child.to_the_end()[1]["name"] == "UnsupportedInProcessError"


@pytest.mark.parametrize(
    ("function", "context", "name", "text"),
    [
        (process_steps.fail, False, "ValueError", "no good"),
        (process_steps.exit_politely, False, "SystemExit", "enough"),
        (process_steps.interrupt_itself, False, "StepError", "the step raised KeyboardInterrupt"),
        (process_steps.close_itself, False, "StepError", "the step raised GeneratorExit"),
        (process_steps.fail_without_words, False, "WordlessError", ""),
        (process_steps.mapped, True, "UnsupportedInProcessError", "ctx.map does not work"),
        (process_steps.parent_of, True, "UnsupportedInProcessError", "ctx.start_child does not work"),
    ],
)
def test_what_a_step_raises_is_told_with_its_kinds_and_its_trace(
    child: Child, function: Any, context: bool, name: str, text: str
) -> None:
    child.run(function, context=context)
    last = child.to_the_end()[1]
    assert (last["op"], last["name"]) == ("raised", name)
    assert text in last["text"]
    assert "builtins.BaseException" in last["kinds"]
    assert "process_steps.py" in last["trace"]


def test_a_step_whose_parent_goes_away_is_unwound_and_its_child_leaves(child: Child) -> None:
    child.run(process_steps.ask)
    assert child.says()["op"] == "save"
    assert child.ends() == 0


def test_a_sigterm_does_not_end_it_but_what_its_step_starts(child: Child) -> None:
    """A supervisor sends it to all at once: it is the parent's to obey."""
    child.run(process_steps.ask)
    assert child.says()["op"] == "save"
    child.process.terminate()
    child.pipe.send(CALM)
    assert child.to_the_end()[1]["op"] == "returned"
    child.run(process_steps.terminate_helpers, context=False)
    assert child.to_the_end()[1]["state"] == [-signal.SIGTERM, -signal.SIGTERM]


def test_steps_of_a_program_are_found_in_its_file_which_is_loaded_once(child: Child, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "loads = 0\nloads += 1\n"
        "class Steps:\n    @staticmethod\n    def say(state):\n        return [loads, __name__]\n"
        "if __name__ == '__main__':\n    raise SystemExit('it was run as a program')\n"
    )
    for _ in range(2):
        child.run(process_steps.fail, context=False, module="__main__", name="Steps.say", main={"file": str(program)})
        assert child.to_the_end()[1]["state"] == [1, "__longrun_main__"]
    main = {"module": process_steps.__name__}
    child.run(process_steps.fail, {"n": 3}, context=False, module="__main__", name="double", main=main)
    assert child.to_the_end()[1]["state"]["n"] == 6


def test_a_program_that_was_loaded_is_a_module_like_any_other(child: Child, tmp_path: Path) -> None:
    """Annotations are resolved in it, and pickle finds what is in it."""
    program = tmp_path / "program.py"
    program.write_text(
        "from __future__ import annotations\n"
        "import pickle\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Page:\n"
        "    url: str\n"
        "    above: Page | None = None\n"
        "def climb(page: Page) -> Page:\n"
        "    return pickle.loads(pickle.dumps(page.above))\n"
    )
    state = {"url": "a/b", "above": {"url": "a", "above": None}}
    main = {"file": str(program)}
    child.run(process_steps.fail, state, context=False, module="__main__", name="climb", main=main)
    last = child.to_the_end()[1]
    assert last["op"] == "returned", last["text"]
    assert last["state"] == {"url": "a", "above": None}


def test_its_context_is_for_the_thread_of_the_step_alone(calm_child: Child) -> None:
    """But for progress, which any thread may tell: the parent's answer would come to whoever reads first."""
    calm_child.run(process_steps.use_elsewhere)
    said, last = calm_child.to_the_end()
    assert [one["op"] for one in said] == ["progress"]
    misuse = "StepMisuseError: a step's context can only be used in the thread that longrun runs it in"
    assert last["state"] == [misuse] * 3


def test_a_thread_that_a_step_leaves_behind_does_not_take_what_is_for_the_next(child: Child) -> None:
    child.run(process_steps.leave_a_thread)
    assert child.to_the_end()[1]["op"] == "returned"
    child.run(process_steps.ask_the_thread, context=False)
    said, last = child.to_the_end()
    assert (said, last["state"]) == ([], ["ContextClosedError"])


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({"module": "__main__", "main": None}, "interactive session"),
        ({"module": "no.such.module"}, "No module named"),
        ({"name": "no_such_step"}, "no_such_step"),
    ],
)
def test_a_step_that_cannot_be_found_fails_the_attempt_and_not_the_child(
    child: Child, where: dict[str, Any], text: str
) -> None:
    child.run(process_steps.double, {"n": 1}, context=False, **where)
    last = child.to_the_end()[1]
    assert last["op"] == "raised"
    assert text in last["text"]
    child.run(process_steps.double, {"n": 1}, context=False)
    assert child.to_the_end()[1]["state"]["n"] == 2


def test_a_message_that_is_cut_off_is_nobody_speaking() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((100).to_bytes(8, "big") + b"half of i")
        theirs.close()
        assert Pipe(ours).receive() is None


def test_what_several_threads_say_at_once_is_not_mixed_up() -> None:
    """Messages larger than what the socket takes at once."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        reader, writer = Pipe(ours), Pipe(theirs)
        texts = [letter * 1_000_000 for letter in "abcd"]
        threads = [threading.Thread(target=writer.send, args=({"text": text},), daemon=True) for text in texts]
        for thread in threads:
            thread.start()
        messages = [reader.receive() for _ in threads]
        for thread in threads:
            thread.join()
    assert sorted(message["text"] for message in messages if message) == texts


def test_before_it_is_killed_it_says_what_it_has_captured_and_captures_no_more(child: Child) -> None:
    child.code = -signal.SIGKILL
    child.run(process_steps.count_and_hang, {"fails_at": 3, "ledger": os.devnull, "how": "hang"})
    while child.says().get("done") != 3:
        pass
    child.bell.send(b"!")
    while (message := child.says())["op"] != "last":
        pass
    assert message["put"] == {"each:items": '{"n":3,"of":6}', "local": '{"sum":3}'}
    child.process.kill()
