"""Steps in child processes: `run_in="process"`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import (
    ExecutionCancelledError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    RetryPolicy,
    StepRegistry,
    StepSignatureError,
    process,
)
from longrun.errors import StepProcessError, UnsupportedInProcessError
from longrun.ledger import Ledger
from longrun.process import IDLE, Child, ProcessEngine, _drive, _serve
from tests import process_steps
from tests.crashing import LASTING, expire

QUICK = RetryPolicy(max_attempts=3, initial=0, jitter=False)
pytestmark = pytest.mark.anyio


def registry_of(*functions: Any, **options: Any) -> StepRegistry:
    registry = StepRegistry()
    for function in functions:
        registry.register(None, function, run_in="process", **options)
    registry.workflow("w", [function.__name__ for function in functions])
    return registry


async def result_of(registry: StepRegistry, state: Any) -> Any:
    async with Executor(registry, store="memory:") as executor:
        with anyio.fail_after(30):
            return await (await executor.start("w", state)).result()


async def look_again() -> None:
    """A child is waited for, which needs the processor itself."""
    await anyio.sleep(0.01)


async def read_when_there(path: Path) -> str:
    with anyio.fail_after(20):
        while not (path.exists() and path.read_text()):
            await look_again()
    return path.read_text()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child gets time for its last words on a busy machine too."""
    monkeypatch.setattr(process, "LAST_CAPTURE", 20.0)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_runs_elsewhere_and_its_child_serves_the_next_step() -> None:
    result = await result_of(registry_of(process_steps.double), {"n": 4})
    assert result["n"] == 8
    assert result["pid"] != os.getpid()


async def test_typed_states_and_directives_cross_the_pipe() -> None:
    page = process_steps.Page(url="u", size=1)
    assert await result_of(registry_of(process_steps.typed), page) == process_steps.Page(url="u", size=2)
    result = await result_of(registry_of(process_steps.jump, process_steps.fail, process_steps.double), {"n": 1})
    assert result["n"] == 2


@pytest.mark.parametrize(
    ("step", "says", "attempts"),
    [
        (process_steps.die, "SIGKILL", 3),
        (process_steps.leave, "exit code 3", 3),
        (process_steps.exit_politely, "SystemExit", 3),
        (process_steps.fail, "ValueError: no good", 3),
        (process_steps.fail_manifold, "ExceptionGroup: many", 3),
        (process_steps.fail_without_words, "WordlessError", 3),
        (process_steps.mapped, "ctx.map does not work in a child process", 1),  # nor would it the next time
    ],
)
async def test_what_goes_wrong_in_a_child_fails_the_attempt_not_the_program(
    step: Any, says: str, attempts: int
) -> None:
    with pytest.raises(ExecutionFailedError, match=says) as caught:
        await result_of(registry_of(step, retry=QUICK), {})
    assert caught.value.attempt == attempts


async def test_the_policy_recognises_the_kind_of_a_childs_error() -> None:
    with pytest.raises(ExecutionFailedError) as caught:
        await result_of(registry_of(process_steps.give_up, retry=QUICK), {})
    assert caught.value.attempt == 1
    picky = RetryPolicy(max_attempts=3, initial=0, retry_on=(KeyError,))
    with pytest.raises(ExecutionFailedError) as caught:
        await result_of(registry_of(process_steps.fail, retry=picky), {})
    assert caught.value.attempt == 1


@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_the_last_capture_is_flushed_however_an_attempt_ends(tmp_path: Path, how: str, patient: None) -> None:
    """An error, or a time-out of which the child knows nothing: the next attempt begins with the item that was open."""
    registry = registry_of(process_steps.count_and_hang, retry=QUICK, timeout=LASTING if how == "hang" else None)
    ledger = tmp_path / "ledger"
    async with Executor(registry, store="memory:") as executor:
        with anyio.fail_after(30):
            run = await executor.start("w", {"fails_at": 3, "how": how, "ledger": str(ledger)})
            if how == "hang":
                while await read_when_there(ledger) != "0 1 2 3 ":
                    await look_again()
                expire(executor, run.id)
            assert (await run.result())["sum"] == 15
    assert ledger.read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]


async def test_a_capture_before_an_error_is_what_the_next_attempt_begins_with() -> None:
    assert await result_of(registry_of(process_steps.note_and_fail, retry=QUICK), {}) == {"x": 1}


