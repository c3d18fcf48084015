"""`longrun run APP WORKFLOW`: run a workflow here, with bars; Ctrl-C brings it to a checkpoint, its id resumes it."""

from __future__ import annotations

import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any

import anyio
import click
from attrs import frozen

from longrun import plan, schema
from longrun.cli import _summaries as rows
from longrun.cli._bars import Bars, Lines, step_line, waits_for
from longrun.cli._connect import go, load_registry, make_store, value_argument
from longrun.cli._errors import CTRL_C, FAILED, INTERRUPTED, OK, sentence
from longrun.cli._follow import Follower, View
from longrun.cli._options import Pair, json_option, loop_option, store_option
from longrun.cli._settings import settings
from longrun.cli._signals import Stop, draining
from longrun.cli._text import clean, duration, hide_secrets, json_text, number_of, out, say, state_text
from longrun.cli.worker import configure_logs, json_logs_option, log_option
from longrun.control_room import ELSEWHERE
from longrun.errors import ConfigError, InvalidStateError, StoreUnavailableError
from longrun.executor import Executor
from longrun.records import ExecutionState, check_id
from longrun.stored import was_moved

if TYPE_CHECKING:
    from longrun.records import ExecutorConfig
    from longrun.registry import StepRegistry
    from longrun.stored import Loaded
    from longrun.stores.store import CheckpointStore

State = ExecutionState
LOOKS = 0.125
"""Seconds between two looks of the bars."""
STORE_AWAY = 2.0
STOPPED = frozenset({State.PAUSED, State.BLOCKED})


@frozen(kw_only=True)
class Order:
    """What was asked for."""

    app: str
    workflow: str
    registry: StepRegistry
    state: Any
    id: str | None
    metadata: dict[str, Any]
    retry: bool
    quiet: bool
    flag: str | None
    """The store as it was given on the command line, to be repeated in the advice how to resume."""


@click.command("run")
@click.argument("app")
@click.argument("workflow", required=False)
@click.option("--state", metavar="JSON|@FILE", help="What the first step receives; @- reads standard input.")
@click.option("--id", metavar="ID", help="The execution's id; that of an earlier run resumes it.")
@click.option("--meta", "metadata", multiple=True, type=Pair(), help="Metadata of a new execution; may be given again.")
@click.option("--retry", is_flag=True, help="If it has failed, run it again at the step that failed.")
@click.option("--quiet", "-q", is_flag=True, help="No bars and no lines, only the result.")
@store_option
@json_option
@loop_option
@log_option
@json_logs_option
def run_command(
    app: str,
    workflow: str | None,
    state: str | None,
    id: str | None,
    metadata: tuple[tuple[str, Any], ...],
    retry: bool,
    quiet: bool,
    store: str | None,
    as_json: bool,
    loop: str | None,
    log_level: str | None,
    log_json: bool,
) -> int:
    """Run a workflow here, with live bars, and print its result.

    APP names the registry: app:registry, or path/to/app.py:registry. WORKFLOW can be left out if there is only one.
    Ctrl-C lets the step reach a checkpoint and ends with exit code 4; a second one does not wait for it. The same
    command with the same --id goes on from there.
    """
    registry = load_registry(app)
    name = workflow or _only(registry)
    order = Order(
        app=app,
        workflow=name,
        registry=registry,
        state=_first_state(registry, name, state),
        id=None if id is None else check_id(id),
        metadata=dict(metadata),
        retry=retry,
        quiet=quiet,
        flag=store,
    )
    logs = (settings().get("log_level", log_level, "warning"), log_json)
    config = settings().config(auto_resume=False)
    return go(_run, order, make_store(store, create=True), config, logs, as_json, loop=loop)


def _only(registry: StepRegistry) -> str:
    names = [workflow.name for workflow in registry.workflows]
    if len(names) != 1:
        raise click.UsageError("which workflow? there are " + (", ".join(map(clean, names)) or "none"))
    return names[0]


def _first_state(registry: StepRegistry, workflow: str, text: str | None) -> Any:
    """The state as the first step declares it."""
    first = registry.get(registry.resolve(workflow).steps[0])
    if text is None:
        return None
    return value_argument(text, "--state", Any if first is None else first.state_type)


# --- running ----------------------------------------------------------------------------------------------------------


async def _run(
    order: Order, store: CheckpointStore, config: ExecutorConfig, logs: tuple[str, bool], as_json: bool
) -> int:
    display = _display(order)

    def heard(number: signal.Signals) -> None:
        display.say(f"{number.name}: to the next checkpoint, at most {config.drain_timeout:g} s; again to cut it short")

    async with Executor(order.registry, store=store, config=config) as executor:
        with display:
            configure_logs(*logs)  # only now: with bars, lines go above them
            async with draining(executor, heard) as stop:
                known = await _known_rows(order, executor)
                id = await _begin(order, executor, display, stop)
                ran_here = id is not None and await _follow(executor, id, display, stop, known)
        if id is None:
            return CTRL_C
        loaded = await executor.store.load(id)
        return await _ended(order, executor, loaded, stop, ran_here=ran_here, as_json=as_json)


def _display(order: Order) -> Lines:
    if order.quiet:
        return _Silence()
    return Bars() if sys.stderr.isatty() else Lines()


