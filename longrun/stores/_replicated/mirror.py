"""What the standby is told, and what happens when it answers otherwise than the active side did.

Place in the life of an execution: claim, checkpoint, finish; on the way to the second store. Every call here gives the
ids about which the two sides do not agree; the caller has them made equal before it acknowledges anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import attrs

from longrun.clock import Clock
from longrun.stored import Claim, Loaded, Owner, Write
from longrun.stores._replicated.copying import Copier
from longrun.stores._replicated.side import Side
from longrun.stores._replicated.term import mark, marks_of, mend, mended
from longrun.stores.base import Answer


class MovedError(Exception):
    """Another process changed the term while something was repaired under the old one."""


class Mirror:
    """Writes to a standby. One repair at a time."""

    def __init__(
        self,
        who: str,
        overtaken: Callable[[Side], bool],
        marks: Callable[[], bool],
        vouch_for: Callable[[Side], None],
        clock: Clock,
    ) -> None:
        """`who` names this process; `overtaken` says whether a side is not the active one any more, or another process
        has changed the term; `marks`, whether the standby may become active as it is, so that also a copy of something
        new must be marked: it is not whole for a moment, in which this process can die; `vouch_for` raises for a side
        that has forgotten the pair."""
        self._who, self._overtaken, self._marks, self._clock = who, overtaken, marks, clock
        self._vouch_for = vouch_for
        self._repairing = threading.RLock()
        self.copied = 0
        self.unreadable: set[str] = set()

    def _check(self, active: Side) -> None:
        if self._overtaken(active):
            raise MovedError

    def agree(self, source: Side, target: Side, ids: Sequence[str]) -> None:
        """Make the executions at `target` what they are at `source`. A process that writes to the target first and to
        the source second finds the mark (`ReplicatedBackend._disturbed`): its first write may have been replaced."""
        marks: dict[str, str] = {}

        def allowed(id: str, replaces: bool) -> None:
            self._check(source)
            for side in (source, target):  # nothing is lost because one of them was emptied
                self._vouch_for(side)
            if id not in marks and (replaces or self._marks()):
                marks[id] = mark(id, self._who)
                mend(target, [marks[id]], self._clock.now())

        with self._repairing:
            copier = Copier(source, target, allowed)
            try:
                left = list(dict.fromkeys(ids))
                while left:
                    copier.agree(left)
                    left = self._marked_again(target, marks)
            finally:
                self.copied += copier.copied
                self.unreadable |= copier.unreadable
            if marks:
                mended(target, marks.values(), self._clock.now())

    def _marked_again(self, target: Side, marks: Mapping[str, str]) -> list[str]:
        """Executions whose mark is gone: another process took this one for dead. A comparison counts only if its mark
        was there from before what was replaced until after it; so they are compared once more, under a new mark."""
        there = marks_of(target).keys if marks else frozenset()
        gone = [id for id, mark in marks.items() if mark not in there]
        mend(target, [marks[id] for id in gone], self._clock.now())
        return gone

    def adopt(self, source: Side, target: Side, id: str) -> None:
        """Give `target` what only `source` has."""
        with self._repairing:
            Copier(source, target, lambda *_: self._check(target)).adopt(id)

    def writes(self, target: Side, batch: Sequence[Write], answers: Sequence[Answer]) -> list[str]:
        there = target.write("commit", batch)
        return [write.id for write, a, b in zip(batch, answers, there, strict=True) if not alike(a, b)]

    def claim(self, target: Side, claim: Claim, given: Sequence[Loaded]) -> list[str]:
        """The same claim again, for what was given: the standby compares the fence in its own atomic act."""
        ids = tuple(one.definition.id for one in given)
        again = attrs.evolve(claim, ids=ids, workflows=None, queues=None, limit=len(ids))
        heads = {one.definition.id: one.head for one in target.write("claim", again)}
        return [one.definition.id for one in given if heads.get(one.definition.id) != one.head]

    def delete(self, target: Side, ids: Sequence[str], answers: Sequence[bool]) -> list[str]:
        there = target.write("delete", ids)
        return [id for id, a, b in zip(ids, answers, there, strict=True) if a != b]

    def owners(self, source: Side, target: Side) -> None:
        """Whoever is registered at the source, and nobody else, with what is left of the lease."""
        known: list[Owner] = source.read("owners")
        for owner in known:
            target.write("register_other", owner, max(owner.remaining, 0.0))
        for stranger in {owner.id for owner in target.read("owners")} - {owner.id for owner in known}:
            target.write("unregister", stranger)


def alike(a: Answer, b: Answer) -> bool:
    """Whether two sides said the same to a write."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        return type(a) is type(b)
    return a == b
