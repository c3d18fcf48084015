"""What the lines of a journal add up to, and what can be saved of them when some are damaged (I5).

Place in the life of an execution: claim, and every look at it. Lines in a journal, by their `kind`:

- `claim`: first in every generation but the one that `Create` made. Until a complete snapshot follows, the generation
  before still counts.
- `definition`, `steps`: what never changes. Both stand there twice: without them nothing else is of use.
- `state`, `blob`: a large or a kept payload, in a line of its own. Nothing until the next `save` refers to it.
- `save`: one `Save`, all of it. With `whole` it ends a snapshot: it stands for everything before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from longrun.errors import CorruptDataError
from longrun.moves import End, Move
from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Create, Definition, Head, Loaded, Message, Save, copied, named
from longrun.stores._file.forms import (
    boundary_form,
    boundary_from,
    definition_form,
    definition_from,
    ended_form,
    head_form,
    head_from,
    passing_form,
    with_steps,
)
from longrun.stores._file.lines import Identity, Line, pack, pack_save, pack_twice

INLINE_LIMIT = 8192
"""Payloads up to this many bytes, together, stand in the save's own line; the end of a file then shows the head."""
NO_WORKFLOW = ""
"""The name of a workflow that cannot be read."""
ABOUT = ("total", "version")
"""What a save that names the steps makes of the definition: every save behind it says so too."""
_OF_MOVES = frozenset({"kind", "head", "boundaries", "keep_from", "mail"})
CLEARED = (ExecutionState.COMPLETED, ExecutionState.CANCELLED)
"""Their entries and messages go; a failed execution keeps them for a retry."""


@attrs.define
class Mail:
    """Which messages were taken: all up to a number, and some behind it. Only a copy that nobody else has changes."""

    upto: int = 0
    more: set[int] = attrs.field(factory=set)

    def take(self, numbers: Iterable[int]) -> None:
        self.more.update(number for number in numbers if number > self.upto)
        while self.upto + 1 in self.more:
            self.upto += 1
            self.more.discard(self.upto)

    def take_all(self, last: int) -> None:
        self.upto = max(self.upto, last)
        self.more = {number for number in self.more if number > self.upto}
        self.take(())

    def copy(self) -> Mail:
        return Mail(self.upto, set(self.more))

    def waits(self, number: int) -> bool:
        return number > self.upto and number not in self.more

    @property
    def form(self) -> list[int]:
        return [self.upto, *sorted(self.more)]


NO_MAIL = Mail()
"""Nothing was taken: one for all, of whom most have no mail."""


def mail_from(fields: dict[str, Any]) -> Mail:
    numbers = fields.get("mail")
    return Mail(numbers[0], set(numbers[1:])) if numbers else NO_MAIL


