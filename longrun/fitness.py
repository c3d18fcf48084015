"""Whether the code at hand can go on with an execution, and a second look at those that other code could not.

Place in the life of an execution: claim. While an upgrade is rolled out, old and new programs share a store, and each
may claim what only the other has the steps or the types for. It is blocked then, where everybody can see why; every
program that sweeps looks at what is blocked for that, now and then, and takes up what it can go on with itself.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from longrun.book import MISSING
from longrun.claims import BATCH, Claims
from longrun.errors import (
    CodecError,
    ExecutionNotFoundError,
    KeyUnavailableError,
    LongrunError,
    RegistrationError,
    StateMismatchError,
    UnknownStepError,
)
from longrun.gates import Gates
from longrun.records import ExecutionState
from longrun.snapshot import decode_state
from longrun.stored import Claim, Loaded, Query, Stored

if TYPE_CHECKING:
    from longrun.crew import Crew

BLOCKED = frozenset({ExecutionState.BLOCKED})
LACKS = (UnknownStepError, StateMismatchError, RegistrationError)
GOES_ON = "; it goes on where the code fits"
"""What the reason of an execution ends with that is blocked for one of these."""
REMEMBERED = 10_000


def reason_of(error: LongrunError) -> str:
    """Why an execution is blocked that cannot go on here."""
    return f"{error}{GOES_ON}" if isinstance(error, LACKS) else str(error)


def unusable(executor: Crew, loaded: Loaded) -> tuple[str | None, Any]:
    """Why a claimed execution cannot go on here (None if it can), and its decoded state."""
    head, steps = loaded.head, loaded.definition.steps
    if head.crashes >= executor.config.max_crashes:
        return f"its process died {head.crashes} times without progress; resume frees it", MISSING
    if loaded.damage and executor.config.on_corruption == "block":
        return "; ".join(loaded.damage), MISSING
    if head.step >= len(steps):
        return None, MISSING
    step = executor.registry.get(steps[head.step])
    if step is None:
        return reason_of(UnknownStepError(steps[head.step])), MISSING
    boundary = loaded.boundary
    try:
        return None, decode_state(boundary.data or b"null", loaded.blobs, bool(boundary.blobs), step.state_type)
    except (CodecError, RegistrationError) as error:
        return reason_of(error), MISSING


class SecondLook:
    """At what other code could not go on with, for one executor."""

    def __init__(self, executor: Crew, claims: Claims, gates: Gates) -> None:
        self._executor, self._claims, self._gates = executor, claims, gates
        self._look_at = -1.0
        self._after: tuple[float, str] | None = None
        self._unfit: dict[str, tuple[int, int]] = {}
        """What cannot go on here either: its revision, and how many steps were known."""

    async def take(self, claim: Claim) -> int:
        """Take up as many as `claim` says of what goes on here, a page further each time; how many it were."""
        now = self._executor.clock.monotonic()
        if now < self._look_at or claim.limit <= 0 or not self._executor.takes_work:
            return 0
        self._look_at = now + self._executor.config.heartbeat_interval / 2
        query = Query(states=BLOCKED, workflows=claim.workflows, owned=False, after=self._after, limit=BATCH)
        page = await self._executor.store.find(query)
        last = page[-1].definition if len(page) == BATCH else None
        self._after = None if last is None else (last.created, last.id)
        fit = [stored.definition for stored in page if await self._fits(stored)]
        taken = 0
        for queue, definitions in groupby(sorted(fit, key=attrgetter("queue")), attrgetter("queue")):
            ids = tuple([definition.id for definition in definitions])
            part = Claim(owner=claim.owner, now=claim.now, states=BLOCKED, ids=ids, limit=claim.limit - taken)
            taken += await self._take(queue, part)
        return taken

    async def _fits(self, stored: Stored) -> bool:
        id, head = stored.definition.id, stored.head
        if head.hold or not (head.reason or "").endswith(GOES_ON) or not self._claims.serves(stored.definition):
            return False
        mark = (head.revision, len(self._executor.registry.by_name))
        if self._unfit.get(id) == mark:
            return False
        try:
            reason, _ = unusable(self._executor, await self._executor.store.load(id))
        except (CodecError, ExecutionNotFoundError, KeyUnavailableError) as error:
            reason = str(error)
        if reason is not None:
            if len(self._unfit) >= REMEMBERED:
                self._unfit.clear()
            self._unfit[id] = mark
        return reason is None

    async def _take(self, queue: str, claim: Claim) -> int:
        if claim.limit <= 0:
            return 0
        if self._gates.limits(queue):
            return await self._gates.take(queue, claim, wakes_paused=True)
        async with self._claims.lock:
            taken = await self._claims.ask(claim)
            for loaded in taken:
                self._claims.take_up(loaded, wakes_paused=True)
        return len(taken)
