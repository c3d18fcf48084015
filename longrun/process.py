"""Run a step in a child process: `run_in="process"`.

Place in the life of an execution: run a step. The child finds the function by module and qualified name; state, result
and progress cross as the codec's bytes. A step thread serves the child's context calls while it runs. Cancel and
time-out kill the child; its death fails the attempt, not the program; and it dies with its parent.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import anyio
import attrs

from longrun import codec, errors
from longrun.attempt import Attempt
from longrun.errors import (
    NotStorableError,
    RegistrationError,
    StepInterrupted,
    StepProcessError,
    StepSignatureError,
    UnsupportedInProcessError,
)
from longrun.pipe import MAIN, UNTIL_READY, Pipe
from longrun.records import Progress
from longrun.registry import DIRECTIVES, Repeat, Step
from longrun.stores.readers import apart
from longrun.telemetry import carrier
from longrun.threads import call_from_thread

IDLE = 4
"""Children kept for the next step once theirs has ended."""
LAST_WORDS = 2.0
"""How long a child that has closed its pipe, or was killed, may take to end."""
LAST_CAPTURE = 0.25
"""How long one that is to be killed may take to hand over what its step has captured."""
DIRECTIVE = {kind.__name__: kind for kind in DIRECTIVES}


class RemoteError(Exception):
    """An exception of a child process, of the same kind where that kind is known here."""


class Child:
    """A child process that runs one step at a time."""

    def __init__(self) -> None:
        (ours, theirs), (self._bell, bell) = socket.socketpair(), socket.socketpair()
        with theirs, bell, _held_back(UNTIL_READY):
            numbers = (theirs.fileno(), bell.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "longrun.child", *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
            )
        self.pipe = Pipe(ours)
        self.silent = threading.Event()
        """Nobody reads what it says: it has no job, or has said its last."""
        self.silent.set()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        self.pipe.close()
        self._bell.close()

    async def stopped(self) -> None:
        """Let it hand over what its step has captured, as long as that may take, and kill it."""
        with anyio.move_on_after(LAST_CAPTURE, shield=True):
            with contextlib.suppress(OSError):
                self._bell.send(b"!")
            await apart(self.silent.wait, shield=False)
        await self.killed()

    async def killed(self) -> None:
        """Kill it and see it gone, in a thread: one with much memory takes its time. One that hangs in the kernel, on a
        disk that does not answer, is left to that thread: it will run nothing more."""
        self.kill()
        with anyio.move_on_after(LAST_WORDS, shield=True):
            await apart(self._process.wait, shield=False)

    def end(self) -> str:
        """Close the pipe, which ends an idle child, and say how it ended. Only for threads: it may take a while."""
        self.close()
        try:
            code = self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "closed its pipe and did not end"
        if code < 0:
            named = {known.value: known.name for known in signal.Signals}
            return f"was killed by {named.get(-code, f'signal {-code}')}"
        return f"ended with exit code {code}"


@contextlib.contextmanager
def _held_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """What is started meanwhile gets them when it asks for them, not before; so does this thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessEngine:
    """Child processes, started as they are needed and kept for a while."""

    def __init__(self, steps: Mapping[str, Step], limit: int | None = None) -> None:
        """`steps` are those of the program: they say what a child's instances are."""
        self._steps = steps
        self._places = anyio.Semaphore(limit or max(4, 2 * (os.cpu_count() or 1)))
        self._idle: list[Child] = []

    async def run(self, attempt: Attempt, state: Any) -> Any:
        step = attempt.step
        _check_found(step)
        async with self._places:
            child = self._child()
            finished = False
            try:
                outcome = await attempt.run_sync(_drive, attempt, child, _job(attempt, state))
                finished = True
            finally:
                if not finished:
                    await (child.stopped() if step.takes_context else child.killed())
            await self._keep(child)
        if outcome["op"] == "raised":
            raise _error(step, outcome)
        return _returned(step, outcome, self._steps)

    def _child(self) -> Child:
        # In the loop's thread: on Linux, a child that asked to die with its parent dies with the thread that made it.
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            child.close()
        return Child()

    async def _keep(self, child: Child) -> None:
        if child.alive and len(self._idle) < IDLE:
            self._idle.append(child)
        else:
            await child.killed()

    async def aclose(self) -> None:
        for child in self._idle:
            child.kill()  # all at once
        while self._idle:
            await self._idle.pop().killed()


def _check_found(step: Step) -> None:
    """A child finds a function by its name: that must not be the name of another, such as the one that it decorates.
    Asked when it runs, since its module may register it before the name is there."""
    module, name = step.function.__module__, step.function.__qualname__
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found != step.function:
        raise StepSignatureError(
            step.name, f"a child process would look for it as {module}.{name}, and does not find this function there"
        )
    if module == "__main__" and _main() is None:
        raise StepSignatureError(step.name, "a child process cannot load this program again: it is not in a file")


def _job(attempt: Attempt, state: Any) -> dict[str, Any]:
    step = attempt.step
    return {
        "path": sys.path,
        "main": _main(),
        "module": step.function.__module__,
        "name": step.function.__qualname__,
        "takes_context": step.takes_context,
        "info": codec.unstructure(_plain_info(attempt), dict, "info"),
        "entries": {key: data.decode() for key, data in attempt.ledger.entries.items()},
        "interval": None if attempt.interval == math.inf else attempt.interval,
        "state": codec.unstructure(state, step.state_type),
        "carrier": carrier(),
    }