@attrs.define
class Contents:
    """An execution, read from its journal."""

    id: str
    definition: Definition | None = None
    born: str = ""
    steps: tuple[str, ...] | None = None
    _head: Head | None = None
    _head_form: dict[str, Any] | None = None
    rows: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    """Every boundary in the journal, without its state."""
    states: dict[int, bytes] = attrs.field(factory=dict)
    """The kept states, by number."""
    blobs: dict[str, bytes] = attrs.field(factory=dict)
    entries: dict[str, bytes] = attrs.field(factory=dict)
    mail: Mail = NO_MAIL
    damage: list[str] = attrs.field(factory=list)
    told: list[str] = attrs.field(factory=list)
    """What the claim found damaged that this journal began with; forgotten with its owner's first save."""
    whole: bool = False
    """A complete snapshot was read: nothing from an earlier generation is needed."""
    claimed: bool = False
    shaken: bool = False
    """Something unreadable stood behind the last clearing of the entries."""
    staged_states: dict[int, bytes] = attrs.field(factory=dict)
    staged_blobs: dict[str, bytes] = attrs.field(factory=dict)
    staged_entries: dict[str, bytes] = attrs.field(factory=dict)
    lost: set[int] = attrs.field(factory=set)
    """Numbers whose state should be there and is not."""

    @property
    def head(self) -> Head | None:
        """Built when it is asked for: of all heads in a journal only the last one counts."""
        if self._head_form is not None:
            self._head, self._head_form = head_from(self._head_form), None
        return self._head

    @head.setter
    def head(self, head: Head) -> None:
        self._head, self._head_form = head, None

    # one line after another

    def apply(self, line: Line) -> None:
        fields, payloads = line.fields, line.payloads
        kind = fields["kind"]
        if kind == "save":
            self._save(fields, payloads)
        elif kind == "state":
            self.staged_states[fields["seq"]] = payloads[0]
        elif kind == "blob":
            self.staged_blobs[fields["name"]] = payloads[0]
        elif kind == "entry":
            self.staged_entries[fields["key"]] = payloads[0]
        elif kind == "definition":
            self.definition, self.born = definition_from(self.id, fields["definition"]), fields["born"]
        elif kind == "steps":
            self.steps = tuple(fields["steps"])
        elif kind == "claim":
            self.claimed = True
            if self.head is not None:
                self.head = claimed_head(self.head, fields["owner"])

    def _save(self, fields: dict[str, Any], payloads: list[bytes]) -> None:
        simple = fields.keys() <= _OF_MOVES
        if not simple and fields.get("whole"):
            self._start_over(fields)
        elif self.told:
            self.told = []
        head = self._head_form = fields["head"]
        for row in fields.get("boundaries", ()):
            self._add_row(row, payloads)
        if not simple:
            self._save_rest(fields, payloads)
        if "keep_from" in fields:
            self.strip(fields["keep_from"])
        self.mail = mail_from(fields) if "mail" in fields else NO_MAIL
        if self.entries and head["state"] in CLEARED:
            self.entries.clear()
        if self.staged_states or self.staged_blobs or self.staged_entries:
            self.staged_states, self.staged_blobs, self.staged_entries = {}, {}, {}

    def _save_rest(self, fields: dict[str, Any], payloads: list[bytes]) -> None:
        """What most saves, being moves, do not have."""
        for name, place in fields.get("blobs", {}).items():
            if place != -1:
                self.blobs[name] = payloads[place]
            elif name in self.staged_blobs:
                self.blobs[name] = self.staged_blobs[name]
            else:
                self.blobs.pop(name, None)
        if fields.get("clear"):
            self.entries.clear()
            self.shaken = False
        for key in fields.get("drop", ()):
            self.entries.pop(key, None)
        for key, place in fields.get("put", {}).items():
            self._put(key, self.staged_entries.get(key) if place == -1 else payloads[place])
        for name in fields.get("drop_blobs", ()):
            self.blobs.pop(name, None)
        if "steps" in fields:
            self._name_steps(tuple(fields["steps"]), fields.get("version", "1"))

    def _name_steps(self, steps: tuple[str, ...], version: str) -> None:
        self.steps = steps
        if self.definition is not None:
            self.definition = with_steps(named(self.definition, steps, version), ())

    def _start_over(self, fields: dict[str, Any]) -> None:
        self.whole, self.shaken = True, False
        self.rows, self.states, self.blobs, self.entries, self.lost = {}, {}, {}, {}, set()
        self.told = list(fields.get("damage", ()))

    def _add_row(self, row: dict[str, Any], payloads: list[bytes]) -> None:
        seq = row["seq"]
        self.rows[seq] = row
        place = row.get("state")
        if place is None:
            return
        data = self.staged_states.get(seq) if place == -1 else payloads[place]
        if data is None:
            self.lost.add(seq)
        else:
            self.states[seq] = data

    def _put(self, key: str, data: bytes | None) -> None:
        if data is None:
            self.shaken = True
            self.damage.append(f"the entry {key!r} is not readable")
        else:
            self.entries[key] = data

    def strip(self, keep_from: int) -> None:
        for seq in [seq for seq in self.states if seq < keep_from]:
            del self.states[seq]
        if self.lost:
            self.lost = {seq for seq in self.lost if seq >= keep_from}

    # what came out

    def readable(self, seq: int) -> bool:
        return seq in self.states and all(name in self.blobs for name in self.rows[seq].get("blobs", ()))

    def newest(self) -> int | None:
        return next((seq for seq in sorted(self.states, reverse=True) if self.readable(seq)), None)

    @property
    def complete(self) -> bool:
        """Whether nothing from an earlier generation is needed."""
        known = self.definition is not None and self.steps is not None
        return known and self.whole and self.newest() is not None

    def found(self) -> tuple[Head, Definition]:
        """Head and definition, without the steps; `CorruptDataError` if they cannot be read."""
        head = self.head
        if self.definition is None or head is None or self.steps is None:
            raise CorruptDataError(f"execution {self.id!r}", "; ".join([self._missing(), *self.damage]))
        return head, self.definition

    def _missing(self) -> str:
        parts = {"definition": self.definition, "list of steps": self.steps, "position": self.head}
        missing = [name for name, part in parts.items() if part is None]
        if len(missing) < len(parts):
            return f"its {' and its '.join(missing)} cannot be read"
        return "nothing of it is readable" if self.damage else "its journal holds no whole line"

    def settle(self) -> None:
        """Move the head back to the newest readable boundary, where damage makes that necessary."""
        head, _ = self.found()
        newest = self.newest()
        if newest is None:
            raise CorruptDataError(f"execution {self.id!r}", "; ".join(["no state of it is readable", *self.damage]))
        wanted = max([*self.states, *self.lost])
        if wanted != newest:
            self.damage.append(f"the state of checkpoint {wanted} is not readable")
        if not self.damage:
            return
        if wanted != newest or head.seq not in self.rows:
            self._move_back(head, self.rows[newest])
            self.damage.append(f"it goes on from checkpoint {newest}")
        elif self.shaken:
            self.entries.clear()

    def _move_back(self, head: Head, row: dict[str, Any]) -> None:
        visit, iteration = row.get("visit", 1), row.get("iteration", 0)
        if self.shaken or visit != head.visit:
            self.entries.clear()
        self.head = attrs.evolve(head, step=row["next"], visit=visit, iteration=iteration, attempt=0, started=None)

    def boundary(self, seq: int) -> Boundary:
        return boundary_from(self.rows[seq], self.states[seq])

    def loaded(self, messages: Iterable[Message]) -> Loaded:
        """Everything, once it is settled."""
        head, definition = self.found()
        boundary = self.boundary(self.newest() or 0)
        waiting = tuple([message for message in messages if self.mail.waits(message.id)])
        return Loaded(
            definition=with_steps(definition, self.steps or ()),
            head=woken_head(head, bool(waiting)),
            boundary=boundary,
            blobs={name: self.blobs[name] for name in boundary.blobs},
            entries=dict(self.entries),
            messages=waiting,
            kept=tuple([(seq, tuple(self.rows[seq].get("blobs", ()))) for seq in sorted(self.states)]),
            damage=(*self.told, *self.damage),
        )

    def old_rows(self) -> list[dict[str, Any]]:
        """The rows before the oldest kept state, oldest first."""
        oldest = self._oldest()
        return [self.rows[seq] for seq in sorted(self.rows) if seq < oldest]

    def drop_old_rows(self) -> None:
        oldest = self._oldest()
        self.rows = {seq: row for seq, row in self.rows.items() if seq >= oldest}

    def _oldest(self) -> int:
        return min([*self.states, *self.lost], default=0)


