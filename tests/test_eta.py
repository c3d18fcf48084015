"""Progress and the time left: from the live rate, from earlier runs, from this run's own steps; never invented."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from longrun import (
    CorruptDataError,
    EventType,
    ExecutionEvent,
    ExecutionState,
    Executor,
    ExecutorConfig,
    Forecast,
    MemoryCheckpointStore,
    Progress,
    StepContext,
    StepRegistry,
)
from longrun.client import Client
from longrun.eta import Forecaster, Spread, Weights, forecast, spent, weights_of
from longrun.stored import Boundary, Definition, Head, Save
from longrun.testing import ManualClock
from longrun.testing.samples import NOW, create, definition

State = ExecutionState
STEPS = ("one", "two", "three")


def row(seq: int, step: int, seconds: float, kind: str = "step", began: float = 0.0) -> Boundary:
    name = STEPS[step]
    return Boundary(seq=seq, kind=kind, step=step, name=name, started=began, ended=began + seconds, next=step + 1)


def learned(*seconds: float) -> Weights:
    return weights_of([{(n, STEPS[n]): one for n, one in enumerate(seconds)}])


def seconds(weights: Weights, index: int, name: str | None = None) -> float:
    took = weights.of(index, name)
    assert took is not None
    return took.seconds


def look(head: Head, weights: Weights = Weights(), own: Weights = Weights(), **options: Any) -> Forecast:  # noqa: B008 -- frozen
    spread = Spread(3, STEPS, weights, own)
    return forecast(_definition(), head, spread, NOW + 10, **options)


def _definition() -> Definition:
    return definition("a", steps=STEPS)


def head(state: ExecutionState = State.RUNNING, **fields: Any) -> Head:
    usual: dict[str, Any] = {"seq": 2, "step": 1, "started": NOW, "updated": NOW, "owner": "me"}
    return Head(state=state, **(usual | fields))


# --- what earlier runs teach ------------------------------------------------------------------------------------------


def test_the_seconds_of_a_step_are_those_of_all_its_visits_and_of_its_sleeps() -> None:
    rows = [
        row(1, 0, 2.0),
        row(2, 1, 3.0, "repeat", began=2.0),
        row(3, 1, 5.0, "sleep", began=5.0),
        row(4, 2, 1.0, "finish", began=70.0),
    ]
    assert spent(rows) == {(0, "one"): 2.0, (1, "two"): 8.0 + 60.0, (2, "three"): 1.0}


def test_a_wait_for_a_signal_and_what_failed_do_not_count() -> None:
    rows = [row(1, 0, 2.0, "wait"), row(2, 1, 99.0, "fail", began=50.0), row(3, 1, 4.0, began=200.0)]
    assert spent(rows) == {(0, "one"): 2.0, (1, "two"): 4.0}


def test_one_odd_run_does_not_spoil_the_rest() -> None:
    runs: list[dict[tuple[int, str | None], float]] = [{(0, "one"): seconds} for seconds in (1.0, 1.2, 900.0)]
    assert seconds(weights_of(runs), 0, "one") == 1.2


def test_a_step_that_has_moved_is_known_by_its_name() -> None:
    weights = learned(1.0, 2.0, 3.0)
    assert seconds(weights, 0, "three") == 3.0
    assert seconds(weights, 7, "two") == 2.0
    assert weights.of(7, "new") is None
    assert seconds(weights, 1) == 2.0, "a listing does not tell names"


# --- forecasts --------------------------------------------------------------------------------------------------------


def test_long_steps_weigh_more() -> None:
    weights = learned(10.0, 80.0, 10.0)
    assert look(head(), weights).fraction == pytest.approx(0.1)
    assert look(head(done=50, of=100), weights).fraction == pytest.approx(0.5)
    assert look(head()).fraction == pytest.approx(1 / 3), "without any knowledge all weigh the same"


def test_the_live_rate_counts_before_history() -> None:
    found = look(head(done=50, of=100), learned(10.0, 80.0, 10.0), rate=2.0)
    assert (found.remaining, found.basis, found.rate) == (25.0 + 10.0, "rate", 2.0)


def test_history_alone_counts_down() -> None:
    found = look(head(), learned(10.0, 80.0, 10.0))
    assert (found.remaining, found.basis) == (70.0 + 10.0, "history"), "ten of the eighty seconds have passed"
    again = look(head(), learned(10.0, 80.0, 10.0), here=30.0)
    assert again.remaining == 40.0 + 10.0, "thirty went into earlier visits"


def test_a_step_that_takes_longer_than_usual_is_measured_by_the_runs_that_took_longer_still() -> None:
    """Never hours of "0 s left"."""
    weights = weights_of(
        [{(0, "one"): 1.0, (1, "two"): seconds, (2, "three"): 5.0} for seconds in (20.0, 20.0, 20.0, 3600.0)]
    )

    def after(elapsed: float) -> float | None:
        return look(head(started=NOW + 10 - elapsed), weights).remaining

    assert after(5) == pytest.approx(15 + 5)
    assert after(600) == pytest.approx(3000 + 5), "one run took an hour"
    assert after(3601) is None, "none took as long"


def test_a_first_step_that_took_no_time_says_nothing_of_the_next() -> None:
    own = weights_of([{(0, "one"): 0.0}])
    found = look(head(), own=own)
    assert (found.remaining, found.basis) == (None, "none")
    assert found.fraction == head().progress
    half = look(head(done=50, of=100), own=own)
    assert half.remaining == pytest.approx(10.0)
    assert half.basis == "rate"


def test_a_loop_of_visits_in_a_first_run_has_no_end_that_is_known() -> None:
    own = weights_of([{(0, "one"): 2.0, (1, "two"): 30.0}])
    assert look(head(), own=own, here=30.0).remaining is None


def test_the_first_run_learns_from_its_own_steps() -> None:
    own = weights_of([{(0, "one"): 6.0}])
    found = look(head(done=50, of=100), own=own)
    assert found.remaining == pytest.approx(10.0 + 6.0), "half of the items in ten seconds; the next like the first"
    assert look(head(started=NOW + 8), own=own).basis == "own"


def test_nothing_is_invented() -> None:
    assert look(head()).remaining is None
    assert look(head(step=2, done=50, of=100, visit=3)).remaining == pytest.approx(10.0), (
        "the last step tells of itself"
    )
    weights = learned(10.0, 80.0, 10.0)
    for state in (State.PAUSED, State.BLOCKED):
        assert look(head(state), weights).remaining is None
    assert look(head(owner=None), weights, rate=2.0).remaining is None, "its process has left it"
    assert look(head(State.INITIALIZED, step=0, owner=None, started=None), weights).remaining == 100.0
    assert look(head(State.WAITING, signal="go", started=None), weights).remaining is None
    assert look(head(State.FAILED), weights).remaining is None
    assert look(head(State.COMPLETED, step=3, progress=1.0), weights).remaining == 0.0


def test_a_sleep_and_a_back_off_are_waited_for() -> None:
    weights = learned(10.0, 80.0, 10.0)
    asleep = look(head(State.WAITING, due=NOW + 17, started=None), weights)
    assert asleep.remaining == 7.0 + 80.0 + 10.0
    assert asleep.fraction == pytest.approx(0.03), "what is left of a sleep is not done yet"
    assert look(head(attempt=1, due=NOW + 15, started=NOW + 10), weights).remaining == 5.0 + 80.0 + 10.0


def test_to_data_is_what_documents_hold() -> None:
    assert Forecast(fraction=0.5, remaining=1.23456, rate=2.0, basis="rate").to_data() == {
        "fraction": 0.5,
        "remaining_seconds": 1.235,
        "items_per_second": 2.0,
        "basis": "rate",
    }


# --- with a store -----------------------------------------------------------------------------------------------------


async def test_it_learns_from_completed_runs_of_the_same_workflow_in_the_store() -> None:
    clock = ManualClock(NOW)
    async with MemoryCheckpointStore(clock=clock) as store:
        for id, workflow, seconds in (("old", "flow", 30.0), ("other", "else", 900.0)):
            await store.create(create(id, State.COMPLETED, workflow=workflow))
            rows = (row(2, 0, seconds), row(3, 1, seconds), row(4, 2, seconds, "finish"))
            await store.save(
                Save(id=id, head=Head(state=State.COMPLETED, revision=1, seq=4, updated=NOW), boundaries=rows)
            )
        forecaster = Forecaster(store, clock)
        found = await forecaster.of(_definition(), head(seq=0))
        assert (found.remaining, found.basis) == (60.0, "history")
        clock.advance(10)
        assert (await forecaster.of(_definition(), head(seq=0))).remaining == 50.0
        assert forecaster.at_once(_definition(), head(seq=0)).remaining == 50.0


async def test_a_list_of_known_workflows_costs_no_query_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(NOW)
    async with MemoryCheckpointStore(clock=clock) as store:
        await store.create(create("old", State.COMPLETED, workflow="flow"))
        rows = (row(2, 0, 30.0), row(3, 1, 30.0), row(4, 2, 30.0, "finish"))
        ended = Head(state=State.COMPLETED, revision=1, seq=4, updated=NOW)
        await store.save(Save(id="old", head=ended, boundaries=rows))
        forecaster, read = Forecaster(store, clock), []
        await forecaster.weights("flow")
        boundaries = store.boundaries

        async def counted(id: str, **options: Any) -> list[Boundary]:
            read.append(id)
            return await boundaries(id, **options)

        monkeypatch.setattr(store, "boundaries", counted)
        await store.create(create("again", workflow="flow"))
        for id in ("a", "b"):
            assert (await forecaster.of(definition(id, steps=STEPS), head(visit=2))).remaining == 60.0
        assert read == []
        await forecaster.of(definition("again", steps=STEPS), head(visit=7))
        assert read == ["again"], "a step that came again took time before"
        await forecaster.of(definition("again", steps=("new", *STEPS)), head(visit=2, seq=3))
        assert read == ["again", "again"], "a step that nobody knows"


async def test_the_rate_is_that_of_the_last_minute_and_of_this_visit() -> None:
    clock = ManualClock(NOW)
    async with MemoryCheckpointStore(clock=clock) as store:
        forecaster = Forecaster(store, clock)
        found = None
        for n in range(0, 400, 10):
            clock.advance(10.0)
            done = sum(10.0 * (1.0 if m < 200 else 10.0) for m in range(0, n + 10, 10))
            found = await forecaster.of(_definition(), head(seq=0), Progress(done=done, total=10_000))
        assert found is not None
        assert found.rate == pytest.approx(10.0)
        fresh = await forecaster.of(_definition(), head(seq=0, visit=2, started=clock.now()), Progress(done=0, total=5))
        assert fresh.rate is None


async def test_a_cursor_that_hangs_has_no_pace() -> None:
    """The forecast of a hung step grows; it does not stay at a few seconds for hours."""
    clock = ManualClock(NOW)
    async with MemoryCheckpointStore(clock=clock) as store:
        forecaster = Forecaster(store, clock)

        async def left(done: float) -> float:
            found = await forecaster.of(_definition(), head(seq=0, step=2), Progress(done=done, total=100))
            assert found.remaining is not None
            return found.remaining

        for done in range(1, 10):
            clock.advance(10.0)
            assert await left(done * 10) == pytest.approx(100 - done * 10)
        clock.advance(10.0)
        assert await left(90) == pytest.approx(10.0), "the next item is not late yet"
        clock.advance(3600.0)
        assert await left(90) > 300


async def test_it_forgets_what_nobody_asks_for_any_more() -> None:
    """Memory is bounded by what is looked at (I16)."""
    clock = ManualClock(NOW)
    async with MemoryCheckpointStore(clock=clock) as store:
        forecaster = Forecaster(store, clock)
        for n in range(1200):
            await forecaster.of(definition(f"run-{n}", workflow=f"flow-{n}"), head(seq=0))
        assert len(forecaster._meters) == len(forecaster._known) == len(forecaster._learned) == 1000


async def test_a_damaged_run_is_no_reason_not_to_show_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(NOW)
    async with MemoryCheckpointStore(clock=clock) as store:
        for id in ("broken", "sound"):
            await store.create(create(id, State.COMPLETED, workflow="flow"))
            rows = (row(2, 0, 30.0), row(3, 1, 30.0), row(4, 2, 30.0, "finish"))
            ended = Head(state=State.COMPLETED, revision=1, seq=4, updated=NOW)
            await store.save(Save(id=id, head=ended, boundaries=rows))
        read = store.boundaries

        async def boundaries(id: str, **options: Any) -> list[Boundary]:
            if id == "broken":
                raise CorruptDataError(id, "a test broke it")
            return await read(id, **options)

        monkeypatch.setattr(store, "boundaries", boundaries)
        assert (await Forecaster(store, clock).of(_definition(), head(seq=0))).remaining == 60.0


# --- in the hands of users --------------------------------------------------------------------------------------------


@pytest.fixture
def every_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event for each call of `progress`, however quickly they come."""
    monkeypatch.setattr("longrun.attempt.PROGRESS_EVERY", 0.0)