async def test_an_interrupting_pause_flushes_the_last_capture(tmp_path: Path, patient: None) -> None:
    state = {"fails_at": 3, "how": "hang", "ledger": str(tmp_path / "ledger")}
    async with Executor(registry_of(process_steps.count_and_hang), store="memory:") as executor:
        with anyio.fail_after(30):
            run = await executor.start("w", state)
            while (await read_when_there(tmp_path / "ledger")).split() != ["0", "1", "2", "3"]:
                await look_again()
            await run.pause(interrupt=True)
            entries = (await executor.store.load(run.id)).entries
    assert entries["each:items"] == b'{"n":3,"of":6}'


async def test_a_step_that_failed_leaves_its_child_to_the_next_attempt(tmp_path: Path) -> None:
    registry = registry_of(process_steps.double, process_steps.count_and_hang, retry=QUICK)
    state = {"n": 1, "fails_at": 3, "how": "fail", "ledger": str(tmp_path / "ledger")}
    async with Executor(registry, store="memory:") as executor:
        with anyio.fail_after(30):
            run = await executor.start("w", state)
            result = await run.result()
            first = next(one.state["pid"] for one in await executor.history(run.id) if "pid" in one.state)
    assert result["pid"] == first


def test_what_a_child_has_captured_is_taken_over_at_once() -> None:
    """A save that came in between would hold half of it."""

    class Watched(Ledger):
        def record(self, key: str, data: bytes) -> None:
            found.append(elsewhere(lambda: self.lock.acquire(blocking=False)))
            super().record(key, data)

    class Attempt:
        ledger = Watched({"once:a": b"1"})

        def hand_over(self) -> None:
            found.append(sorted(self.ledger.entries))

    def elsewhere(function: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    found: list[Any] = []
    attempt: Any = Attempt()
    child: Any = None
    changes = {"op": "save", "drop": ["once:a"], "put": {"each:b": "2", "local": "{}"}, "force": False}
    _serve(attempt, child, changes)
    assert found == [False, False, ["each:b", "local"]]


async def test_instances_cross_the_pipe_where_the_step_says_nothing_of_them() -> None:
    """As they do from a thread: by the class of who receives them, the step itself included."""
    page = process_steps.Page
    assert await result_of(registry_of(process_steps.read_on), page(url="u", size=1)) == page(url="u", size=4)
    registry = registry_of(process_steps.make_a_page, process_steps.typed)
    assert await result_of(registry, "u") == page(url="u", size=1)
    with pytest.raises(ExecutionFailedError, match=r"Leaf, which no step receives"):
        await result_of(registry_of(process_steps.make_a_leaf, retry=QUICK), "u")


@pytest.mark.parametrize("loop", ["asyncio", "anyio", "trio"])
async def test_once_awaits_nothing_in_a_child(loop: str) -> None:
    with pytest.raises(ExecutionFailedError, match="async function that waits does not work in a child") as caught:
        await result_of(registry_of(process_steps.once_async, retry=QUICK), loop)
    assert caught.value.attempt == 1


async def test_progress_inside_the_step_survives_the_death_of_the_child(tmp_path: Path) -> None:
    state = {"items": 6, "dies_at": 3, "ledger": str(tmp_path / "ledger")}
    result = await result_of(registry_of(process_steps.count, retry=QUICK), state)
    assert result["sum"] == 15
    assert result["key"].endswith(":1")
    assert (tmp_path / "ledger").read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]


@pytest.mark.parametrize("step", [process_steps.forever, process_steps.deaf])
async def test_cancel_kills_the_child(step: Any, tmp_path: Path) -> None:
    async with Executor(registry_of(step), store="memory:") as executor:
        run = await executor.start("w", {"pid_file": str(tmp_path / "pid")})
        pid = int(await read_when_there(tmp_path / "pid"))
        with anyio.fail_after(20):
            await run.cancel("enough")
            with pytest.raises(ExecutionCancelledError, match="enough"):
                await run.result()
            while is_running(pid):
                await look_again()