def remains(contents: Contents, reason: str, moment: float) -> tuple[Definition, Head]:
    """What a listing shows of an execution that cannot be gone on with. An end that it had reached stays one (I8)."""
    definition = contents.definition or Definition(id=contents.id, workflow=NO_WORKFLOW, created=moment)
    head = contents.head or Head(state=ExecutionState.BLOCKED, updated=moment)
    if head.state.finished:
        return definition, attrs.evolve(head, reason=reason)
    return definition, blocked_head(head, reason)


def blocked_head(head: Head, reason: str) -> Head:
    return attrs.evolve(
        head, state=ExecutionState.BLOCKED, owner=None, due=None, signal=None, woken=False, reason=reason
    )


def claimed_head(head: Head, owner: str) -> Head:
    unclean = head.state in (ExecutionState.RUNNING, ExecutionState.RESUMING) and head.owner not in (None, owner)
    new = copied(head)
    new.fence, new.owner, new.woken, new.crashes = head.fence + 1, owner, False, head.crashes + unclean
    return new


def woken_head(head: Head, mail: bool) -> Head:
    """A message for what nobody owns wakes it: that follows from the files, and is written nowhere."""
    if mail and head.owner is None and not head.woken and not head.state.finished:
        return attrs.evolve(head, woken=True)
    return head


# lines to write


def claim_line(identity: Identity, owner: str, now: float) -> bytes:
    return pack(identity, 1, {"kind": "claim", "owner": owner, "at": now})


def first_lines(identity: Identity, definition: Definition, born: str, n: int = 1) -> list[bytes]:
    """Definition and steps, and a copy of both, so that one damaged line does not cost the execution (I5)."""
    about: dict[str, Any] = {"kind": "definition", "born": born, "definition": definition_form(definition)}
    steps: dict[str, Any] = {"kind": "steps", "steps": definition.steps}
    return pack_twice(identity, n, about, steps)


class _Payloads:
    """Where payloads go: into the save's own line while there is room, else into a line of their own before it."""

    __slots__ = ("before", "identity", "inline", "n", "room")

    def __init__(self, identity: Identity, n: int) -> None:
        self.identity, self.n, self.room = identity, n, INLINE_LIMIT
        self.before: list[bytes] = []
        self.inline: list[bytes] = []

    def add(self, data: bytes, kind: str, name: str, value: str | int) -> int:
        """The place in the line, or -1 for a line of its own of that kind, with a field that says what it is."""
        size = len(data)
        if size > self.room:
            fields = {"kind": kind, name: value}
            self.before.append(pack(self.identity, self.n + len(self.before), fields, [data]))
            return -1
        self.room -= size
        self.inline.append(data)
        return len(self.inline) - 1

    def lines(self, fields: dict[str, Any]) -> list[bytes]:
        self.before.append(pack(self.identity, self.n + len(self.before), fields, self.inline))
        return self.before


