"""A term: which of the two stores is active, whether the other one is level with it, and the number that orders terms.

Place in the life of an execution: between a store that died and the one that goes on. The newest term is kept in both
stores, in a record that looks like an execution and is never shown as one; a side whose record is older than the newest
term missed something, and is not used before it was brought up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import frozen

from longrun.errors import CorruptDataError, NewerFormatError, StoreSettingsError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import REPLICA_RECORD, REPLICA_WORKFLOW, Boundary, Create, Definition, Head, Loaded, Save
from longrun.stores._replicated.side import LostError, Side

FORMAT = 1
TERM_ID = REPLICA_RECORD
GONE_ID = "longrun.replica.gone"
MENDED_ID = "longrun.replica.mended"
RESERVED = frozenset({TERM_ID, GONE_ID, MENDED_ID})

LEVEL = "level"
"""The standby has everything that was acknowledged."""
JOINING = "joining"
"""It is written to, and is being brought up to date; it must not become active."""
BEHIND = "behind"
"""It is not written to."""

TRIES = 20


@frozen(kw_only=True)
class Term:
    """`generation` grows by one with every change; what is below the newest one is refused. 0: the primary was chosen
    for a pair that is not made yet."""

    generation: int
    pair: str
    """The name of the two stores together: a store that keeps another one is refused. It changes with a store that is
    replaced."""
    active: str
    standby: str
    by: str
    """Who proposed it, so that an answer that was lost can be read back."""
    tail: bool = False
    """The standby was active before, in asynchronous mode: it may have what this side never got."""

    def to_text(self) -> str:
        return json.dumps({"format": FORMAT, **attrs.asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Term:
        try:
            fields = json.loads(text)
            if fields.pop("format") > FORMAT:
                raise NewerFormatError("the record of a replicated store", "newer", FORMAT)
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError("the record of a replicated store", "it cannot be read") from error


def read_term(side: Side) -> Term | None:
    """What the side has stored."""
    loaded = _read_record(side)
    return None if loaded is None else _term_of(side, loaded)


def _read_record(side: Side) -> Loaded | None:
    loaded: Loaded | None = side.read_whole("load", TERM_ID)
    return loaded


def _term_of(side: Side, loaded: Loaded) -> Term:
    """The record names the part that the store has in the pair: two processes that gave the two in different order
    would each write to the one that the other reads."""
    part = loaded.head.note
    if part is not None and part != side.name:
        raise StoreSettingsError(
            "replicated",
            f"the store given as {side.name} is the {part} of its pair: give the two in the order in which they were"
            " paired, and not one store twice",
        )
    return Term.from_text(loaded.head.reason or "")


def write_term(side: Side, term: Term, now: float, *, first: bool = False) -> Term:
    """Store it unless the side knows that one or a newer one; the one that is stored now. Only what becomes part of a
    pair is given its `first`: a store without one has lost it, and everything else with it."""
    for _ in range(TRIES):
        loaded = _read_record(side)
        if loaded is None and not first:
            raise LostError(side, StoreUnavailableError("replicated", f"the {side.name} knows nothing of this pair"))
        if loaded is not None:
            stored = _term_of(side, loaded)
            if stored.generation >= term.generation:
                return stored
        _replace(side, loaded, term, now)
    raise StoreUnavailableError(side.backend.kind, "others change the record of the pair again and again")


def sign_of_life(side: Side, now: float) -> None:
    """Show that whoever proposed the term that the side has is still at work under it."""
    loaded = _read_record(side)
    if loaded is not None:
        _replace(side, loaded, _term_of(side, loaded), now)


def _replace(side: Side, loaded: Loaded | None, term: Term, now: float) -> None:
    """Store it in the place of what was read, and of nothing else: what another process has stored since stays."""
    if loaded is None:
        side.write("commit", [_reserved(TERM_ID, now, term.to_text(), side.name)])
    else:
        _change(side, loaded, now, reason=term.to_text(), note=side.name)


def last_sign(side: Side) -> float:
    """When that was shown last, or when the term was stored."""
    loaded: Loaded | None = side.read("load", TERM_ID)
    return 0.0 if loaded is None else loaded.head.updated


def tombstones(side: Side) -> frozenset[str]:
    """Ids of what was deleted here while the other side could not be told."""
    return _noted(side, GONE_ID)


def bury(side: Side, ids: Iterable[str], now: float) -> None:
    """Note what is about to be deleted."""
    _note(side, GONE_ID, ids, now)


def forget(side: Side, ids: Iterable[str], now: float) -> None:
    """The other side knows of these deletions."""
    _strike(side, GONE_ID, ids, now)


@frozen(kw_only=True)
class Marks:
    """What is being replaced on a side, by whom. Every repairer sets marks of its own, and another process removes one
    only after it has made the execution equal itself."""

    number: int = -1
    """Grows with every mark that is set or removed."""
    keys: frozenset[str] = frozenset()

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(key.partition("/")[0] for key in self.keys)


def mark(id: str, who: str) -> str:
    return f"{id}/{who}"  # no id has a slash


def marks_of(side: Side) -> Marks:
    loaded: Loaded | None = side.read_whole("load", MENDED_ID)
    return Marks() if loaded is None else Marks(number=loaded.head.revision, keys=frozenset(loaded.entries))


def being_mended(side: Side) -> frozenset[str]:
    """Ids whose copies here are being replaced, or were when a process died: they may be missing, or half there."""
    return marks_of(side).ids


def mend(side: Side, marks: Iterable[str], now: float) -> None:
    """Note that copies are about to be replaced."""
    _note(side, MENDED_ID, marks, now)


def mended(side: Side, marks: Iterable[str], now: float) -> None:
    """These copies are whole."""
    _strike(side, MENDED_ID, marks, now)


def _noted(side: Side, record: str) -> frozenset[str]:
    loaded: Loaded | None = side.read_whole("load", record)
    return frozenset() if loaded is None else frozenset(loaded.entries)


def _note(side: Side, record: str, ids: Iterable[str], now: float) -> None:
    missing = set(ids)
    for _ in range(TRIES):
        missing -= _noted(side, record)
        if not missing:
            return
        _put(side, record, now, put=dict.fromkeys(sorted(missing), b"1"))
    raise StoreUnavailableError(
        side.backend.kind, "others change the records of the pair at the same time, again and again"
    )


def _strike(side: Side, record: str, ids: Iterable[str], now: float) -> None:
    """What others keep from being removed is removed by whoever looks next."""
    wanted = frozenset(ids)
    for _ in range(TRIES):
        known = _noted(side, record) & wanted
        if not known:
            return
        _put(side, record, now, drop=tuple(sorted(known)))


def _put(
    side: Side, id: str, now: float, *, put: Mapping[str, bytes] | None = None, drop: tuple[str, ...] = ()
) -> None:
    """One write to a reserved record. Two at once: one of them is not stored, so whoever calls reads it back."""
    loaded: Loaded | None = side.read("load", id)
    if loaded is None:
        side.write("commit", [_reserved(id, now, None, None)])
        loaded = side.read("load", id)
    if loaded is not None:
        _change(side, loaded, now, put=put or {}, drop=drop)


def _change(
    side: Side, loaded: Loaded, now: float, *, reason: str | None = None, note: str | None = None, **changes: Any
) -> None:
    """A write that comes to nothing if another process has changed the record since it was read."""
    head = attrs.evolve(loaded.head, revision=loaded.head.revision + 1, updated=now, reason=reason, note=note)
    side.write("commit", [Save(id=loaded.definition.id, head=head, **changes)])


def _reserved(id: str, now: float, reason: str | None, note: str | None) -> Create:
    """Paused and held: no claim, no start-up pass and no retention ever takes it."""
    return Create(
        definition=Definition(id=id, workflow=REPLICA_WORKFLOW, created=0.0),
        head=Head(state=ExecutionState.PAUSED, hold=True, seq=1, updated=now, reason=reason, note=note),
        boundary=Boundary(seq=1, kind="start", step=0, next=0, ended=now, data=b"null", size=4),
    )