async def test_the_event_loop_does_not_wait_for_a_child_that_dies_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the cancel, without end: one that hangs in the kernel runs nothing more."""
    gone, waiting, wait = threading.Event(), set[int](), subprocess.Popen.wait

    def slow(child: Any, timeout: float | None = None) -> int:
        waiting.add(threading.get_ident())
        assert threading.get_ident() == loop or gone.wait(60)
        return wait(child, timeout)

    loop = threading.get_ident()
    registry = registry_of(process_steps.deaf)
    registry.register(None, process_steps.double, run_in="process")
    registry.workflow("idle", ["double"])
    async with Executor(registry, store="memory:") as executor:
        run = await executor.start("w", {"pid_file": str(tmp_path / "pid")})
        pid = int(await read_when_there(tmp_path / "pid"))
        with anyio.fail_after(20):
            await (await executor.start("idle", {"n": 1})).result()
            monkeypatch.setattr(process, "LAST_WORDS", 0.05)
            monkeypatch.setattr(subprocess.Popen, "wait", slow)
            try:
                await run.cancel("enough")
            finally:
                gone.set()
            while is_running(pid):
                await look_again()
    assert waiting
    assert loop not in waiting


async def test_a_time_out_kills_the_child(tmp_path: Path) -> None:
    registry = registry_of(process_steps.deaf, timeout=LASTING, retry=RetryPolicy(max_attempts=1))
    async with Executor(registry, store="memory:") as executor:
        with anyio.fail_after(30):
            run = await executor.start("w", {"pid_file": str(tmp_path / "pid")})
            pid = int(await read_when_there(tmp_path / "pid"))
            expire(executor, run.id)
            with pytest.raises(ExecutionFailedError, match="ran over its time-out"):
                await run.result()
            assert not is_running(pid)


async def test_the_time_of_a_step_begins_when_there_is_a_child_for_it(tmp_path: Path) -> None:
    """However long it has waited for one."""
    registry = registry_of(process_steps.double, timeout=1.5, retry=RetryPolicy(max_attempts=1))
    registry.register(None, process_steps.wait_until_told, run_in="process")
    registry.workflow("wait", ["wait_until_told"])
    async with Executor(registry, store="memory:") as executor:
        executor._engines["process"] = ProcessEngine({}, limit=1)
        with anyio.fail_after(30):
            first = await executor.start("wait", {"told": str(tmp_path / "told"), "pid_file": str(tmp_path / "pid")})
            await read_when_there(tmp_path / "pid")
            queued = await executor.start("w", {"n": 1})
            with pytest.raises(TimeoutError):
                await queued.result(timeout=1.7)
            (tmp_path / "told").touch()
            await first.result()
            assert (await queued.result())["n"] == 2


async def test_a_sigterm_to_the_whole_group_leaves_the_attempt_alone(tmp_path: Path) -> None:
    """Only the parent decides what becomes of it: a drain uses no attempt up."""
    registry = registry_of(process_steps.wait_until_told, retry=RetryPolicy(max_attempts=1))
    async with Executor(registry, store="memory:") as executor:
        with anyio.fail_after(30):
            run = await executor.start("w", {"told": str(tmp_path / "told"), "pid_file": str(tmp_path / "pid")})
            os.kill(int(await read_when_there(tmp_path / "pid")), signal.SIGTERM)
            (tmp_path / "told").touch()
            await run.result()


@pytest.mark.parametrize(
    ("step", "seconds", "says"),
    [(process_steps.leave_a_helper, None, "SIGKILL"), (process_steps.wait_for_a_helper, 0.7, "ran over its time-out")],
)
async def test_what_a_step_has_started_does_not_keep_its_attempt_from_ending(
    step: Any, seconds: float | None, says: str, tmp_path: Path
) -> None:
    """A process of its own outlives it, and has what it had open. The second attempt waits for the end of the first."""
    try:
        with pytest.raises(ExecutionFailedError, match=says):
            state = {"told": str(tmp_path / "told")}
            await result_of(registry_of(step, timeout=seconds, retry=RetryPolicy(max_attempts=2, initial=0)), state)
    finally:
        (tmp_path / "told").touch()


async def test_pause_takes_effect_at_the_childs_next_point(tmp_path: Path) -> None:
    async with Executor(registry_of(process_steps.forever), store="memory:") as executor:
        run = await executor.start("w", {"pid_file": str(tmp_path / "pid")})
        with anyio.fail_after(20):
            while not ((shown := (await run.info()).step_progress) and shown.done):  # before, there is nothing to keep
                await look_again()
            await run.pause()
        loaded = await executor.store.load(run.id)
        assert loaded.entries["each:beats"]
        assert str(loaded.head.state) == "paused"


@pytest.mark.parametrize("how", ["each", "once", "force"])
async def test_a_step_that_saves_all_the_time_obeys_a_pause(how: str) -> None:
    async with Executor(registry_of(process_steps.save_often), store="memory:") as executor:
        run = await executor.start("w", {"how": how, "times": 10_000_000})
        with anyio.fail_after(20):
            while not (await executor.store.load(run.id)).entries:
                await look_again()
            await run.pause()
        assert str((await executor.store.load(run.id)).head.state) == "paused"


async def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import anyio\n"
        "from longrun import Executor, StepRegistry\n"
        "from tests import process_steps\n"
        "registry = StepRegistry()\n"
        "registry.register(None, process_steps.deaf, run_in='process')\n"
        "registry.workflow('w', ['deaf'])\n"
        "async def main():\n"
        "    async with Executor(registry, store='memory:') as executor:\n"
        f"        await (await executor.start('w', {{'pid_file': {str(tmp_path / 'pid')!r}}})).result()\n"
        "anyio.run(main)\n"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, str(program)], env={**os.environ, "PYTHONPATH": str(root)}) as parent:
        pid = int(await read_when_there(tmp_path / "pid"))
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline


async def test_a_step_of_a_program_that_runs_as_a_module_is_found_by_its_name(tmp_path: Path) -> None:
    """What is `__main__` here is a module like any other there, and is not run a second time."""
    (tmp_path / "runs_as_module.py").write_text(
        "import anyio\n"
        "from longrun import Executor, StepRegistry\n"
        "def where(state):\n"
        "    return __name__\n"
        "async def main():\n"
        "    registry = StepRegistry()\n"
        "    registry.register(None, where, run_in='process')\n"
        "    registry.workflow('w', ['where'])\n"
        "    async with Executor(registry, store='memory:') as executor:\n"
        "        print(await (await executor.start('w', None)).result())\n"
        "if __name__ == '__main__':\n"
        "    anyio.run(main)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent.parent), str(tmp_path)])
    command = [sys.executable, "-m", "runs_as_module"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout == "runs_as_module\n", done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["refused.py"], "failed in step 'pay' at attempt 1: Refused: the card"),
        (["-m", "refused"], "failed in step 'pay' at attempt 1: Refused: the card"),
        (["-"], "failed in step 'pay' at attempt 1: StepSignatureError: step 'pay' cannot be used: a child process"),
    ],
)
def test_the_policy_recognises_an_error_of_the_program_itself(command: list[str], says: str, tmp_path: Path) -> None:
    """However it is started, and whatever a child calls it. One that is in no file cannot be loaded there."""
    program = tmp_path / "refused.py"
    program.write_text(
        "import anyio\n"
        "from longrun import ExecutionFailedError, Executor, RetryPolicy, StepRegistry\n"
        "class Refused(Exception):\n"
        "    pass\n"
        "def pay(state):\n"
        "    raise Refused('the card')\n"
        "async def main():\n"
        "    registry = StepRegistry()\n"
        "    policy = RetryPolicy(max_attempts=2, initial=0, give_up_on=(Refused,))\n"
        "    registry.register(None, pay, run_in='process', retry=policy)\n"
        "    registry.workflow('w', ['pay'])\n"
        "    async with Executor(registry, store='memory:') as executor:\n"
        "        try:\n"
        "            await (await executor.start('w', None)).result()\n"
        "        except ExecutionFailedError as error:\n"
        "            print(error)\n"
        "if __name__ == '__main__':\n"
        "    anyio.run(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with program.open() as text:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            stdin=text,
            capture_output=True,
            text=True,
            check=False,
        )
    assert says in done.stdout, done.stderr


async def test_a_function_that_does_not_stand_under_its_name_is_refused() -> None:
    """A child would run the one that does, without what decorates it."""
    registry = StepRegistry()
    registry.register("w", process_steps.audited(process_steps.double), run_in="process", retry=QUICK)
    registry.workflow("w", ["w"])
    with pytest.raises(ExecutionFailedError, match="does not find this function there") as caught:
        await result_of(registry, {"n": 1})
    assert caught.value.attempt == 1


async def test_a_method_of_a_class_is_found_and_one_of_an_object_is_refused() -> None:
    assert await result_of(registry_of(process_steps.Methods.of_class), {}) == "Methods"
    with pytest.raises(StepSignatureError, match="does not have the object"):
        registry_of(process_steps.Methods().method)


def test_a_program_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    """A child that looks for its step there would run the program once more."""
    (tmp_path / "program.py").write_text(
        "import anyio\n"
        "from longrun import Executor, StepRegistry\n"
        "registry = StepRegistry()\n"
        "@registry.step(run_in='process')\n"
        "def crunch(state):\n"
        "    return state\n"
        "registry.workflow('w', [crunch])\n"
        "async def main():\n"
        "    async with Executor(registry) as executor:\n"
        "        await (await executor.start('w', None, id='a')).result(timeout=60)\n"
        "anyio.run(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "put what runs it under `if __name__ == '__main__':`" in done.stderr


async def test_what_an_item_had_kept_goes_with_it() -> None:
    """Each item remembers something under the same name: what a child drops is dropped in its parent's ledger too."""
    async with Executor(registry_of(process_steps.remember_each), store="memory:") as executor:
        with anyio.fail_after(30):
            run = await executor.start("w", {"items": 3})
            assert await run.result() == [0, 10, 20]


