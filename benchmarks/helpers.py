"""Processes that a measurement starts itself: something to kill, something to talk to across processes.

Place in the life of a measurement: inside it. They are in the process group of the child that started them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import attrs

from benchmarks.child import ANSWER, ROOT, MeasurementError, answer_in, command
from benchmarks.orders import Order
from benchmarks.results import Figures

READY = "READY"


class Helper:
    """A process in another role of the same job."""

    def __init__(self, order: Order, role: str, **sizes: int) -> None:
        told = attrs.asdict(attrs.evolve(order, role=role, sizes={**order.sizes, **sizes}))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command(told), cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise MeasurementError(f"a helper ended with code {self.process.wait()}")
        return text.strip()

    def ready(self) -> None:
        while self.line() != READY:
            pass

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def figures(self) -> Figures:
        while not (text := self.line()).startswith(ANSWER):
            pass
        return answer_in(text, "")


@contextlib.contextmanager
def helper(order: Order, role: str, **sizes: int) -> Iterator[Helper]:
    made = Helper(order, role, **sizes)
    try:
        yield made
    finally:
        made.kill()
        for stream in (made.process.stdin, made.process.stdout):
            if stream is not None:
                stream.close()


def say_ready() -> None:
    os.write(1, f"{READY}\n".encode())


def since(asked: int) -> float:
    """Seconds since a process was asked for: the interpreter's own start is part of it."""
    return (time.monotonic_ns() - asked) / 1e9


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
