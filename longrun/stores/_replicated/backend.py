"""`ReplicatedBackend`: two backends behind the one contract. Writes here; reads and life in `reading.py`.

Place in the life of an execution: claim, checkpoint, finish. In synchronous mode a write goes to the standby first and
to the active side second, so that whatever anybody can see is on both; only a new execution, and a claim, are decided
by the active side first, since it chooses. The active side's answers are the answers. Where the standby answers
otherwise, the execution is made equal on both before anything is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from longrun.errors import ExecutionNotFoundError, StoreUnavailableError
from longrun.stored import Claim, Create, Loaded, Owner, Write
from longrun.stores._replicated.mirror import MovedError, alike
from longrun.stores._replicated.reading import ReadingBackend
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.term import bury, marks_of
from longrun.stores.base import Answer


class ReplicatedBackend(ReadingBackend):
    """Every method that changes something. One caller at a time, behind the gate."""

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        with self._to_write():
            return [answer for part in _parts(batch) for answer in self._part(part)]

    def _part(self, part: Sequence[Write]) -> list[Answer]:
        if self._council.in_step:
            return self._pairwise(part)
        active = self._council.active
        try:
            answers: list[Answer] = active.write("commit", part)
            if True in answers:  # what is new here may only be forgotten
                self._council.vouch_for(active)
            self._check_unknown(active, answers)
        except LostError as lost:
            self._council.lost(lost)
            return self._part(part)
        if self._stale(active, [write.id for write in part]):
            return self._part(part)
        self._later(len(part), lambda there: self._mirror.writes(there, part, answers))
        return answers

    def _pairwise(self, part: Sequence[Write]) -> list[Answer]:
        active, standby = self._council.active, self._council.standby
        creates = [n for n, write in enumerate(part) if isinstance(write, Create)]
        try:
            made = _answers(active, part, creates)
        except LostError as lost:
            self._council.lost(lost)
            return self._part(part)
        told = [n for n in range(len(part)) if made.get(n) is not False]
        rest = [n for n in told if n not in made]
        try:
            self._watch(standby)
            there = made | _answers(standby, part, told)
        except LostError as lost:
            self._council.dropped(lost)
            return self._without(active, part, made)
        try:
            here = made | _answers(active, part, rest)
            if any(made[n] is not there[n] for n in creates if n in told):  # new on one of the two
                self._council.vouch_for(active)
            self._check_unknown(active, here.values())
        except LostError as lost:
            self._suspects |= {part[n].id for n in told}
            self._council.lost(lost)
            here = there
        odd = self._disturbed(active, standby, [part[n].id for n in rest])
        odd += [part[n].id for n in told if part[n].id in self._suspects or not alike(here[n], there[n])]
        if odd or self._council.active is not active:
            here = self._settled(active, odd or [write.id for write in part], here, there)
        return [here[n] for n in range(len(part))]

    def _check_unknown(self, active: Side, answers: Iterable[Answer]) -> None:
        """What the active side does not know it may have lost, with everything else."""
        if any(isinstance(answer, ExecutionNotFoundError) for answer in answers):
            self._council.vouch_for(active)

    def _without(self, active: Side, part: Sequence[Write], made: dict[int, Answer]) -> list[Answer]:
        """The standby was lost on the way: the rest for the active side alone."""
        rest = [write for n, write in enumerate(part) if n not in made]
        answers = iter(self._part(rest) if rest else [])
        if self._council.active is active and self._stale(active, [write.id for write in part]):
            return self._part(part)
        return [made[n] if n in made else next(answers) for n in range(len(part))]

    def _settled(
        self, active: Side, ids: list[str], here: dict[int, Answer], there: dict[int, Answer]
    ) -> dict[int, Answer]:
        """Make the two sides agree. If the sides changed their parts meanwhile, the new active side's answers hold."""
        try:
            self._agree(ids)
        except MovedError:
            self._council.follow()
            self._agree_again(ids)
        return here if self._council.active is active else there

    # claims

    def claim(self, claim: Claim) -> list[Loaded]:
        with self._to_write():
            return self._claim(claim)

    def _claim(self, claim: Claim) -> list[Loaded]:
        active = self._council.active
        try:
            given: list[Loaded] = active.write("claim", claim)
            if given and not self._council.in_step:
                self._council.vouch_for(active)
        except LostError as lost:
            self._council.lost(lost)
            return self._claim(claim)
        if not given:
            return given
        ids = [one.definition.id for one in given]
        if not self._council.in_step:
            if self._stale(active, ids):
                return self._still_given(claim, given)
            self._later(len(given), lambda there: self._mirror.claim(there, claim, given))
            return given
        try:
            odd = self._mirror.claim(self._council.standby, claim, given)
        except LostError as lost:
            self._council.dropped(lost)
            odd = ids
        if odd:
            self._settled(active, odd, {}, {})
            return self._still_given(claim, given)
        return given

    def _still_given(self, claim: Claim, given: list[Loaded]) -> list[Loaded]:
        """After a repair: only what the active side still says is the claimer's."""
        kept: list[Loaded] = []
        for one in given:
            now: Loaded | None = self._council.active.read("load", one.definition.id)
            if now is not None and (now.head.fence, now.head.owner) == (one.head.fence, claim.owner):
                kept.append(one)
        return kept

    # owners

    def register(self, owner: Owner, ttl: float) -> None:
        self._both("register", owner, ttl)

    def register_other(self, owner: Owner, ttl: float) -> None:
        self._both("register_other", owner, ttl)

    def renew(self, owner: str, ttl: float) -> bool:
        return bool(self._both("renew", owner, ttl))

    def unregister(self, owner: str) -> None:
        self._both("unregister", owner)

    def _both(self, call: str, *args: Any) -> Any:
        with self._to_write():
            return self._on_both(call, *args)

    def _on_both(self, call: str, *args: Any) -> Any:
        """Leases need no order between the sides: an owner that one of them does not know is registered there again."""
        there = None
        active = self._council.active
        if self._council.in_step:
            try:
                there = self._council.standby.write(call, *args)
            except LostError as lost:
                self._council.dropped(lost)
                return self._on_both(call, *args)
        try:
            here = active.write(call, *args)
        except LostError as lost:
            self._council.lost(lost)
            return self._on_both(call, *args)
        if here and there is False:
            self._mirror.owners(active, self._council.standby)
        self._later(1, lambda standby: self._copied_owner(standby, call, *args))
        return here

    def _copied_owner(self, standby: Side, call: str, *args: Any) -> list[str]:
        standby.write(call, *args)
        return []

    # deleting

    def delete(self, ids: Sequence[str]) -> list[bool]:
        with self._to_write():
            return self._delete(tuple(ids))

    def _delete(self, ids: tuple[str, ...]) -> list[bool]:
        active, standby, there = self._council.active, self._council.standby, None
        joins = self._council.joins  # then a copy that another process makes anew, where there was none, has no mark
        if not self._council.mirrors:
            bury(active, ids, self._clock.now())
        elif self._council.in_step:
            try:
                self._watch(standby)
                there = standby.write("delete", ids)
            except LostError as lost:
                self._council.dropped(lost)
                return self._delete(ids)
        try:
            here: list[bool] = active.write("delete", ids)
        except LostError as lost:
            self._council.lost(lost)
            if there is None:
                return self._delete(ids)
            if joins:
                raise lost.error from None
            self._disturbed(active, standby, list(ids))
            return list(there)
        if there is not None and (self._disturbed(active, standby, list(ids)) or joins or there != here):
            self._settled(active, list(ids), {}, {})
        elif there is None and self._stale(active, list(ids)):
            return [a or b for a, b in zip(here, self._delete(ids), strict=True)]
        self._later(len(ids), lambda standby: self._mirror.delete(standby, ids, here))
        return here

    # others who repair the standby

    def _watch(self, standby: Side) -> None:
        """Before a write to the standby: know its marks. Those that were seen at the last write will do."""
        generation = self._council.generation
        if not self._rules.alone and (self._watched is None or self._watched[0] != generation):
            self._watched = generation, marks_of(standby)

    def _disturbed(self, active: Side, standby: Side, ids: list[str]) -> list[str]:
        """After the standby was written to and then the active side: what another process may have replaced on the
        standby in between, by what the active side had before. Such an execution is made equal again; if the standby
        has become active meanwhile, nobody knows what it has, and whoever writes must do it again.

        A repairer marks, then reads the active side for its copy, then compares, then removes its mark. If its mark is
        there now, or came and went since the marks were last seen, it is noticed here. If it went before that, it was
        done when the standby was written to. If it comes later, the copy is read when the active side has the write.
        """
        if not ids or self._rules.alone:
            return []
        try:
            found = self._marked_since(standby, ids)
        except LostError as lost:
            if self._council.standby is standby:
                self._council.dropped(lost)
            found = ids
        if found and self._council.active is not active:
            raise StoreUnavailableError(self.kind, "the active side was lost while another process repaired the other")
        return found

    def _marked_since(self, standby: Side, ids: list[str]) -> list[str]:
        assert self._watched is not None
        (generation, before), now = self._watched, marks_of(standby)
        self._watched = generation, now
        return list(ids) if now.number != before.number else [id for id in ids if id in now.ids]

    # the standby

    def _later(self, weight: int, copy: Callable[[Side], list[str]]) -> None:
        """In asynchronous mode: copy it when its turn comes. Waits while the queue is full."""
        if self._council.in_step or not self._council.mirrors or not weight:
            return
        active, standby = self._council.active, self._council.standby
        while self._lag.put(weight, lambda: self._copy(active, standby, copy)) is not None:
            if not self._go_on_copying():
                return

    def _copy(self, active: Side, standby: Side, copy: Callable[[Side], list[str]]) -> None:
        """In the thread of the queue."""
        try:
            if not self._council.leads(active) or self._superseded(active):
                raise MovedError
            self._mirror.agree(active, standby, copy(standby))
        except MovedError:
            self._recheck = True
        except LostError as lost:
            if not (self._switching and lost.side is active):
                raise
        except Exception as error:  # a defect of ours must not end the queue: the standby is brought up to date anew
            self._log.exception("replica.defect", error=type(error).__name__)
            problem = StoreUnavailableError(self.kind, f"{type(error).__name__} while copying")
            raise LostError(standby, problem) from error

    def _superseded(self, active: Side) -> bool:
        try:
            return self._council.superseded(active)
        except LostError:  # then the queue is all there is
            return False

    def _stale(self, active: Side, ids: list[str]) -> bool:
        """After a write to one side alone: whether another process has changed the term before it could be seen, so
        that the write must be made again. If the other side has only been brought in, it is given what it lacks."""
        if self._council.in_step or not self._council.follow_active():
            return False
        if self._council.active is not active:
            return True
        self._agree_again(ids)
        return False

    def _agree(self, ids: list[str]) -> None:
        """Make the standby's executions what the active side has, if it is written to at all."""
        if not self._council.mirrors:
            return
        active, standby = self._council.active, self._council.standby
        try:
            self._mirror.agree(active, standby, ids)
            self._suspects.difference_update(ids)
            self._watched = None
        except LostError as lost:
            if lost.side is active:
                raise
            self._council.dropped(lost)

    def _agree_again(self, ids: list[str]) -> None:
        """The same, however often the term changes meanwhile."""
        while True:
            try:
                return self._agree(ids)
            except MovedError:
                self._council.follow()


def _parts(batch: Sequence[Write]) -> Iterator[Sequence[Write]]:
    """New executions are decided first: cut where one follows another write to its id."""
    part: list[Write] = []
    seen: set[str] = set()
    for write in batch:
        if isinstance(write, Create) and write.id in seen:
            yield part
            part, seen = [], set()
        part.append(write)
        seen.add(write.id)
    if part:
        yield part


def _answers(side: Side, part: Sequence[Write], places: Sequence[int]) -> dict[int, Answer]:
    """What a side says to some of the writes, by their place."""
    if not places:
        return {}
    return dict(zip(places, side.write("commit", [part[n] for n in places]), strict=True))