async def test_a_child_that_died_while_it_was_idle_is_replaced() -> None:
    async with Executor(registry_of(process_steps.double), store="memory:") as executor:
        with anyio.fail_after(30):
            first = await (await executor.start("w", {"n": 1})).result()
            os.kill(first["pid"], signal.SIGKILL)
            while is_running(first["pid"]):
                await look_again()
            second = await (await executor.start("w", {"n": 2})).result()
    assert (second["n"], second["pid"] != first["pid"]) == (4, True)


async def test_only_some_children_are_kept_for_later() -> None:
    engine = ProcessEngine({})
    children = [Child() for _ in range(IDLE + 1)]
    for child in children:
        await engine._keep(child)
    assert [child.alive for child in children] == [True] * IDLE + [False]
    await engine.aclose()
    assert not any(child.alive for child in children)


class FakeAttempt:
    class step:  # noqa: N801 -- an attribute of the real one
        name = "s"


def test_a_child_that_is_gone_before_it_has_its_job_fails_the_attempt() -> None:
    child = Child()
    child._process.kill()
    child._process.wait()
    attempt: Any = FakeAttempt()
    with pytest.raises(StepProcessError, match="was killed by SIGKILL"):
        _drive(attempt, child, {"state": "x" * 1_000_000})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_does_not_end_a_child_that_is_just_starting(number: signal.Signals) -> None:
    child = Child()
    child._process.send_signal(number)
    child.close()
    assert child._process.wait(30) == 0
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no real-time signals")
def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    child = Child()
    child._process.send_signal(signal.SIGRTMIN + 1)
    assert child.end() == f"was killed by signal {signal.SIGRTMIN + 1}"


