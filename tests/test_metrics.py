"""Metrics for Prometheus: what is counted, where it is served, and what never appears in it."""

from __future__ import annotations

import urllib.request
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from longrun import ExecutionFailedError, Executor, ExecutorConfig, MemoryCheckpointStore, StepContext
from longrun.metrics import INSTRUMENTS, PrometheusMetrics, prometheus_name
from longrun.testing import FaultyStore, ManualClock
from longrun.worker import Worker
from tests.crashing import AT_ONCE, PATIENCE, registry_of

SECRET = "hunter2"


def scrape(text: str) -> dict[tuple[str, ...], float]:
    """Every sample, by its name and the values of its labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *(sample.labels[name] for name in sorted(sample.labels))] = sample.value
    return found


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


async def test_an_endpoint_on_loopback_shows_what_was_run() -> None:
    async def good(state: Any) -> str:
        return SECRET * 1000

    async def bad(ctx: StepContext, state: Any) -> None:
        raise ValueError(SECRET)

    metrics = PrometheusMetrics()
    async with Executor(registry_of(good, bad, retry=AT_ONCE), store="memory:", telemetry=metrics) as executor:
        with pytest.raises(ExecutionFailedError):
            await (await executor.start("work", id=f"id-{SECRET}")).result()
    with metrics.serve(port=0) as server:
        assert server.host == "127.0.0.1"
        text = fetch(server.url)
    found = scrape(text)
    assert found["longrun_executions_started_total", "work"] == 1
    assert found["longrun_executions_ended_total", "failed", "work"] == 1
    assert found["longrun_steps_total", "completed", "good", "work"] == 1
    assert found["longrun_steps_total", "failed", "bad", "work"] == 3
    assert found["longrun_step_failures_total", "ValueError", "bad", "work"] == 3
    assert found["longrun_step_duration_seconds_count", "bad", "work"] == 3
    assert found["longrun_checkpoint_duration_seconds_count",] >= 4
    assert found["longrun_checkpoint_bytes_total",] >= 7000
    assert SECRET not in text, "neither an id nor a state nor an error's text"
    assert metrics.render().decode() == text


async def test_the_depth_of_each_queue_is_sampled() -> None:
    begun, looked = anyio.Event(), anyio.Event()

    async def waits(state: Any) -> None:
        begun.set()
        await looked.wait()

    metrics, clock = PrometheusMetrics(), ManualClock()
    registry = registry_of(waits)
    with anyio.fail_after(PATIENCE):
        store, config = MemoryCheckpointStore(clock=clock), ExecutorConfig(heartbeat_interval=1e5, lease_ttl=1e6)
        options: dict[str, Any] = {"store": store, "config": config, "clock": clock, "telemetry": metrics}
        async with Worker(registry, queues=["fast"], concurrency=1, **options) as worker:
            for n in range(3):
                await worker.submit("work", id=f"x{n}", queue="fast")
            await begun.wait()
            while scrape(metrics.render().decode()).get(("longrun_queue_depth", "fast")) != 2:
                clock.advance(15)
                await anyio.lowlevel.checkpoint()
            looked.set()
            await worker.wait_idle()


async def test_a_lost_lease_is_counted() -> None:
    begun = anyio.Event()

    async def waits(ctx: StepContext, state: Any) -> None:
        begun.set()
        while True:
            await ctx.checkpoint(force=True)
            ctx.local["n"] = ctx.local.get("n", 0) + 1

    metrics = PrometheusMetrics()
    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(waits), store="memory:", telemetry=metrics) as executor:
            await executor.start("work", id="x")
            await begun.wait()
            executor.runners["x"].lose()
            await executor.wait_idle()
    found = scrape(metrics.render().decode())
    assert found["longrun_lease_losses_total", "work"] == 1
    assert found["longrun_steps_total", "stopped", "waits", "work"] == 1


async def test_a_store_that_does_not_answer_is_counted() -> None:
    async def only(state: Any) -> None: ...

    metrics, store = PrometheusMetrics(), FaultyStore(MemoryCheckpointStore())
    async with Executor(registry_of(only), store=store, telemetry=metrics) as executor:
        store.fail("commit", nth=2)
        await (await executor.start("work")).result()
    assert scrape(metrics.render().decode())["longrun_store_failures_total",] == 1


def test_a_registry_of_the_applications_own_can_be_filled() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    names = {family.name for family in registry.collect()}
    assert names == {prometheus_name(name) for name in INSTRUMENTS}


async def test_two_observers_see_the_same() -> None:
    async def only(state: Any) -> None: ...

    both = [PrometheusMetrics(), PrometheusMetrics()]
    async with Executor(registry_of(only), store="memory:", telemetry=both) as executor:
        await (await executor.start("work")).result()
    counts = [scrape(one.render().decode())["longrun_steps_total", "completed", "only", "work"] for one in both]
    assert counts == [1, 1]
