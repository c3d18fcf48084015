"""Real processes at a few milliseconds each: one that has imported everything forks a program on demand.

The forked child is a process like any other: SIGKILL, SIGSTOP and exit codes are the kernel's own. Only its start is
cheap. The parent of all of them has one thread and no event loop, so that forking it is safe.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from attrs import frozen

ROOT = Path(__file__).parents[2]
SABOTAGE = "LONGRUN_SABOTAGE"
"""The name of a bug that the program shall have; see tests/sabotage."""
CRASHED = 70
"""The exit code of a program that raised."""


@frozen
class End:
    """How a process ended."""

    code: int
    """Its exit code, or the number of the signal that ended it, negative."""
    by_us: bool
    """Whether it was still running when its time was up, and was killed from outside."""

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Forks:
    """Forks `module.main(settings)`; one child at a time."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._parent: subprocess.Popen[str] | None = None
        self.pid: int | None = None

    def __enter__(self) -> Self:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.campaign.forks", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._parent is not None
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()  # it ends at the end of its input, and its child with it
        self._parent.wait(30)
        self._parent.stdout.close()

    def spawn(self, **settings: Any) -> int:
        """Start a child; its process id."""
        self.pid = int(self._ask({"do": "spawn", "settings": settings})["pid"])
        return self.pid

    def signal(self, number: int) -> None:
        self._ask({"do": "signal", "number": number})

    def end(self, within: float, *, kill: bool = True) -> End | None:
        """Wait for the child's end, at most `within` seconds; then kill it, or leave it and return None."""
        answer = self._ask({"do": "end", "within": within, "kill": kill})
        if answer["code"] is None:
            return None
        self.pid = None
        return End(**answer)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._parent is not None
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(question) + "\n")
        self._parent.stdin.flush()
        line = self._parent.stdout.readline()
        if not line:
            raise RuntimeError(f"the parent of {self._module} is gone: {self._parent.wait(5)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# the parent's side


class _Parent:
    def __init__(self, main: Callable[[dict[str, Any]], int]) -> None:
        self._main = main
        self._pid = 0
        self._alive = -1
        """The end of a pipe whose other end only the child holds: it can be read when the child has ended."""

    def spawn(self, settings: dict[str, Any]) -> dict[str, Any]:
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _be_a_child(self._main, settings)
        os.close(writing)
        self._alive = reading
        return {"pid": self._pid}

    def signal(self, number: int) -> dict[str, Any]:
        os.kill(self._pid, number)  # not reaped yet, so the number cannot mean another process
        return {}

    def end(self, within: float, kill: bool) -> dict[str, Any]:
        ended, _, _ = select.select([self._alive], [], [], within)
        if not ended and not kill:
            return {"code": None, "by_us": False}
        if not ended:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._alive)
        self._pid = 0
        return {"code": os.waitstatus_to_exitcode(status), "by_us": not ended}

    def abandon(self) -> None:
        if self._pid:
            self.end(0.0, kill=True)

    def obey(self, lines: IO[str]) -> None:
        for line in lines:
            question = json.loads(line)
            do: dict[str, Callable[..., dict[str, Any]]]
            do = {"spawn": self.spawn, "signal": self.signal, "end": self.end}
            print(json.dumps(do[question.pop("do")](**question)), flush=True)


def _be_a_child(main: Callable[[dict[str, Any]], int], settings: dict[str, Any]) -> None:
    code = CRASHED
    faulthandler.register(signal.SIGUSR1)  # to see where one stands that does not go on
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # the parent's output is for its answers
        code = main(settings)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(module: str) -> None:
    if SABOTAGE in os.environ:
        importlib.import_module("tests.sabotage.bugs").BUGS[os.environ[SABOTAGE]].plant()
    parent = _Parent(importlib.import_module(module).main)
    try:
        parent.obey(sys.stdin)
    finally:
        parent.abandon()


if __name__ == "__main__":
    serve(sys.argv[1])