def paced(clock: ManualClock, seen: Any) -> StepRegistry:
    """A workflow whose steps take 10, 80 and 10 seconds of the test's clock; the second one has 100 items."""
    registry = StepRegistry()

    @registry.step
    async def one(state: Any) -> None:
        clock.advance(10)

    @registry.step
    async def two(ctx: StepContext, state: Any) -> None:
        for n in range(4):
            ctx.progress(25 * n, 100, "items")
            await seen(n)
            clock.advance(20)

    @registry.step
    async def three(state: Any) -> None:
        clock.advance(10)

    registry.workflow("flow", [one, two, three])
    return registry


async def test_info_client_and_events_show_one_forecast_that_rests_on_earlier_runs(every_progress: None) -> None:
    clock = ManualClock(NOW)
    looks: list[tuple[Forecast | None, Forecast | None]] = []
    events: list[ExecutionEvent] = []
    config = ExecutorConfig(checkpoint_interval=1e6, heartbeat_interval=1e6, lease_ttl=1e7)

    async def look(n: int) -> None:
        if executor.runners.keys() == {"second"} and n == 2:
            info = await (await executor.handle("second")).info()
            async with Client(executor.store, config=config, clock=clock) as client:
                looks.append((info.forecast, (await client.get("second")).forecast))

    async with Executor(paced(clock, look), store="memory:", config=config, clock=clock) as executor:
        await (await executor.start("flow", id="first")).result()
        subscription = executor.events()
        done = await executor.start("flow", id="second")
        await done.result()
        subscription.close()
        events += [event async for event in subscription if event.type is EventType.PROGRESS]
        assert (await executor.list())[0].forecast is None, "a list would pay a query for each"
        ended = (await done.info()).forecast
        assert ended is not None
        assert (ended.fraction, ended.remaining) == (1.0, 0.0)
    [(here, elsewhere)] = looks
    assert here is not None
    assert here.fraction == pytest.approx(0.5), "the long step weighs as it lasts"
    assert here.remaining == pytest.approx(40.0 + 10.0)
    assert here.basis == "rate"
    assert elsewhere is not None
    assert elsewhere.basis == "history", "its progress is not stored yet: history is what another process can know"
    told = {event.data["done"]: event.data for event in events}
    assert told[50]["total"] == 100
    assert told[50]["message"] == "items"
    assert {"fraction", "remaining_seconds", "items_per_second", "basis"} <= told[50].keys()


