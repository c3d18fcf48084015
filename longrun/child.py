"""The other side of `process.py`: a child process that runs steps one after the other, until its parent is gone.

Place in the life of an execution: run a step, in another process. It has the blocking context of step threads, standing
on a ledger of its own whose captures it sends home.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import attrs

from longrun import codec
from longrun import pipe as pipes
from longrun.branches import text_of
from longrun.context import StepContext, SyncStepContext, root_context
from longrun.errors import (
    ContextClosedError,
    StepInterrupted,
    StepMisuseError,
    UnsupportedInProcessError,
    holds,
    raised_itself,
)
from longrun.ledger import Ledger
from longrun.pipe import Pipe, class_name
from longrun.port import StepInfo
from longrun.records import Progress
from longrun.registry import DIRECTIVES, Repeat, Step, StepRegistry
from longrun.telemetry import carried
from longrun.threads import ELSEWHERE

T = TypeVar("T")
LOOK_EVERY = 0.05
"""How often a loop asks its parent whether to stop."""


WAITS = "once with an async function that waits"
_NO_LOOP = ("no running event loop", "running on any asynchronous event loop", "must be called from async context")
"""What asyncio, anyio and trio say to a coroutine that asks for one."""


class PipePort:
    """The port of a context in a child process."""

    def __init__(self, step: str, pipe: Pipe, ledger: Ledger, interval: float) -> None:
        self._step, self._pipe, self._ledger, self._interval = step, pipe, ledger, interval
        self._thread = threading.get_ident()
        self._asking = threading.Lock()
        self._sending = threading.Lock()
        """Nobody is killed between taking captures out of the ledger and sending them: see `last_words`."""
        self._over = False
        self.save_at = time.monotonic() + interval
        self._look_at = time.monotonic() + LOOK_EVERY
        self._left: tuple[float, float | None] = (0.0, None)
        self._shutting_down = False
        self._called = False
        self._announced = False

    def check(self, *, blocking: bool = False) -> None:
        if blocking and threading.get_ident() != self._thread:
            raise StepMisuseError(ELSEWHERE)
        if self._over:
            raise ContextClosedError(self._step, "it has ended")

    def end(self) -> None:
        """The step is over, however that came: what it has captured goes home before that is said. A thread that it
        has left behind must not take the parent's next words for its answer."""
        with self._asking:
            self._over = True
        self._ledger.forget_groups()
        if self._ledger.dirty:
            self.hand_over()

    def last_words(self) -> None:
        """The parent is about to kill this process, and gets what was captured until now. Nothing is after that: who
        captures waits for the ledger."""
        with self._sending:
            self._ledger.lock.acquire()
            self._pipe.send({**self._changes(), "op": "last"})

    @property
    def attention(self) -> bool:
        """Whether the parent has said so with its last answer, or it is time to ask."""
        return self._called or time.monotonic() >= self._look_at

    def hand_over(self) -> None:
        self.save_at = time.monotonic() + self._interval
        with self._sending:
            self._pipe.send(self._changes())

    async def durable(self) -> None:
        self.save_at = time.monotonic() + self._interval
        self._ask(lambda: {**self._changes(), "force": True})

    async def obey(self) -> None:
        if self._ledger.dirty:
            self.hand_over()
        self._ask(lambda: {"op": "obey"})

    def _changes(self) -> dict[str, Any]:
        put, drop = self._ledger.collect()
        text = {key: data.decode() for key, data in put.items()}
        return {"op": "save", "put": text, "drop": list(drop), "force": False}

    def _ask(self, message: Callable[[], dict[str, Any]]) -> None:
        with self._asking:
            self.check()
            with self._sending:
                self._pipe.send(message())
            answer = self._pipe.receive()
        if answer is None:
            raise StepInterrupted("the parent process is gone")
        now = time.monotonic()
        self._look_at = now + LOOK_EVERY
        self._left = (now, answer["time_left"])
        self._shutting_down = answer["shutting_down"]
        self._called = answer["attention"]

    def _look(self) -> None:
        if time.monotonic() >= self._look_at:
            self._ask(lambda: {"op": "look"})

    def must_stop(self) -> bool:
        return False

    def report(self, progress: Progress) -> None:
        if not self._announced:
            self._pipe.send({"op": "progress", **attrs.asdict(progress)})

    def announce(self, progress: Progress) -> None:
        self.check()
        self._announced = True
        self._pipe.send({"op": "progress", **attrs.asdict(progress)})

    def follow(self, source: Callable[[], Progress]) -> None:
        pass

    def time_left(self) -> float | None:
        self._look()
        seen, left = self._left
        return None if left is None else max(0.0, left - (time.monotonic() - seen))

    @property
    def shutting_down(self) -> bool:
        self._look()
        return self._shutting_down

    async def run_sync(self, function: Callable[..., T], *args: Any) -> T:
        raise UnsupportedInProcessError("map")

    async def start_child(self, workflow: Any, state: Any, key: str) -> Any:
        raise UnsupportedInProcessError("start_child")

    def call_from_thread(self, function: Callable[..., Any], *args: Any, lasting: bool = False) -> Any:
        """There is no loop here: none of the port's coroutines ever waits for one, and what a step brings must not."""
        coroutine = function(*args)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_LOOP):
                raise
            raise UnsupportedInProcessError(WAITS) from error
        raise UnsupportedInProcessError(WAITS)