def test_a_call_that_this_side_does_not_know_is_refused() -> None:
    anything: Any = FakeAttempt()
    with pytest.raises(UnsupportedInProcessError, match=r"ctx\.fly"):
        _serve(anything, anything, {"op": "fly"})


def test_what_a_child_could_not_find_is_refused_at_registration() -> None:
    def local(state: dict[str, Any]) -> dict[str, Any]:
        return state

    registry = StepRegistry()
    with pytest.raises(StepSignatureError, match="module level"):
        registry.register(None, local, run_in="process")
    with pytest.raises(StepSignatureError, match="module level"):
        registry.register("lambda", lambda state: state, run_in="process")


async def test_an_executor_ends_its_idle_children() -> None:
    config = ExecutorConfig(auto_resume=False)
    async with Executor(registry_of(process_steps.double), store="memory:", config=config) as executor:
        result = await (await executor.start("w", {"n": 1})).result()
        assert is_running(result["pid"])
    assert not is_running(result["pid"])


async def test_a_child_that_closes_its_pipe_and_stays_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LAST_WORDS", 0.05)
    with pytest.raises(ExecutionFailedError, match="closed its pipe and did not end"):
        await result_of(registry_of(process_steps.hang_up, retry=RetryPolicy(max_attempts=1)), {})


def test_an_async_function_is_refused_when_it_is_registered() -> None:
    with pytest.raises(StepSignatureError, match="give a plain function"):
        registry_of(process_steps.in_a_loop)
