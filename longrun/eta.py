"""How far an execution is, and when it will be done: one `Forecast`, for whoever shows it.

Place in the life of an execution: whenever somebody looks. Events, `info()`, the command line and the dashboard show
the same one. It rests on three things, in this order:

- the live rate of the cursor in the step in flight: items a second over the last minute, else since the step began;
- the seconds that each step took in earlier runs of the workflow (the median of up to ten completed ones, a sleep
  counted to the step that asked for it), which are also the step's weight in the fraction;
- where the workflow never ran before, the mean of this run's own finished steps.

A step that takes longer than usual is measured by those earlier runs that took longer still. Where nothing honest can
be said there is no estimate: in a wait for a signal, for what is paused, blocked or owned by nobody, and for a step
that takes longer than it ever did.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import attrs
from attrs import define, field, frozen

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import CorruptDataError, LongrunError
from longrun.logging import get_logger
from longrun.records import ExecutionState, Forecast, Progress
from longrun.stored import Boundary, Definition, Head, Query
from longrun.stores.store import CheckpointStore

State = ExecutionState
RUNS = 10
"""How many earlier runs are looked at."""
ROWS = 5000
"""How many of their rows in all: a run of 10,000 steps must not make looking slow."""
OWN_ROWS = 200
WINDOW = 60.0
LEARN_AGAIN = 300.0
LOOK_AGAIN = 1.0
"""How often events make it look at an execution's own rows, at most."""
REMEMBERED = 1000
MOVES = frozenset({"step", "goto", "repeat", "sleep", "wait", "finish"})
STANDING = frozenset({State.PAUSED, State.BLOCKED})
log = get_logger()


class Spawn(Protocol):
    """Runs something beside everything else."""

    def __call__(self, function: Callable[[], Awaitable[Any]], *, name: str) -> None: ...


@frozen
class Took:
    """The seconds that a step took, each time."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """What it usually takes: one odd run does not spoil it."""
        return statistics.median(self.samples)

    def left(self, elapsed: float) -> float | None:
        """What it usually still takes after so long; None if it never took as long."""
        longer = [one for one in self.samples if one >= elapsed]
        return statistics.median(longer) - elapsed if longer else None


@frozen
class Weights:
    """What steps took: by index where the same step stood there, by name otherwise."""

    by_index: Mapping[int, tuple[str | None, Took]] = field(factory=dict)
    by_name: Mapping[str, Took] = field(factory=dict)

    def of(self, index: int, name: str | None = None) -> Took | None:
        """What a step took; `name` None where a listing does not say it."""
        found = self.by_index.get(index)
        if found is not None and (name is None or found[0] == name):
            return found[1]
        return None if name is None else self.by_name.get(name)

    @property
    def steps(self) -> Took | None:
        """What its steps took, for one of which nothing is known."""
        return Took(tuple(took.seconds for _, took in self.by_index.values())) if self.by_index else None


def weights_of(runs: Iterable[Mapping[tuple[int, str | None], float]]) -> Weights:
    """From the seconds that the steps of several runs took."""
    samples: dict[tuple[int, str | None], list[float]] = {}
    named: dict[str, list[float]] = {}
    for run in runs:
        for (index, name), seconds in run.items():
            samples.setdefault((index, name), []).append(seconds)
            if name is not None:
                named.setdefault(name, []).append(seconds)
    by_index: dict[int, tuple[str | None, Took]] = {}
    for (index, name), seconds_of in samples.items():
        if index not in by_index or len(seconds_of) > len(by_index[index][1].samples):
            by_index[index] = (name, Took(tuple(seconds_of)))
    return Weights(by_index, {name: Took(tuple(seconds_of)) for name, seconds_of in named.items()})


def spent(rows: Sequence[Boundary]) -> dict[tuple[int, str | None], float]:
    """Seconds by step of one run: all its visits together, and the sleeps that it asked for."""
    seconds: dict[tuple[int, str | None], float] = {}
    sleeper: Boundary | None = None
    for row in rows:
        if sleeper is not None and row.started is not None:
            key = (sleeper.step, sleeper.name)
            seconds[key] = seconds.get(key, 0.0) + max(0.0, row.started - sleeper.ended)
            sleeper = None
        if row.kind not in MOVES or row.started is None:
            continue
        key = (row.step, row.name)
        seconds[key] = seconds.get(key, 0.0) + max(0.0, row.ended - row.started)
        if row.kind == "sleep":
            sleeper = row
    return seconds


class Spread:
    """The weights laid out over the steps of one execution."""

    def __init__(self, total: int, names: Sequence[str], learned: Weights, own: Weights) -> None:
        usual = learned.steps or own.steps or Took((1.0,))
        mean = statistics.fmean(usual.samples)
        known = [self._known(n, names[n] if n < len(names) else None, learned, own) for n in range(total)]
        self.exact = [took is not None for took in known]
        self.took = [took or usual for took in known]
        self.seconds = [mean if took is None else took.seconds for took in known]
        self.before = [0.0, *accumulate(self.seconds)]
        """Seconds before each step; the last one is all of them."""
        self.basis = "history" if learned.by_index else "own" if own.by_index else "none"

    @staticmethod
    def _known(index: int, name: str | None, learned: Weights, own: Weights) -> Took | None:
        return learned.of(index, name) or (None if name is None else own.by_name.get(name)) or own.of(index, name)


def forecast(
    definition: Definition, head: Head, spread: Spread, now: float, *, rate: float | None = None, here: float = 0.0
) -> Forecast:
    """The forecast of an execution. `here` is what this run's earlier visits of the step in flight took."""
    shown = Progress(done=head.done, total=head.of, message=head.note)
    progress = shown if shown.done or shown.total or shown.message else None
    total, step = definition.total, head.step
    if head.state.finished or not total or step >= total:
        done = head.state is State.COMPLETED
        return Forecast(fraction=head.progress, remaining=0.0 if done else None, step=progress)
    wait = max(0.0, head.due - now) if head.due is not None else 0.0
    fraction = _fraction(head, spread, shown, wait)
    if _stands(head):
        return Forecast(fraction=fraction, step=progress)
    left, basis = _left_here(head, spread, shown, now, rate, here)
    rest = spread.before[total] - spread.before[step + 1] if spread.basis != "none" or step + 1 == total else None
    if left is None or rest is None:
        return Forecast(fraction=fraction, rate=rate, step=progress)
    return Forecast(fraction=fraction, remaining=wait + left + rest, rate=rate, step=progress, basis=basis)