class _Silence(Lines):
    def say(self, text: str) -> None:
        pass


async def _known_rows(order: Order, executor: Executor) -> int:
    """The number of the last row of an earlier run: it is not told again."""
    if order.id is None or not await executor.store.exists(order.id):
        return 0
    return (await executor.store.load(order.id)).head.seq


async def _begin(order: Order, executor: Executor, display: Lines, stop: Stop) -> str | None:
    """Start it, or take up the one that has its id; None if a signal came before anything was begun."""
    try:
        handle = await executor.start(order.workflow, order.state, id=order.id, metadata=order.metadata)
    except ConfigError:
        if stop.signal is None:
            raise
        return None
    head = (await executor.store.load(handle.id)).head
    if was_moved(head):
        raise InvalidStateError(handle.id, head.state, "run", ELSEWHERE)
    if order.id is None:
        display.say(f"execution {handle.id}")
    if head.state in STOPPED:
        display.say(f"it was {head.state.value}: resuming it")
        await executor.resume(handle.id)
    elif head.state is State.FAILED and order.retry:
        display.say("it has failed: retrying it")
        await executor.retry(handle.id)
    elif not head.state.finished and handle.id not in executor.runners and head.owner not in (None, executor.owner):
        display.say(f"{clean(head.owner)} runs it; looking on")
    return handle.id


async def _follow(executor: Executor, id: str, display: Lines, stop: Stop, known: int) -> bool:
    """Show it until it ends, somebody stops it, or it is drained; whether it ran in this process."""
    follower = Follower(executor.store, id, executor.runners, after=known)
    forecaster = executor.forecaster
    ran_here = False
    with follower.listening():
        while True:
            drained = stop.drained.is_set()
            try:
                view = await follower.look()
            except StoreUnavailableError as error:  # the executor goes on trying, and so do we
                display.say(f"{sentence(error)}; trying again")
                await anyio.sleep(STORE_AWAY)
                if drained:
                    raise
                continue
            ran_here = ran_here or view.here
            display.update(view, await forecaster.of(view.definition, view.head, view.live))
            over = view.head.state.finished or view.head.state in STOPPED
            if drained or (over and not view.here):
                return ran_here
            with anyio.move_on_after(LOOKS):
                await stop.drained.wait()


# --- the end ----------------------------------------------------------------------------------------------------------


async def _ended(order: Order, executor: Executor, loaded: Loaded, stop: Stop, *, ran_here: bool, as_json: bool) -> int:
    head, total = loaded.head, loaded.definition.total
    view = View(loaded.definition, head, None, [], False)
    result, code = None, FAILED
    if head.state is State.COMPLETED:
        result, code = _result(loaded), OK
        took = duration((head.ended or head.updated) - loaded.definition.created)
        _tell(order, f"{state_text('completed')} in {took}, {number_of(total, 'step')}")
    elif head.state.finished or head.state is State.BLOCKED:
        say(_sorry(order, view))  # also to who wants the result alone: there is none
    elif head.state is not State.PAUSED and not ran_here and stop.signal is signal.SIGINT and head.owner is not None:
        _tell(order, f"it goes on without us, in {clean(head.owner)}")
        code = CTRL_C
    else:
        code = INTERRUPTED
        waits = f", waits {waits_for(view)}" if head.state is State.WAITING else ""
        where = f"{step_line(view)}{_inside(loaded)}{waits}"
        _tell(order, f"paused at {where}, resume with:\n  {_again(order, loaded.definition.id)}")
    if as_json:
        summary = await rows.summary(loaded.definition, head, executor.forecaster)
        fields = {"result": result, "error": head.error, "reason": head.reason, "exit_code": code}
        out(json_text(schema.document("run", execution=summary.to_json(), **fields)))
    elif code == OK:
        out(json_text(result, indent=2))
    return code


def _tell(order: Order, text: str) -> None:
    if not order.quiet:
        say(text)


def _result(loaded: Loaded) -> Any:
    """The result as JSON, as it is stored."""
    from longrun.snapshot import restore_tree

    boundary = loaded.boundary
    return restore_tree(boundary.data or b"null", loaded.blobs, bool(boundary.blobs))


def _inside(loaded: Loaded) -> str:
    return "".join(f", {clean(plan.describe(one), limit=80)}" for one in plan.in_step(loaded))


def _sorry(order: Order, view: View) -> str:
    head = view.head
    text = f"{state_text(head.state.value)} at {step_line(view)}"
    if head.state is State.FAILED:
        error = clean(head.error or "", limit=2000, lines=True)
        return f"{text}, attempt {head.attempt}: {error}\nretry with:\n  {_again(order, view.definition.id)} --retry"
    reason = clean(head.reason or "", limit=500)
    text += f": {reason}" if reason else ""
    return text + ("\nlongrun plan says what is in the way" if head.state is State.BLOCKED else "")


def _again(order: Order, id: str) -> str:
    """The command that goes on, without anybody's password."""
    words = ["longrun", "run", order.app, order.workflow, "--id", id]
    if order.flag is not None:
        words += ["--store", hide_secrets(order.flag)]
    return clean(shlex.join(words))