async def test_events_learn_from_the_store_beside_the_step(every_progress: None) -> None:
    """The first event of an execution may know nothing of earlier runs; those that follow do."""
    clock = ManualClock(NOW)
    learned = anyio.Event()
    config = ExecutorConfig(checkpoint_interval=1e6, heartbeat_interval=1e6, lease_ttl=1e7)

    async def wait(n: int) -> None:
        if n == 1 and "second" in executor.runners:
            while not executor.forecaster._known["second"].learned.by_index:
                await anyio.lowlevel.checkpoint()
            learned.set()

    async with Executor(paced(clock, wait), store="memory:", config=config, clock=clock) as executor:
        await (await executor.start("flow", id="first")).result()
        async with executor.events() as subscription:
            with anyio.fail_after(20):
                await (await executor.start("flow", id="second")).result()
            subscription.close()
            told = [event.data async for event in subscription if event.type is EventType.PROGRESS]
    assert learned.is_set()
    assert told[-1]["fraction"] == pytest.approx(0.1 + 0.8 * told[-1]["done"] / 100)


async def test_nobody_listens_and_nothing_is_forecast() -> None:
    clock = ManualClock(NOW)

    async def nothing(n: int) -> None: ...

    config = ExecutorConfig(checkpoint_interval=1e6, heartbeat_interval=1e6, lease_ttl=1e7)
    async with Executor(paced(clock, nothing), store="memory:", config=config, clock=clock) as executor:
        await (await executor.start("flow")).result()
        assert executor._forecaster is None