def save_lines(
    identity: Identity, n: int, save: Save, mail: Mail, *, whole: bool = False, about: Mapping[str, Any] = EMPTY
) -> list[bytes]:
    """The lines of one save, numbered from `n`: usually one, with large payloads in lines before it. `about` is what
    the journal's first line does not know of the definition."""
    fields: dict[str, Any] = {"kind": "save", "head": head_form(save.head)}
    payloads = _Payloads(identity, n)
    if whole:
        fields["whole"] = True
    if about:
        fields.update(about)
    if save.boundaries:
        rows = fields["boundaries"] = []
        for boundary in save.boundaries:
            row = boundary_form(boundary)
            if boundary.data is not None:
                row["state"] = payloads.add(boundary.data, "state", "seq", boundary.seq)
            rows.append(row)
    if save.blobs:
        fields["blobs"] = {name: payloads.add(data, "blob", "name", name) for name, data in save.blobs.items()}
    if save.put:
        fields["put"] = {key: payloads.add(data, "entry", "key", key) for key, data in save.put.items()}
    _add_rest(save, mail, fields)
    return payloads.lines(fields)


def move_line(identity: Identity, n: int, move: Move, mail: Mail, about: Mapping[str, Any]) -> bytes:
    """What `save_lines` makes of a move, or of an end, whose state is small."""
    head, started, data = move.head, move.started, move.data
    over, seq, step, ended, size = type(move) is End, head.seq, head.step, head.updated, len(data)
    if started is None or not size or not head.fence or (head.owner is None and not over):
        form, row = head_form(head), boundary_form(move.boundary)  # as if it were any save
    else:
        form = ended_form(head) if over else passing_form(head)
        row = {
            "seq": seq,
            "kind": "finish" if over else "step",
            "step": step - 1,
            "name": move.name,
            "started": started,
            "ended": ended,
            "attempts": 1,
            "next": step,
            "visit": head.visit,
            "size": size,
        }
    return _one_line(identity, n, form, row, data, mail, about, move.keep_from)


def birth_line(identity: Identity, n: int, create: Create) -> bytes | None:
    """What `save_lines` makes of an execution at its beginning; None if that takes more than one line."""
    data = create.boundary.data
    if create.blobs or data is None or len(data) > INLINE_LIMIT:
        return None
    return _one_line(
        identity, n, head_form(create.head), boundary_form(create.boundary), data, NO_MAIL, {"whole": True}
    )


def _one_line(
    identity: Identity,
    n: int,
    head: dict[str, Any],
    row: dict[str, Any],
    data: bytes,
    mail: Mail,
    about: Mapping[str, Any],
    keep_from: int | None = None,
) -> bytes:
    row["state"] = 0
    fields = {"kind": "save", "head": head, **about, "boundaries": (row,)}
    if keep_from is not None:
        fields["keep_from"] = keep_from
    if mail.upto or mail.more:
        fields["mail"] = mail.form
    return pack_save(identity, n, fields, data)


def _add_rest(save: Save, mail: Mail, fields: dict[str, Any]) -> None:
    if save.clear:
        fields["clear"] = True
    if save.drop:
        fields["drop"] = save.drop
    if save.keep_from is not None:
        fields["keep_from"] = save.keep_from
    if save.drop_blobs:
        fields["drop_blobs"] = save.drop_blobs
    if save.steps is not None:
        fields["steps"] = save.steps
    if mail.upto or mail.more:
        fields["mail"] = mail.form


def snapshot_lines(identity: Identity, contents: Contents, n: int) -> list[bytes]:
    """Everything of an execution, in few lines; large states and blobs have one of their own each."""
    head, definition = contents.found()
    found = first_lines(identity, with_steps(definition, contents.steps or ()), contents.born, n)
    payloads = _Payloads(identity, n + len(found))
    fields: dict[str, Any] = {"kind": "save", "whole": True, "head": head_form(head)}
    rows: list[dict[str, Any]] = []
    for seq in sorted(contents.rows):
        row = {**contents.rows[seq]}
        row.pop("state", None)
        if seq in contents.states:
            row["state"] = payloads.add(contents.states[seq], "state", "seq", seq)
        rows.append(row)
    fields["boundaries"] = rows
    fields["blobs"] = {name: payloads.add(data, "blob", "name", name) for name, data in contents.blobs.items()}
    fields["put"] = {key: payloads.add(data, "entry", "key", key) for key, data in contents.entries.items()}
    if contents.mail.upto or contents.mail.more:
        fields["mail"] = contents.mail.form
    if contents.told or contents.damage:
        fields["damage"] = [*contents.told, *contents.damage]
    return found + payloads.lines(fields)
