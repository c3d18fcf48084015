"""The crash matrix with real deaths: each program is a child process, and a crash is a SIGKILL that it sends itself.

Place in the life of an execution: from its start to the crash. The execution is kept in files; effects and points are
appended to another file, one `write` each, so that what a killed program had done is known.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import anyio.to_thread
import attrs

from longrun import codec
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import ConfigError
from longrun.records import ExecutorConfig, RetentionPolicy
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.testing.clock import ManualClock
from longrun.testing.crash import LIVES, Course, CrashPlan, World, ending_of, watching, what_is_left
from longrun.testing.effects import Effect
from longrun.testing.points import CrashPoint, Probe
from longrun.testing.settings import CHILD, in_child

MODULE = "longrun.testing.crash_child"


class Children:
    """Runs a plan in child processes."""

    def __init__(self, plan: CrashPlan) -> None:
        if in_child():
            raise RuntimeError(
                "the module of the registry starts a crash matrix when it is imported, and a child process imports it: "
                'put the call behind `if __name__ == "__main__":`'
            )
        workflow = plan.registry.resolve(plan.workflow)
        if plan.registry.get_workflow(workflow.name) is None:
            raise ConfigError("workflow", workflow.name, "a child process needs a workflow with a name of its own")
        first = plan.registry.get(workflow.steps[0])
        assert first is not None
        state = codec.encode(plan.state, first.state_type)
        self._plan = plan
        self._told: dict[str, Any] = {
            "registry": _find(plan.registry, "registry"),
            "effects": None if plan.effects is None else _find(plan.effects, "effects"),
            "drive": None if plan.drive is None else _find(plan.drive, "drive"),
            "store": None if plan.store is None else _find(plan.store, "store"),
            "workflow": workflow.name,
            "state": base64.b64encode(state).decode(),
            "config": attrs.asdict(plan.config),
            "awaits": plan.awaits,
            "strict": plan.strict,
            "timeout": plan.timeout,
        }

    async def course(self, target: CrashPoint | None) -> Course:
        """Run the workflow to its end in as many processes as it takes."""
        with tempfile.TemporaryDirectory(prefix="longrun-crash-") as place:
            fired = False
            for life in range(LIVES):
                code = await self._live(place, target if life == 0 else None)
                if code == 0:
                    break
                fired = True
            ending = ending_of(await what_is_left(_backend(self._plan, Path(place))))
            notes = await anyio.to_thread.run_sync(_read_notes, place)
        effects: list[Effect] = [(note[1], note[2]) for note in notes if note[0] == "effect"]
        points = [CrashPoint(*note[1:]) for note in notes if note[0] == "point"]
        return Course(ending, tuple(effects), tuple(points), fired)

    async def _live(self, place: str, target: CrashPoint | None) -> int:
        told = {
            **self._told,
            "place": place,
            "target": None if target is None else attrs.astuple(target),
            "loop": _loop_here(),
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), CHILD: "1"}
        done = await anyio.run_process(
            [sys.executable, "-m", MODULE], input=json.dumps(told).encode(), check=False, env=environment
        )
        if done.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a child of the crash matrix failed:\n{done.stderr.decode(errors='replace')}")
        return done.returncode


def _loop_here() -> str:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return "trio"
    return "asyncio"


def _find(wanted: object, what: str) -> tuple[str, str, str]:
    """Module, file and attribute by which a child process finds an object again."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        for attribute, value in list(vars(module).items()):
            if value is wanted:
                return name, file, attribute
    raise ConfigError(what, repr(wanted), "a child process must find it: give it a name at the top of a module")


def _read_notes(place: str) -> list[list[Any]]:
    return [json.loads(line) for line in Path(place, "notes").read_text().splitlines() if line]


def _backend(plan: CrashPlan, place: Path, clock: Clock = SYSTEM_CLOCK) -> StoreBackend:
    """Where the execution is kept: all programs of a course make it anew, in the same directory."""
    place = place / "store"
    if plan.store is None:
        return FileBackend(place, clock=clock)
    place.mkdir(exist_ok=True)
    return plan.store(place).backend


# the child's side


class _Notes:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, *fields: object) -> None:
        os.write(self._fd, json.dumps(fields).encode() + b"\n")

    def effect(self, effect: Effect) -> None:
        self.note("effect", *effect)


def main() -> None:
    told = json.loads(sys.stdin.buffer.read())
    plan = _plan(told)
    place = Path(told["place"])
    notes = _Notes(place / "notes")
    probe = Probe(None if told["target"] is None else CrashPoint(*told["target"]))
    with watching(plan.effects, probe, notes.effect):
        anyio.run(_live, plan, place, probe, backend=told["loop"])
    if told["target"] is None:
        for point in probe.points:
            notes.note("point", point.when, point.what, point.nth)


async def _live(plan: CrashPlan, place: Path, probe: Probe) -> None:
    clock = ManualClock(autojump=True)
    probe.new_life(lambda: os.kill(os.getpid(), signal.SIGKILL))
    await World(plan).program(_backend(plan, place, clock), clock, probe)


def _plan(told: dict[str, Any]) -> CrashPlan:
    registry = _load(told["registry"])
    workflow = registry.get_workflow(told["workflow"])
    state = codec.decode(base64.b64decode(told["state"]), registry.get(workflow.steps[0]).state_type)
    config = told["config"]
    config["retention"] = RetentionPolicy(**config["retention"])
    return CrashPlan(
        registry=registry,
        workflow=told["workflow"],
        state=state,
        effects=_load(told["effects"]),
        drive=_load(told["drive"]),
        store=_load(told["store"]),
        config=ExecutorConfig(**config),
        awaits=told["awaits"],
        strict=told["strict"],
        timeout=told["timeout"],
    )


def _load(where: list[str] | None) -> Any:
    if where is None:
        return None
    name, file, attribute = where
    return getattr(_module(name, file), attribute)


def _module(name: str, file: str) -> ModuleType:
    """The module, by its name if that leads to the same file, else by the file: tests are often not on the path."""
    name = "longrun_crash_main" if name == "__main__" else name
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == file:
        return sys.modules[name]
    spec = _spec(name)
    if spec is not None and spec.origin == file:
        return importlib.import_module(name)
    by_file = importlib.util.spec_from_file_location(name, file)
    if by_file is None or by_file.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(by_file)
    by_file.loader.exec_module(module)
    return module


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ImportError:
        return None


if __name__ == "__main__":
    main()
