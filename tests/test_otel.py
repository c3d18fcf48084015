"""OpenTelemetry: a trace an execution across crashes, a span an attempt, links, and metrics; seen by a receiver."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider

from longrun import (
    ConfigError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    Repeat,
    RetryPolicy,
    StepContext,
    StepRegistry,
    SyncStepContext,
)
from longrun.attempt import LoopEngine
from longrun.client import Client
from longrun.otel import OpenTelemetry
from longrun.worker import Worker
from tests.crashing import AT_ONCE, PATIENCE, registry_of
from tests.otel_steps import traced
from tests.otlp import Broken, BrokenAround, Receiver, provider

ROOT = Path(__file__).parent.parent
SECRET = "hunter2"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def tracing(receiver: Receiver) -> Iterator[TracerProvider]:
    made = provider(receiver.url)
    yield made
    made.shutdown()


@pytest.fixture
def telemetry(tracing: TracerProvider) -> OpenTelemetry:
    return OpenTelemetry(tracing)


async def test_an_execution_is_one_trace_and_the_applications_own_spans_nest(
    receiver: Receiver, tracing: TracerProvider, telemetry: OpenTelemetry
) -> None:
    """In the loop, in a thread, and in the branches of a map."""
    tracer = tracing.get_tracer("app")
    seen: dict[str, Any] = {}

    async def branch(item: int) -> None:
        with tracer.start_as_current_span(f"branch {item}"):
            pass

    async def here(ctx: StepContext, state: Any) -> None:
        seen.update(ctx.metadata)
        with tracer.start_as_current_span("in the loop"):
            await ctx.map(branch, [1])

    def there(ctx: SyncStepContext, state: Any) -> None:
        with tracer.start_as_current_span("in a thread"):
            ctx.checkpoint()

    async with Executor(registry_of(here, there), store="memory:", telemetry=telemetry) as executor:
        run = await executor.start("work", id="x", metadata={"team": "blue"})
        await run.result()
        owner = executor.owner
        assert dict((await run.info()).metadata) == seen == {"team": "blue"}, "the stored context is not the user's"
        assert await executor.list(text="00-") == [], "and no search finds it"
    assert {span.trace for span in receiver.spans} == {receiver.one("start work").trace}
    start = receiver.one("start work")
    assert start.parent == ""
    here_span, there_span = receiver.one("step here"), receiver.one("step there")
    assert here_span.parent == there_span.parent == receiver.one("execution work").parent == start.id
    assert receiver.one("in the loop").parent == here_span.id
    assert receiver.one("branch 1").parent == receiver.one("in the loop").id
    assert receiver.one("in a thread").parent == there_span.id
    assert here_span.attributes == {
        "longrun.execution.id": "x",
        "longrun.workflow": "work",
        "longrun.step": "here",
        "longrun.step.index": 0,
        "longrun.visit": 1,
        "longrun.attempt": 1,
        "longrun.iteration": 0,
        "longrun.owner": owner,
        "longrun.run_in": "loop",
        "longrun.outcome": "completed",
    }
    assert there_span.attributes["longrun.run_in"] == "thread"
    assert [span.status for span in (here_span, there_span, receiver.one("execution work"))] == ["ok"] * 3


async def test_every_attempt_and_every_visit_has_a_span_and_errors_are_told_by_their_type_alone(
    receiver: Receiver, telemetry: OpenTelemetry
) -> None:
    """The text of an error may quote a state: it leaves the program nowhere but where `guarantees` says."""

    async def flaky(ctx: StepContext, state: Any) -> Any:
        if ctx.attempt < 3:
            raise ValueError(SECRET)
        return Repeat(state) if ctx.iteration == 0 else state

    async def bad(state: Any) -> Any:
        return {"what": object()} if state is None else state

    registry = registry_of(flaky, bad, retry=AT_ONCE)
    async with Executor(registry, store="memory:", telemetry=telemetry) as executor:
        with pytest.raises(ExecutionFailedError):
            await (await executor.start("work")).result()
    found = [(s.attributes["longrun.visit"], s.attributes["longrun.attempt"]) for s in receiver.named("step flaky")]
    assert found == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    first = receiver.named("step flaky")[0]
    assert (first.status, first.message, first.attributes["error.type"]) == ("error", "ValueError", "ValueError")
    refused = receiver.one("step bad")
    assert (refused.status, refused.attributes["error.type"]) == ("error", "NotStorableError"), (
        "the function returned, and what it returned could not be stored"
    )
    assert receiver.one("execution work").status == "error"
    assert not any(SECRET.encode() in body for body in receiver.bodies)


async def test_a_step_that_is_stopped_says_so_and_the_time_out_of_another_is_an_error(
    receiver: Receiver, telemetry: OpenTelemetry
) -> None:
    begun = anyio.Event()

    async def waits(state: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    registry = registry_of(waits)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store="memory:", telemetry=telemetry) as executor:
            run = await executor.start("work")
            await begun.wait()
            await run.pause(interrupt=True)
            stopped = receiver.one("step waits")
            assert (stopped.status, stopped.attributes["longrun.outcome"]) == ("unset", "stopped")
        late = StepRegistry()
        late.register("waits", waits, timeout=0.01, retry=RetryPolicy(max_attempts=1))
        late.workflow("late", ["waits"])
        async with Executor(late, store="memory:", telemetry=telemetry) as executor:
            with pytest.raises(ExecutionFailedError):
                await (await executor.start("late")).result()
    assert receiver.spans[-2].attributes["error.type"] == "StepTimeoutError"


async def test_a_span_is_ok_once_its_result_is_durable(receiver: Receiver, telemetry: OpenTelemetry) -> None:
    """I2, told to whoever reads traces: coalesced boundaries are not durable before they are written."""
    told: list[int] = []

    async def first(state: Any) -> None: ...

    async def second(state: Any) -> None:
        told.append(len(receiver.named("step first")))

    config = ExecutorConfig(durability="exit")
    async with Executor(registry_of(first, second), store="memory:", config=config, telemetry=telemetry) as executor:
        await (await executor.start("work")).result()
    assert told == [0]
    assert receiver.one("step first").status == receiver.one("step second").status == "ok"


async def test_children_callers_and_forks_are_linked_both_ways(
    receiver: Receiver, tracing: TracerProvider, telemetry: OpenTelemetry
) -> None:
    async def leaf(state: Any) -> None: ...

    async def parent(ctx: StepContext, state: Any) -> None:
        await (await ctx.start_child("leaves", None, key="k")).result()

    registry = registry_of(parent, leaf)
    registry.workflow("leaves", [leaf])
    async with Executor(registry, store="memory:", telemetry=telemetry) as executor:
        with tracing.get_tracer("app").start_as_current_span("request"):
            run = await executor.start("work", id="p")
            await run.result()
        await (await executor.fork("p", new_id="f")).result()
    start, child, request = receiver.named("start work")[0], receiver.one("start leaves"), receiver.one("request")
    step = receiver.named("step parent")[0]
    assert len({start.trace, child.trace, request.trace}) == 3
    assert child.links == {step.id: {"longrun.link": "started by"}}
    assert step.links == {child.id: {"longrun.link": "started", "longrun.execution.id": "p~1~k"}}
    assert start.links == {request.id: {"longrun.link": "started by"}}
    assert request.links == {start.id: {"longrun.link": "started", "longrun.execution.id": "p"}}
    assert child.attributes["longrun.parent.id"] == "p"
    forked = receiver.named("start work")[1]
    assert forked.trace != start.trace
    assert forked.links == {start.id: {"longrun.link": "forked from"}}


async def test_an_id_that_is_taken_begins_no_second_trace(receiver: Receiver, telemetry: OpenTelemetry) -> None:
    async def only(state: Any) -> None: ...

    async with Executor(registry_of(only), store="memory:", telemetry=telemetry) as executor:
        for _ in range(2):
            await (await executor.start("work", id="x")).result()
    assert len(receiver.named("start work")) == 1
    assert telemetry._starts == {}


async def test_what_a_client_submits_a_worker_goes_on_with_in_the_same_trace(
    receiver: Receiver, telemetry: OpenTelemetry, tmp_path: Path
) -> None:
    async def only(state: Any) -> None: ...

    url = f"sqlite:///{tmp_path}/runs.db"
    async with Client(url, telemetry=telemetry) as client:
        await client.submit("work", id="with")
    async with Client(url) as client:
        await client.submit("work", id="without")
    async with Worker(registry_of(only), store=url, telemetry=telemetry) as worker:
        with anyio.fail_after(PATIENCE):
            for id in ("with", "without"):
                await (await worker.handle(id)).result()
    steps = {span.attributes["longrun.execution.id"]: span for span in receiver.named("step only")}
    ends = {span.attributes["longrun.execution.id"]: span for span in receiver.named("execution work")}
    assert steps["with"].trace == receiver.one("start work").trace
    assert steps["without"].trace == ends["without"].trace != steps["with"].trace, "still one trace"


async def test_a_step_in_a_child_process_goes_on_with_the_trace(receiver: Receiver, telemetry: OpenTelemetry) -> None:
    registry = StepRegistry()
    registry.register("traced", traced, run_in="process")
    registry.workflow("work", ["traced"])
    async with Executor(registry, store="memory:", telemetry=telemetry) as executor:
        await (await executor.start("work", {"url": receiver.url})).result()
    step = receiver.one("step traced")
    assert step.attributes["longrun.run_in"] == "process"
    assert (receiver.one("in the child").parent, receiver.one("in the child").trace) == (step.id, step.trace)


def run_program(store: Path, receiver: Receiver) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.otel_program", str(store), receiver.url]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_trace_survives_the_death_of_its_process(receiver: Receiver, tmp_path: Path) -> None:
    """SIGKILL in the second step; another process takes it up and adds to the same trace."""
    store, wait = tmp_path / "store", tmp_path / "store.wait"
    wait.touch()
    with run_program(store, receiver) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "two\n"
        first.send_signal(signal.SIGKILL)
    wait.unlink()
    with run_program(store, receiver) as second:
        output, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    owner = output.split()[-1]
    assert {span.trace for span in receiver.spans} == {receiver.one("start flow").trace}
    assert receiver.one("step one").attributes["longrun.owner"] != owner, "what the first process did"
    assert receiver.one("step two").attributes["longrun.owner"] == owner
    assert receiver.one("execution flow").seconds >= receiver.one("step two").seconds


async def test_metrics_reach_the_receiver(receiver: Receiver) -> None:
    exporter = OTLPMetricExporter(endpoint=f"{receiver.url}/v1/metrics")
    meters = MeterProvider([PeriodicExportingMetricReader(exporter, 3_600_000)], shutdown_on_exit=False)

    async def good(state: Any) -> Any:
        return "x" * 1000

    async def flaky(ctx: StepContext, state: Any) -> None:
        if ctx.attempt == 1:
            raise ValueError(SECRET)

    registry = registry_of(good, flaky, retry=AT_ONCE)
    async with Worker(registry, store="memory:", telemetry=OpenTelemetry(meter_provider=meters)) as worker:
        await (await worker.start("work")).result()
    meters.shutdown()
    assert receiver.points("longrun.executions.started") == {("work",): 1}
    assert receiver.points("longrun.executions.ended") == {("completed", "work"): 1}
    steps = {("completed", "good", "work"): 1, ("failed", "flaky", "work"): 1, ("completed", "flaky", "work"): 1}
    assert receiver.points("longrun.steps") == steps
    assert receiver.points("longrun.step.failures") == {("ValueError", "flaky", "work"): 1}
    assert receiver.points("longrun.step.duration") == {("good", "work"): 1, ("flaky", "work"): 2}
    assert receiver.points("longrun.checkpoint.duration")[()] >= 3
    assert receiver.points("longrun.checkpoint.bytes")[()] >= 1000
    assert receiver.points("longrun.queue.depth") == {("*",): 0}
    assert not any(SECRET.encode() in body for body in receiver.bodies)


async def test_without_a_provider_nothing_is_stored_and_nothing_fails() -> None:
    """The API alone, as it is when an application has no SDK."""

    async def only(state: Any) -> None: ...

    async with Executor(registry_of(only), store="memory:", telemetry=OpenTelemetry()) as executor:
        run = await executor.start("work", id="x")
        await run.result()
        assert dict((await executor.store.load("x")).definition.metadata) == {}


async def test_telemetry_that_fails_costs_the_executions_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def only(state: Any) -> int:
        return 7

    broken = [Broken(), BrokenAround(late=False), BrokenAround(late=True)]
    async with Executor(registry_of(only), store="memory:", telemetry=broken) as executor:
        assert await (await executor.start("work")).result() == 7
    hooks = {line.partition("hook=")[2].split()[0] for line in caplog.messages if line.startswith("telemetry.failed")}
    assert hooks >= {"creating", "created", "around", "settled", "happened", "saved"}
    assert sum("hook=around" in line for line in caplog.messages) == 3


async def test_telemetry_alone_makes_nobody_forecast(telemetry: OpenTelemetry) -> None:
    """What shows progress is for those who look at it."""

    async def shows(ctx: StepContext, state: Any) -> None:
        ctx.progress(1, 2)

    async with Executor(registry_of(shows), store="memory:", telemetry=telemetry) as executor:
        await (await executor.start("work")).result()
        assert executor._forecaster is None


async def test_an_executor_without_telemetry_has_nothing_in_the_way() -> None:
    async with Executor(StepRegistry(), store="memory:") as executor:
        assert executor.telemetry is None
        assert type(executor._engines["loop"]) is LoopEngine
        assert not executor.bus.active
    with pytest.raises(ConfigError, match="telemetry"):
        Executor(StepRegistry(), store="memory:", telemetry=["yes"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"longrun\.trace"):
        async with Executor(registry_of(_nothing), store="memory:") as executor:
            await executor.start("work", metadata={"longrun.trace": "mine"})


async def _nothing(state: Any) -> None: ...