def _fraction(head: Head, spread: Spread, shown: Progress, wait: float) -> float:
    """By the weights of the steps. A sleep counts to the step that asked for it: what is left of it is still to do."""
    done, whole = spread.before[head.step] + spread.seconds[head.step] * shown.fraction, spread.before[-1]
    if head.state is State.WAITING and head.signal is None and spread.basis == "history":
        done = max(0.0, done - wait)
    return min(1.0, done / whole) if whole > 0 else head.progress


def _stands(head: Head) -> bool:
    """Nobody knows when it goes on: it stands still, waits for a signal, or its process has left it."""
    left = head.owner is None and head.state in (State.RUNNING, State.RESUMING)
    return head.state in STANDING or head.signal is not None or left


def _left_here(
    head: Head, spread: Spread, shown: Progress, now: float, rate: float | None, here: float
) -> tuple[float | None, str]:
    """Seconds that the step in flight still takes, and what says so."""
    if rate and shown.total is not None:
        return max(0.0, shown.total - shown.done) / rate, "rate"
    elapsed = max(0.0, now - head.started) if head.started is not None else 0.0
    seconds = spread.seconds[head.step]
    if shown.fraction > 0 and elapsed > 0 and (not spread.exact[head.step] or elapsed > seconds):
        return elapsed * (1 - shown.fraction) / shown.fraction, "rate"
    if spread.basis == "none":
        return None, "none"
    if shown.fraction > 0:
        return seconds * (1 - shown.fraction), spread.basis
    if elapsed + here == 0:
        return seconds, spread.basis
    return spread.took[head.step].left(elapsed + here), spread.basis


@define
class _Meter:
    """The pace of the cursor of one visit."""

    visit: int
    samples: deque[tuple[float, float]] = field(factory=deque)

    def note(self, moment: float, done: float) -> None:
        if not self.samples or (moment > self.samples[-1][0] and done != self.samples[-1][1]):
            self.samples.append((moment, done))
        while len(self.samples) > 2 and (self.samples[-1][0] - self.samples[0][0] > WINDOW or len(self.samples) > 600):
            self.samples.popleft()

    def rate(self, head: Head, now: float) -> float | None:
        """Items a second. While nothing comes for longer than usual it sinks: a cursor that hangs has no pace."""
        (first, was), (last, done) = self.samples[0], self.samples[-1]
        if last - first >= 0.5 and done > was:
            usual = (last - first) / (len(self.samples) - 1)
            return (done - was) / (max(last, now - usual) - first)
        if head.started is not None and done > 0 and last > head.started:
            return done / (last - head.started)
        return None


@frozen
class _Known:
    """What is known of one execution as of a boundary."""

    seq: int
    own: Mapping[tuple[int, str | None], float]
    spread: Spread
    learned: Weights
    moment: float


