"""Group commit: one thread takes everything that wants to be saved, commits it as one batch, and answers each.

Place in the life of an execution: checkpoint. While one commit is in flight the next batch gathers. It gathers on while
those go on who were just answered, or just begin: most of them write again at once, and few that went ahead are not
worth a commit of their own, for which all the others would wait. The loop says when all have gone on. That is waited
for no longer than it takes where steps do next to nothing: if they compute, a commit meanwhile costs nobody anything.
Where very many write at once a batch is half of them, so that the loop goes on with the others meanwhile. If it were
all of them, they would all wait for the store, and then the store for all of them.
A waiter that is cancelled leaves its write in the queue: it is committed once, in its order, and nobody is told.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any

from longrun.errors import LongrunError, StoreUnavailableError
from longrun.loops import Loop, Told, Waiter, tell_all
from longrun.stored import Write
from longrun.stores.base import StoreBackend

Done = Callable[[Any], object]
"""Takes the answer: a value, or the exception that stands for it."""

BATCH_LIMIT = 4096
HALVED_FROM = 512
"""This many writes or more are committed by halves, unless a commit takes longer, by more than a `LITTLE`, than the
loop takes to go on with all whom it answers: where the disk is slow, two commits take twice as long as one."""
GOES_ON = 1e-5
"""Seconds, about, that it takes the loop to go on after an answer, up to the next write."""
GATHERS = 0.02
"""Seconds for which a batch gathers at most while others begin."""
LITTLE = 5e-3
"""Seconds."""
QUEUE_LIMIT = 20_000
"""More than this many writes waiting, and whoever comes next waits before it may add its own."""


Job = tuple[Done, Loop | None, Write | None, Callable[[], Any] | None]
"""One thing for the writer's thread to do: whom to tell and where, and the write or the call. Not a class: there is one
for every step of every execution."""
_DONE, _LOOP, _WRITE = map(itemgetter, range(3))


class Writer:
    """The writer thread of one store."""

    def __init__(self, backend: StoreBackend, prepare: Callable[[list[Write]], list[Write]]) -> None:
        """`prepare` makes of writes, in their order, what is handed to the backend."""
        self._backend = backend
        self._prepare = prepare
        self._queue: deque[Job] = deque()
        self._calls = 0
        """How many of these are calls."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._asleep = False
        """Whether the thread has to be woken. Set before it looks a last time, so that nothing is added unnoticed."""
        self._going_on: Loop | None = None
        """Where one after the other goes on at the moment: who adds something there wakes nobody, for more comes."""
        self._coming = 0
        """How many they are, at most."""
        self._slow: Loop | None = None
        """Where that takes so long that nobody waits for it."""
        self._lock = threading.Lock()
        self._closing = True
        self._turns = 0
        self._told = self._left = 0
        """How many were answered last, and how many were waiting then."""
        self._longer = 0.0
        """By how many seconds, lately, a commit was longer than the loop takes to go on."""
        self._thread: threading.Thread | None = None
        self._waiting: deque[tuple[Loop, Waiter]] = deque()

    def start(self) -> None:
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"longrun-writer-{self._backend.kind}", daemon=True)
        self._thread.start()

    def stop(self, patience: float | None = None) -> bool:
        """Do everything that is queued, then end the thread; False if nothing of it was done for so many seconds."""
        with self._lock:
            self._closing = True
        self._wake.put(None)
        while self._thread is not None and self._thread.is_alive():
            before = self._turns
            self._thread.join(patience)
            if self._turns == before and self._thread.is_alive():
                return False
        self._thread = None
        return True

    @property
    def at_work(self) -> bool:
        """Whether something is queued or under way."""
        return self._thread is not None and (bool(self._queue) or not self._asleep)

    def room(self, loop: Loop) -> Waiter | None:
        """None if a write may be added now; otherwise what to wait for before asking again."""
        if len(self._queue) < QUEUE_LIMIT:
            return None
        waiter = loop.waiter()
        self._waiting.append((loop, waiter))
        return waiter

    def call(self, function: Callable[[], Any], done: Done, loop: Loop | None) -> None:
        """Queue anything that the backend does in the writer's thread, in order with the writes. `done` gets its answer
        in `loop`, or in the writer's thread if that is None."""
        self.add((done, loop, None, function))

    def add(self, job: Job) -> None:
        with self._lock:
            if self._closing:
                raise StoreUnavailableError(self._backend.kind, "it is not open; enter it with `async with`")
            self._queue.append(job)
            if job[3] is not None:
                self._calls += 1
        if self._asleep and (self._going_on is None or job[1] is not self._going_on):
            self._rouse(job[1])

    def _rouse(self, loop: Loop | None) -> None:
        """Wake the thread for one who does not go on after an answer, or who could not be waited for any longer: others
        may begin in `loop` together with him."""
        begins = loop is not None and self._going_on is None and self._slow is None
        self._going_on, self._coming = (loop, BATCH_LIMIT) if begins else (None, 0)
        self._asleep = False
        self._wake.put(None)
        if loop is not None and begins:
            loop.after_turn(self._have_gone_on)

    def _have_gone_on(self, _: None = None) -> None:
        """What those add who were answered last, or began, is all in the queue."""
        self._going_on = self._slow = None
        if self._asleep and self._queue:
            self._asleep = False
            self._wake.put(None)

    def _sleep(self) -> None:
        """Until there is something to do."""
        self._asleep = True
        if not self._queue and self._going_on is None and not self._closing:
            self._wake.get()
            if len(self._queue) == 1:  # nobody else began: it was the loop that let this thread go on
                self._going_on = None
            self._asleep = True
        if (patience := self._patience()) > 0:
            try:
                self._wake.get(timeout=patience)
            except Empty:
                self._going_on, self._slow = None, self._going_on
        self._asleep = False

    def _patience(self) -> float:
        """Seconds for which more is waited for: if there is little of what comes, and nothing from elsewhere."""
        with self._lock:
            loop, queue = self._going_on, self._queue
            if loop is None or self._closing or 2 * len(queue) >= self._coming:
                return 0.0
            alone = all(one is loop for one in map(_LOOP, queue))
        return min(GATHERS, 2 * GOES_ON * self._coming) if alone else 0.0

    def _run(self) -> None:
        queue = self._queue
        while True:
            self._sleep()
            if queue:
                self._deliver(*self._next())
                self._turns += 1
                while self._waiting and len(queue) < QUEUE_LIMIT:
                    loop, waiter = self._waiting.popleft()
                    loop.call_soon(waiter, None)
            if self._closing and not queue:
                return

    def _next(self) -> tuple[list[Job], list[Any]]:
        """Do the call at the front of the queue, or every write up to the next call."""
        queue = self._queue
        with self._lock:
            first, limit = queue[0], self._limit(len(queue))
            if first[3] is not None:
                self._calls -= 1
                batch = [queue.popleft()]
            elif not self._calls and len(queue) <= limit:  # the rule: all that there is
                batch = list(queue)
                queue.clear()
            else:
                batch = []
                while queue and queue[0][3] is None and len(batch) < limit:
                    batch.append(queue.popleft())
        if first[3] is not None:
            return batch, [_outcome(first[3])]
        began = time.perf_counter()
        answers = self._commit(batch)
        self._longer += (time.perf_counter() - began - len(batch) * GOES_ON - self._longer) / 8
        self._told, self._left = len(batch), len(queue)
        return batch, answers

    def _limit(self, waiting: int) -> int:
        """How many the next commit takes: at most half of those that wait, or go on after an answer and will wait
        again."""
        if waiting < HALVED_FROM or self._longer > LITTLE:
            return BATCH_LIMIT
        going_on = max(0, self._told - max(0, waiting - self._left))
        return min(BATCH_LIMIT, (waiting + going_on + 1) // 2)

    def _commit(self, batch: list[Job]) -> list[Any]:
        try:
            writes = self._prepare(list(map(_WRITE, batch)))
        except Exception:  # some of them: then it is told of each
            return self._commit_some(batch)
        outcome = _outcome(lambda: self._backend.commit(writes))
        return _for_each(outcome, len(batch))

    def _commit_some(self, batch: list[Job]) -> list[Any]:
        """What cannot be prepared is refused, and the others are committed."""
        answers: list[Any] = [None] * len(batch)
        writes: list[Write] = []
        places: list[int] = []
        for place, (_, _, write, _) in enumerate(batch):
            try:
                writes += self._prepare([write])  # type: ignore[list-item]
                places.append(place)
            except LongrunError as error:
                answers[place] = error
            except Exception as error:  # a key that cannot be had refuses this write, not the others
                answers[place] = _wrapped(error, "while it was sealed")
        outcome = _outcome(lambda: self._backend.commit(writes)) if writes else []
        for place, answer in zip(places, _for_each(outcome, len(places)), strict=True):
            answers[place] = answer
        return answers

    def _deliver(self, jobs: list[Job], answers: list[Any]) -> None:
        """Tell everybody, with one hop for each loop."""
        loops = set(map(_LOOP, jobs))
        told: dict[Loop | None, list[Told]]
        self._going_on = None
        if len(loops) == 1:  # the rule
            loop = loops.pop()
            told = {loop: list(zip(map(_DONE, jobs), answers, strict=True))}
            if loop is not None and len(jobs) > 1:
                self._going_on, self._coming = loop, len(jobs)
                told[loop].append((self._have_gone_on, None))
        else:
            told = {loop: [] for loop in loops}
            for job, answer in zip(jobs, answers, strict=True):
                told[job[1]].append((job[0], answer))
        jobs.clear()  # nothing here keeps anything of what is told from now on
        for loop, theirs in told.items():
            if loop is None:
                tell_all(theirs)
            elif not loop.answer(theirs):
                self._going_on = None


def _outcome(function: Callable[[], Any]) -> Any:
    """The value, or the error as a value: the writer's thread never dies of a job."""
    try:
        return function()
    except LongrunError as error:
        return error
    except Exception as error:
        return _wrapped(error, "in the backend")


def _for_each(outcome: list[Any] | LongrunError, count: int) -> list[Any]:
    """The answers, or an error of his own for everybody: whoever raises one adds to its traceback."""
    return [_twin(outcome) for _ in range(count)] if isinstance(outcome, LongrunError) else outcome


def _twin(error: LongrunError) -> LongrunError:
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin


def _wrapped(error: Exception, where: str) -> StoreUnavailableError:
    wrapped = StoreUnavailableError("checkpoint", f"{type(error).__name__} {where}")
    wrapped.__cause__ = error
    return wrapped