class Listener:
    """Waits, in a thread, for the parent to say that it is about to kill this process. Only for steps with a context:
    others have nothing to hand over, and their program may want to be of one thread, to fork say."""

    def __init__(self, bell: socket.socket) -> None:
        self._bell = bell
        self._port: PipePort | None = None

    def attend(self, port: PipePort) -> None:
        begun, self._port = self._port is not None, port
        if not begun:
            threading.Thread(target=self._listen, name="longrun-last-words", daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and we are next
            if self._bell.recv(1) and self._port is not None:
                self._port.last_words()


class ChildContext(SyncStepContext):
    """What a step in a child process sees: the blocking context, without `map` and `start_child`."""

    def map(self, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedInProcessError("map")

    def start_child(self, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedInProcessError("start_child")

    def checkpoint(self, *, force: bool = False) -> None:
        self._port.check(blocking=True)
        self._group.capture(force=force or self._port.attention)
        if force:
            self._port.call_from_thread(self._port.durable)
        elif time.monotonic() >= self._port.save_at:
            self._port.hand_over()
        if self._port.attention:
            self._port.call_from_thread(self._port.obey)


def main() -> None:
    _die_with_parent()
    _leave_signals_to_parent()
    end, bell = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    for one in (end, bell):
        one.set_inheritable(False)  # what the step starts must not keep the pipe open when we are gone
        os.register_at_fork(after_in_child=one.close)
    pipe, listener = Pipe(end), Listener(bell)
    while (job := pipe.receive()) is not None:
        try:
            pipe.send(_run(pipe, listener, job))
        except (StepInterrupted, OSError):
            return


def _run(pipe: Pipe, listener: Listener, job: dict[str, Any]) -> dict[str, Any]:
    try:
        function = _find(job)
        step = StepRegistry().register("step", function)
        ledger = Ledger({key: text.encode() for key, text in job["entries"].items()})
        state = codec.structure(job["state"], step.state_type, "state")
        interval = math.inf if job["interval"] is None else job["interval"]
        port = PipePort(job["info"]["step"], pipe, ledger, interval)
        args: tuple[Any, ...] = (state,)
        if job["takes_context"]:
            args = (_context(job, port, ledger), state)
            listener.attend(port)
        try:
            with carried(job["carrier"]):
                value = step.function(*args)
        finally:
            port.end()
        return _returned(step, value)
    except StepInterrupted:
        raise
    except BaseException as error:  # none of these comes from elsewhere
        return _raised(raised_itself(error) if holds(error, KeyboardInterrupt, GeneratorExit) else error)


def _raised(error: BaseException) -> dict[str, Any]:
    return {
        "op": "raised",
        "name": type(error).__name__,
        "kinds": [class_name(kind) for kind in type(error).__mro__],
        "text": text_of(error),
        "trace": "".join(traceback.format_exception(error))[-8000:],
    }


def _context(job: dict[str, Any], port: PipePort, ledger: Ledger) -> SyncStepContext:
    info = StepInfo(**codec.structure(job["info"], dict, "info"))
    inner: StepContext = root_context(info, port, ledger)
    return ChildContext.of(inner)


def _returned(step: Step, value: Any) -> dict[str, Any]:
    """What the step has returned. Its state is written by what the step says of it; of an instance, where the step says
    nothing, by its class: the parent knows who receives it."""
    directive, fields = None, {}
    if isinstance(value, DIRECTIVES):
        directive = type(value).__name__
        fields = {name: part for name, part in attrs.asdict(value, recurse=False).items() if name != "state"}
        value = value.state
    kind = step.state_type if directive == Repeat.__name__ else step.result_type
    unsaid = directive != Repeat.__name__ and not step.says_result and codec.has_fields(type(value))
    return {
        "op": "returned",
        "directive": directive,
        "fields": codec.unstructure(fields, dict, "directive"),
        "class": class_name(type(value)) if unsaid else None,
        "state": codec.unstructure(value, type(value) if unsaid else kind),
    }


def _find(job: dict[str, Any]) -> Callable[..., Any]:
    sys.path[:] = job["path"]
    module = _main_module(job["main"]) if job["module"] == "__main__" else importlib.import_module(job["module"])
    found: Any = module
    for part in job["name"].split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _main_module(main: dict[str, str] | None) -> Any:
    if main is None:
        raise ImportError("a step defined in an interactive session cannot run in a child process")
    pipes.loading_main = True
    try:
        if "module" in main:
            return importlib.import_module(main["module"])
        if pipes.MAIN not in sys.modules:
            module = types.ModuleType(pipes.MAIN)
            vars(module).update(runpy.run_path(main["file"], run_name=pipes.MAIN))
            sys.modules[pipes.MAIN] = module  # where annotations are resolved, and pickle looks
        return sys.modules[pipes.MAIN]
    finally:
        pipes.loading_main = False


def _leave_signals_to_parent() -> None:
    """A Ctrl-C, or the SIGTERM of a supervisor, comes to the whole group: the parent stops us when it is time. What the
    step starts is ended by a SIGTERM as ever: a handler, unlike SIG_IGN, does not outlast an exec."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_let_sigterm_end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, pipes.UNTIL_READY)


def _go_on(number: int, frame: object) -> None:
    pass


_forking = threading.local()


def _hold_sigterm() -> None:
    """Until a copy of us has it back: one that comes to it before would be lost."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _let_sigterm_end() -> None:
    if signal.getsignal(signal.SIGTERM) is _go_on:  # and not a handler of the step
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_sigterm()


def _die_with_parent() -> None:
    """Ask the kernel to end us with our parent (Linux); elsewhere the closed pipe does."""
    if sys.platform == "linux":  # pragma: no branch -- there is no such call elsewhere
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # pragma: no cover -- a parent that dies between two lines
            os._exit(1)


if __name__ == "__main__":
    main()