def _plain_info(attempt: Attempt) -> dict[str, Any]:
    return {**attrs.asdict(attempt.info, recurse=False), "metadata": dict(attempt.info.metadata)}


def _main() -> dict[str, str] | None:
    """How the child can load what is `__main__` here, without running it as a program."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return {"module": spec.name}
    path = getattr(main, "__file__", None)
    return {"file": os.path.abspath(path)} if path and os.path.exists(path) else None


def _drive(attempt: Attempt, child: Child, job: dict[str, Any]) -> dict[str, Any]:
    """In a step thread: give the child its job, answer its calls, and return its last message."""
    child.silent.clear()
    try:
        return _conversation(attempt, child, job)
    except StepInterrupted:  # it was in the middle of a call; the child is being asked for its last words
        while (message := child.pipe.receive()) is not None and message["op"] != "last":
            if message["op"] == "save":
                _record(attempt, message)
        if message is not None:
            _record(attempt, message)
        raise
    finally:
        child.silent.set()


def _conversation(attempt: Attempt, child: Child, job: dict[str, Any]) -> dict[str, Any]:
    try:
        child.pipe.send(job)
    except OSError:
        raise StepProcessError(attempt.step.name, child.end()) from None
    while True:
        message = child.pipe.receive()
        if message is None:
            raise StepProcessError(attempt.step.name, child.end())
        if message["op"] in ("returned", "raised"):
            return message
        if message["op"] == "last":
            _record(attempt, message)
            return message
        _serve(attempt, child, message)


def _record(attempt: Attempt, changes: dict[str, Any]) -> None:
    """Take over what the child has captured: all of it at once, since a save may come at any moment."""
    ledger = attempt.ledger
    with ledger.lock:
        ledger.drop(changes["drop"])
        for key, text in changes["put"].items():
            ledger.record(key, text.encode())


def _serve(attempt: Attempt, child: Child, message: dict[str, Any]) -> None:
    op = message["op"]
    if op == "save":
        _record(attempt, message)
        if not message["force"]:
            attempt.hand_over()
            return
        call_from_thread(attempt.durable)
    elif op == "obey":
        call_from_thread(attempt.obey)
    elif op == "progress":
        attempt.report(Progress(done=message["done"], total=message["total"], message=message["message"]))
        return
    elif op != "look":
        raise UnsupportedInProcessError(op)
    answer = {"attention": attempt.attention, "shutting_down": attempt.shutting_down, "time_left": attempt.time_left()}
    child.pipe.send(answer)


def _returned(step: Step, message: dict[str, Any], steps: Mapping[str, Step]) -> Any:
    directive = message["directive"]
    value = codec.structure(message["state"], _type_of(step, message, steps), "state")
    if directive is None:
        return value
    fields = codec.structure(message["fields"], dict, "directive")
    return DIRECTIVE[directive](**fields, state=value)


def _type_of(step: Step, message: dict[str, Any], steps: Mapping[str, Step]) -> Any:
    """What the state that a step has returned was written by. Of an instance of which the step itself says nothing, the
    class must be one that a step of this program receives."""
    name = message["class"]
    if name is None:
        return step.state_type if message["directive"] == Repeat.__name__ else step.result_type
    for other in (step, *steps.values()):
        with contextlib.suppress(RegistrationError):  # an annotation that cannot be resolved: told when that step runs
            if isinstance(other.state_type, type) and _name_there(other.state_type) == name:
                return other.state_type
    raise NotStorableError("state", f"it is an instance of {name}, which no step receives; annotate what is returned")


def _error(step: Step, message: dict[str, Any]) -> Exception:
    """An error that the step's retry policy takes for what it was in the child."""
    text = message["text"]
    policy = step.retry
    known: list[type] = [*(policy.retry_on if policy else ()), *(policy.give_up_on if policy else ())]
    everywhere = [*vars(builtins).values(), *vars(errors).values()]
    known += [kind for kind in everywhere if isinstance(kind, type) and issubclass(kind, Exception)]
    by_name = {_name_there(kind): kind for kind in known}
    kind = next((by_name[name] for name in message["kinds"] if name in by_name), Exception)
    bases: tuple[type, ...] = (RemoteError,) if kind is Exception else (RemoteError, kind)
    fields = {"__init__": _init_plainly, "__str__": lambda self: text}
    try:
        error: Exception = type(message["name"], bases, fields)()
    except Exception:  # a kind that cannot be made of nothing, such as an ExceptionGroup
        error = type(message["name"], (RemoteError,), fields)()
    error.add_note(message["trace"])
    return error


def _name_there(kind: type) -> str:
    """What a class of this program is called in a child."""
    module = kind.__module__
    if module == "__main__":
        module = (_main() or {}).get("module", MAIN)
    return f"{module}.{kind.__qualname__}"


def _init_plainly(self: Exception) -> None:
    """Kinds such as UnicodeDecodeError insist on arguments; the text is all that crossed."""
