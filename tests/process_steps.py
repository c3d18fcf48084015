"""Steps for `run_in="process"`: a child finds them by this module's name."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import anyio
from attrs import frozen

from longrun import Finish, Goto, NonRetryable, Repeat, SyncStepContext


@frozen
class Page:
    url: str
    size: int


def double(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "n": state["n"] * 2, "pid": os.getpid()}


def typed(page: Page) -> Page:
    assert isinstance(page, Page)
    return Page(url=page.url, size=page.size + 1)


def jump(state: dict[str, Any]) -> Any:
    return Goto("double", state)


def die(state: dict[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return state


def leave(state: dict[str, Any]) -> dict[str, Any]:
    os._exit(3)


def hang_up(state: dict[str, Any]) -> dict[str, Any]:
    """Close everything that is open, its pipe too, and stay."""
    os.closerange(3, 100)
    threading.Event().wait()
    return state


async def in_a_loop(state: dict[str, Any]) -> dict[str, Any]:
    return state


def exit_politely(state: dict[str, Any]) -> dict[str, Any]:
    sys.exit("enough")


def fail(state: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no good")


def fail_manifold(state: dict[str, Any]) -> dict[str, Any]:
    raise ExceptionGroup("many", [ValueError("a"), KeyError("b")])


class WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


def fail_without_words(state: dict[str, Any]) -> dict[str, Any]:
    raise WordlessError


def interrupt_itself(state: dict[str, Any]) -> dict[str, Any]:
    raise KeyboardInterrupt


def close_itself(state: dict[str, Any]) -> dict[str, Any]:
    raise GeneratorExit


def audited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def audit(state: dict[str, Any]) -> dict[str, Any]:
        return {**function(state), "audited": True}

    return audit


class Methods:
    def method(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    @classmethod
    def of_class(cls, state: dict[str, Any]) -> str:
        return cls.__name__


def use_elsewhere(ctx: SyncStepContext, state: dict[str, Any]) -> list[str]:
    """What its context says to another thread."""
    said: list[str] = []

    def use(call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    calls: list[tuple[Any, ...]] = [(ctx.once, "key", int), (ctx.checkpoint,), (ctx.each, "x", []), (ctx.progress, 1)]
    for call in calls:
        thread = threading.Thread(target=use, args=call)
        thread.start()
        thread.join()
    return said


_go, _left = threading.Event(), list[tuple[threading.Thread, list[str]]]()


def leave_a_thread(ctx: SyncStepContext, state: dict[str, Any]) -> None:
    said: list[str] = []

    def ask() -> None:
        _go.wait()
        try:
            said.append(str(ctx.time_left))
        except Exception as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    _left.append((thread, said))


def ask_the_thread(state: dict[str, Any]) -> list[str]:
    """What the thread that an earlier step has left hears from its context, asked when an answer is old."""
    _pass(0.1)
    _go.set()
    thread, said = _left[0]
    thread.join()
    return said


def wait_until_told(state: dict[str, Any]) -> dict[str, Any]:
    Path(state["pid_file"]).write_text(str(os.getpid()))
    _wait(state["told"])
    return state


def leave_a_helper(state: dict[str, Any]) -> dict[str, Any]:
    """Its own child lives on when it dies."""
    if os.fork() == 0:
        _wait(state["told"])
        os._exit(0)
    return die(state)


def wait_for_a_helper(state: dict[str, Any]) -> dict[str, Any]:
    """What it runs lives on when it is killed."""
    os.system(f"for n in $(seq 400); do test -e '{state['told']}' && exit; sleep 0.05; done")
    return state


def _wait(told: str) -> None:
    for _ in range(2000):
        if Path(told).exists():
            return
        time.sleep(0.01)


def give_up(state: dict[str, Any]) -> dict[str, Any]:
    raise NonRetryable("never")


def count(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    """Notes every item outside, and dies once in the middle."""
    for item in ctx.each("items", range(state["items"]), every=1):
        with Path(state["ledger"]).open("a") as ledger:
            ledger.write(f"{item}\n")
        ctx.local["sum"] = ctx.local.get("sum", 0) + item
        if item == state["dies_at"] and ctx.attempt == 1:
            os._exit(9)
    ctx.progress(1, 1, "done")
    return {**state, "sum": ctx.local["sum"], "once": ctx.once("pid", os.getpid), "key": ctx.idempotency_key}


def mapped(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    ctx.map(double, [1])
    return state


def forever(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    Path(state["pid_file"]).write_text(str(os.getpid()))
    for n in ctx.each("beats", range(10_000_000)):
        ctx.local["n"] = n
        if n % 1000 == 0:
            ctx.checkpoint()
    return state


def save_often(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    """Makes every bit of its work durable, in one of three ways."""
    every = 1 if state["how"] == "each" else None
    for n in ctx.each("beats", range(state["times"]), every=every):
        if state["how"] == "once":
            ctx.once("beat", int, n)
        elif state["how"] == "force":
            ctx.checkpoint(force=True)
    return state


def deaf(state: dict[str, Any]) -> dict[str, Any]:
    Path(state["pid_file"]).write_text(str(os.getpid()))
    while True:
        time.perf_counter()


def ask(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    """Saves, and then asks its parent whatever only a parent knows."""
    ctx.local["asked"] = True
    ctx.checkpoint(force=True)
    return {"time_left": ctx.time_left, "shutting_down": ctx.shutting_down}


def tell(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    """Its loop shows how far it is, until the step says so itself."""
    for item in ctx.each("items", range(3)):
        if item == 1:
            ctx.progress(7, 9, "by hand")
    return state


async def _at_once() -> str:
    return "at once"


class _Suspends:
    def __await__(self) -> Generator[str]:
        yield "to a loop that is not there"


def remember(ctx: SyncStepContext, state: dict[str, Any]) -> Any:
    return ctx.once("answer", _at_once)


def remember_later(ctx: SyncStepContext, state: dict[str, Any]) -> Any:
    return ctx.once("answer", _Suspends)


def parent_of(ctx: SyncStepContext, state: dict[str, Any]) -> Any:
    return ctx.start_child("w", key="k").id


def remember_each(ctx: SyncStepContext, state: dict[str, Any]) -> list[int]:
    return [ctx.once("ten times", int.__mul__, n, 10) for n in ctx.each("items", range(state["items"]), every=1)]


def checkpoint_once(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    ctx.local["n"] = 1
    ctx.checkpoint()
    return state


def ask_late(ctx: SyncStepContext, state: dict[str, Any]) -> bool:
    ctx.local["asked"] = True
    _pass(state["seconds"])
    ctx.checkpoint()
    _pass(state["seconds"])
    return ctx.shutting_down


def _pass(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def trace(state: dict[str, Any]) -> str:
    from opentelemetry.trace import get_current_span

    return f"{get_current_span().get_span_context().trace_id:032x}"


def terminate_helpers(state: dict[str, Any]) -> list[int]:
    """How what it has started ends by a SIGTERM: something it executes, and a copy of itself."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as executed:
        executed.terminate()
        codes = [executed.wait()]
    read, write = os.pipe()
    if (forked := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.kill(forked, signal.SIGTERM)
    os.close(write)
    return [*codes, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]


def count_and_hang(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    """Count items as fast as they come, until one of them fails, or never ends, in the first attempt."""
    for item in ctx.each("items", range(6)):
        with Path(state["ledger"]).open("a") as ledger:
            ledger.write(f"{item} ")
        if item == state["fails_at"] and ctx.attempt == 1:
            ctx.progress(item)
            if state["how"] == "hang":
                threading.Event().wait()
            raise ValueError(item)
        ctx.local["sum"] = ctx.local.get("sum", 0) + item
    return {"sum": ctx.local["sum"], "pid": os.getpid()}


def note_and_fail(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    if ctx.attempt == 1:
        ctx.local["x"] = 1
        ctx.checkpoint()
        raise ValueError("no good")
    return dict(ctx.local)


def once_async(ctx: SyncStepContext, state: str) -> Any:
    import trio  # here: every child of these tests would wait for it

    return ctx.once("a", {"asyncio": asyncio.sleep, "anyio": anyio.sleep, "trio": trio.sleep}[state], 0.1)


def read_on(ctx: SyncStepContext, page: Page) -> Repeat | Finish:
    following = Page(url=page.url, size=page.size + 1)
    return Repeat(following) if ctx.iteration < 2 else Finish(following)


def make_a_page(state: str):
    return Page(url=state, size=0)


@frozen
class Leaf:
    number: int


def make_a_leaf(state: str):
    return Leaf(number=1)