class Forecaster:
    """Makes forecasts for one store. It remembers what it learnt, and the pace of what it was asked about."""

    def __init__(self, store: CheckpointStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._clock = store, clock
        self._learned: OrderedDict[str, tuple[float, Weights]] = OrderedDict()
        self._meters: OrderedDict[str, _Meter] = OrderedDict()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._looking: set[str] = set()

    async def of(self, definition: Definition, head: Head, live: Progress | None = None) -> Forecast:
        """The forecast of an execution; `live` is progress that is not stored yet."""
        if head.state.finished:
            return self.at_once(definition, head)
        learned = await self.weights(definition.workflow)
        known = self._known.get(definition.id)
        if known is None or known.seq != head.seq or known.learned is not learned:
            seconds = await self._own(definition, head, learned)
            spread = Spread(definition.total, definition.steps, learned, weights_of([seconds]))
            known = _Known(head.seq, seconds, spread, learned, self._clock.monotonic())
            _remember(self._known, definition.id, known)
        return self.at_once(definition, head, live)

    async def _own(self, definition: Definition, head: Head, learned: Weights) -> dict[tuple[int, str | None], float]:
        """What this run's steps took. Where earlier runs know them all and none came twice, nobody asks for it: a list
        is spared a query for each."""
        names = definition.steps or (None,) * definition.total
        if head.visit <= head.step + 1 and all(learned.of(index, name) for index, name in enumerate(names)):
            return {}
        return spent(await self._rows(definition.id, max(0, head.seq - OWN_ROWS), OWN_ROWS))

    def at_once(self, definition: Definition, head: Head, live: Progress | None = None) -> Forecast:
        """The same from what is remembered, without asking the store: for whoever cannot wait."""
        if head.state.finished:
            return forecast(definition, head, Spread(0, (), Weights(), Weights()), self._clock.now())
        if live is not None:
            head = attrs.evolve(head, done=live.done, of=live.total, note=live.message)
        known = self._known.get(definition.id)
        if known is None or len(known.spread.seconds) != definition.total:
            known = _Known(-1, {}, Spread(definition.total, (), Weights(), Weights()), Weights(), float("-inf"))
            _remember(self._known, definition.id, known)
        here = sum(seconds for (index, _), seconds in known.own.items() if index == head.step)
        rate = self._rate(definition.id, head, live is not None)
        return forecast(definition, head, known.spread, self._clock.now(), rate=rate, here=here)

    def tell(self, definition: Definition, head: Head, live: Progress | None, spawn: Spawn) -> dict[str, Any]:
        """The data of an event that shows progress. An event cannot wait for the store: what is not known yet, or no
        longer true, is looked up beside it (`spawn`) for those that follow."""
        data = {} if live is None else {"done": live.done, "total": live.total, "message": live.message}
        data.update(self.at_once(definition, head, live).to_data())
        known, now = self._known.get(definition.id), self._clock.monotonic()
        old = known is not None and known.seq != head.seq and now >= known.moment + LOOK_AGAIN
        if old and definition.id not in self._looking:
            self._looking.add(definition.id)
            spawn(partial(self._look, definition, head), name="longrun-forecast")
        return data

    async def _look(self, definition: Definition, head: Head) -> None:
        try:
            await self.of(definition, head)
        except LongrunError as error:  # nobody waits for it, and the next event asks again
            log.debug("forecast.failed", execution=definition.id, problem=str(error))
        finally:
            self._looking.discard(definition.id)

    async def weights(self, workflow: str) -> Weights:
        """What earlier runs of a workflow teach, looked up again every few minutes."""
        known = self._learned.get(workflow)
        now = self._clock.monotonic()
        if known is not None and now - known[0] < LEARN_AGAIN:
            return known[1]
        runs, left = [], ROWS
        query = Query(states=frozenset({State.COMPLETED}), workflows=frozenset({workflow}), limit=RUNS)
        for stored in await self._store.find(query):
            if left <= 0:
                break
            rows = await self._rows(stored.definition.id, 0, min(left, 1000))
            left -= len(rows)
            runs.append(spent(rows))
        learned = weights_of(runs)
        _remember(self._learned, workflow, (now, learned))
        return learned

    async def _rows(self, id: str, after: int, limit: int) -> list[Boundary]:
        """The rows of a run; none where they are damaged: that is no reason not to show the others."""
        try:
            return await self._store.boundaries(id, after=after, limit=limit)
        except CorruptDataError:
            return []

    def _rate(self, id: str, head: Head, live: bool) -> float | None:
        if head.state is not State.RUNNING:
            return None
        meter = self._meters.get(id)
        if meter is None or meter.visit != head.visit:
            meter = _Meter(head.visit)
        _remember(self._meters, id, meter)
        now = self._clock.now()
        meter.note(now if live else head.updated, head.done)
        return meter.rate(head, now)


def _remember(where: OrderedDict[str, Any], key: str, value: Any) -> None:
    """Keep a value, and forget what was not asked for longest: memory is bounded."""
    where[key] = value
    where.move_to_end(key)
    while len(where) > REMEMBERED:
        where.popitem(last=False)
