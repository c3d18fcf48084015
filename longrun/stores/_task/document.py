"""One execution as one document: what the writes do to it, how it becomes a record, and what is saved of a damaged one.

Place in the life of an execution: checkpoint, claim. Pure: no I/O. The rules are those of `stores/memory.py`.

Boundaries stay for the execution's life, so the oldest rows without a state move into pages, records of their own that
never change again. A document therefore stays small, however many steps there were. A page is written before the
document that no longer has its rows; both having them for a moment is harmless.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable, Mapping
from zlib import crc32

import attrs
from attrs import define, field

from longrun.errors import (
    CorruptDataError,
    LeaseLostError,
    LongrunError,
    SignalQueueFullError,
    WriteOrderError,
)
from longrun.records import ExecutionState
from longrun.stored import Boundary, Claim, Create, Definition, Head, Loaded, Message, Save, Send, named
from longrun.stores._task import lines
from longrun.stores._task.records import KIND
from longrun.stores.base import KEYS_REMEMBERED, Answer

ROWS_INSIDE = 96
"""With more rows than this, a document gives some away."""
ROWS_A_PAGE = 64

_LAST = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})
_STATE_AFTER = {
    "finish": ExecutionState.COMPLETED,
    "fail": ExecutionState.FAILED,
    "cancel": ExecutionState.CANCELLED,
    "pause": ExecutionState.PAUSED,
    "block": ExecutionState.BLOCKED,
}


@define
class Page:
    """Rows that left the document, as lines; `first` and `last` are their numbers."""

    id: str
    first: int
    last: int
    lines: list[bytes]


@define
class Document:
    """Every part is kept beside its line, so that only what changed is encoded again."""

    id: str
    definition: Definition
    head: Head
    serial: str
    """Tells this execution from another one that had its id before."""
    fixed: list[bytes]
    """The line of the definition and the line of its steps."""
    pages: list[tuple[int, int]] = field(factory=list)
    boundaries: dict[int, tuple[Boundary, bytes]] = field(factory=dict)
    blobs: dict[str, tuple[bytes, bytes]] = field(factory=dict)
    entries: dict[str, tuple[bytes, bytes]] = field(factory=dict)
    messages: dict[int, tuple[Message, bytes]] = field(factory=dict)
    keys: dict[str, int] = field(factory=dict)
    keys_line: bytes = b""
    last_message: int = 0
    damage: tuple[str, ...] = ()
    found_damaged: bool = False
    """What was decoded was not whole; its bytes belong into quarantine."""

    @classmethod
    def create(cls, create: Create) -> Document:
        new = cls(create.id, create.definition, create.head, secrets.token_hex(8), _fixed(create.definition))
        new._add_boundaries((create.boundary,))
        new._put(new.blobs, "blob", create.blobs)
        return new

    def copy(self) -> Document:
        """To change without changing this one."""
        new = copy.copy(self)
        new.pages, new.boundaries, new.blobs = list(self.pages), dict(self.boundaries), dict(self.blobs)
        new.entries, new.messages, new.keys = dict(self.entries), dict(self.messages), dict(self.keys)
        return new

    # writes

    def save(self, save: Save) -> tuple[Answer, bool]:
        """The answer, and whether anything changed."""
        refusal = self._refusal(save)
        if refusal is not None or self.head.revision >= save.head.revision:
            return refusal, False
        self.head = save.head
        self.damage = ()
        self._add_boundaries(save.boundaries)
        self._put(self.blobs, "blob", save.blobs)
        if save.clear:
            self.entries.clear()
        for key in save.drop:
            self.entries.pop(key, None)
        self._put(self.entries, "entry", save.put)
        for number in save.take:
            self.messages.pop(number, None)
        if save.keep_from is not None:
            self._strip(save.keep_from)
        for name in save.drop_blobs:
            self.blobs.pop(name, None)
        if save.steps is not None:
            self.definition = named(self.definition, save.steps, save.version)
            self.fixed = _fixed(self.definition)
        if save.head.state in _LAST:
            self.entries.clear()
            self.messages.clear()
        elif save.head.owner is None and self.messages and not save.head.state.finished:
            self.head = attrs.evolve(save.head, woken=True)
        return None, True

    def _refusal(self, save: Save) -> LongrunError | None:
        if self.head.fence != save.head.fence:
            return LeaseLostError(save.id, save.head.fence)
        if self.head.revision < save.head.revision - 1:
            return WriteOrderError(KIND, save.id, self.head.revision, save.head.revision)
        return None

    def send(self, send: Send) -> tuple[Answer, bool]:
        """The answer, and whether anything changed."""
        key = send.message.key
        if key is not None and key in self.keys:
            return self.keys[key], False
        if len(self.messages) >= send.limit:
            return SignalQueueFullError(send.id, send.limit), False
        number = self.last_message + 1
        message = attrs.evolve(send.message, id=number)
        self.messages[number] = (message, lines.line(self.id, "message", lines.message_out(message)))
        self.last_message = number
        if key is not None:
            self._remember(key, number)
        if self.head.owner is None and not self.head.state.finished:
            self.head = attrs.evolve(self.head, woken=True)
        return number, True

    def _remember(self, key: str, number: int) -> None:
        self.keys[key] = number
        while len(self.keys) > KEYS_REMEMBERED + len(self.messages):
            del self.keys[next(iter(self.keys))]
        self.keys_line = lines.line(self.id, "keys", self.keys)

    def give(self, claim: Claim) -> None:
        """To a new owner."""
        head = self.head
        crashed = head.owner not in (None, claim.owner) and head.state in (
            ExecutionState.RUNNING,
            ExecutionState.RESUMING,
        )
        self.head = attrs.evolve(
            head, fence=head.fence + 1, owner=claim.owner, woken=False, crashes=head.crashes + crashed
        )

    def _add_boundaries(self, boundaries: Iterable[Boundary]) -> None:
        for boundary in boundaries:
            text = lines.line(self.id, "boundary", lines.boundary_out(boundary))
            self.boundaries[boundary.seq] = (boundary, text)

    def _put(self, parts: dict[str, tuple[bytes, bytes]], kind: str, values: Mapping[str, bytes]) -> None:
        for name, data in values.items():
            parts[name] = (data, lines.line(self.id, kind, {"name": name, "data": lines.text_of(data)}))

    def _strip(self, keep_from: int) -> None:
        old = [b for b, _ in self.boundaries.values() if b.seq < keep_from and b.data is not None]
        self._add_boundaries(attrs.evolve(boundary, data=None, blobs=()) for boundary in old)

    def turn_page(self, stored: Document | None) -> Page | None:
        """Take a page of the oldest rows out, if there are too many. Only rows that `stored` has too: those are facts,
        so that a page says the same whoever writes it."""
        if stored is None or len(self.boundaries) <= ROWS_INSIDE:
            return None
        seqs = sorted(self.boundaries)[:ROWS_A_PAGE]
        if any(self.boundaries[seq][0].data is not None or seq not in stored.boundaries for seq in seqs):
            return None
        page = Page(page_id(self.serial, seqs[0]), seqs[0], seqs[-1], [self.boundaries.pop(seq)[1] for seq in seqs])
        self.pages.append((page.first, page.last))
        return page

    # out

    def encode(self) -> bytes:
        head = lines.head_text(self.head)
        definition, steps = self.fixed
        parts = [
            definition,
            lines.text_line(self.id, "head", head),
            lines.line(self.id, "mail", {"waiting": len(self.messages), "last": self.last_message}),
            steps,
            self.history_line(),
        ]
        for kept in (self.boundaries, self.blobs, self.entries, self.messages):
            parts += [text for _, text in kept.values()]
        if self.keys:
            parts.append(self.keys_line)
        if self.damage:
            parts.append(lines.line(self.id, "damage", self.damage))
        parts.append(lines.text_line(self.id, "end", f'{{"parts":{len(parts) + 1},"head":{head}}}'))
        return lines.document(self.id, parts)

    def history_line(self) -> bytes:
        return lines.line(self.id, "history", {"serial": self.serial, "pages": self.pages})

    def loaded(self) -> Loaded:
        states = [boundary for boundary, _ in self.boundaries.values() if self._readable(boundary)]
        if not states:
            raise CorruptDataError(f"task {self.id!r}", "no checkpoint in it can be read")
        newest = states[-1]
        return Loaded(
            definition=self.definition,
            head=self.head,
            boundary=newest,
            blobs=self.blobs_of(newest),
            entries={key: data for key, (data, _) in self.entries.items()},
            messages=tuple([message for message, _ in self.messages.values()]),
            kept=tuple([(b.seq, b.blobs) for b in states]),
            damage=self.damage,
        )

    def _readable(self, boundary: Boundary) -> bool:
        return boundary.data is not None and all(name in self.blobs for name in boundary.blobs)

    def is_lost(self, seq: int) -> bool:
        """Whether boundary `seq` is missing, or has a state that cannot be read."""
        if seq not in self.boundaries:
            return True
        boundary = self.boundaries[seq][0]
        return boundary.data is not None and not self._readable(boundary)

    def blobs_of(self, boundary: Boundary) -> dict[str, bytes]:
        return {name: self.blobs[name][0] for name in boundary.blobs}

    def checkpoint(self, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        if seq not in self.boundaries:
            first = self.pages[-1][1] + 1 if self.pages else 1
            if self.found_damaged and first <= seq <= self.head.seq:
                raise CorruptDataError(f"checkpoint {seq} of task {self.id!r}", "its checksum is wrong")
            return None
        boundary = self.boundaries[seq][0]
        if boundary.data is None:
            return None
        if not self._readable(boundary):
            raise CorruptDataError(f"checkpoint {seq} of task {self.id!r}", "a part of its state cannot be read")
        return boundary, self.blobs_of(boundary)


def page_id(serial: str, first: int) -> str:
    return f"~history~{serial}~{first}"


def quarantine_id(id: str, data: bytes) -> str:
    return f"~damaged~{crc32(data):08x}~{id}"


def _fixed(definition: Definition) -> list[bytes]:
    return [
        lines.line(definition.id, "definition", lines.definition_out(definition)),
        lines.line(definition.id, "steps", definition.steps),
    ]


# in


def decode(id: str, data: bytes, metadata: Mapping[str, str]) -> Document:
    """The document; of a damaged one what can be saved. `metadata` helps where both copies of the head are lost."""
    parts, damaged, whole = lines.read_document(id, data)
    try:
        found = _assemble(id, parts, metadata)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptDataError(f"task {id!r}", f"nothing in it can be used ({type(error).__name__})") from error
    if damaged or not whole:
        _mend(found, damaged, quarantine_id(id, data))
    return found


def _assemble(id: str, parts: list[lines.Part], metadata: Mapping[str, str]) -> Document:
    single = {kind: value for kind, value, _ in parts}
    texts = {kind: text for kind, _, text in parts}
    definition = lines.definition_in(id, single["definition"], single["steps"])
    boundaries = [(lines.boundary_in(value), text) for kind, value, text in parts if kind == "boundary"]
    head = single.get("head") or single.get("end", {}).get("head")
    history = single.get("history", {"serial": secrets.token_hex(8), "pages": []})
    found = Document(
        id,
        definition,
        lines.head_in(head) if head else _head_after(boundaries[-1][0], metadata),
        history["serial"],
        [texts["definition"], texts["steps"]],
        pages=[(first, last) for first, last in history["pages"]],
        boundaries={boundary.seq: (boundary, text) for boundary, text in boundaries},
        keys=single.get("keys", {}),
        keys_line=texts.get("keys", b""),
        damage=tuple(single.get("damage", ())),
    )
    for kind, value, text in parts:
        if kind in ("blob", "entry"):
            kept = found.blobs if kind == "blob" else found.entries
            kept[value["name"]] = (lines.bytes_of(value["data"]) or b"", text)
        elif kind == "message":
            found.messages[value["id"]] = (lines.message_in(value), text)
    found.last_message = max(single.get("mail", {}).get("last", 0), *found.messages, *found.keys.values(), 0)
    return found


def _head_after(boundary: Boundary, metadata: Mapping[str, str]) -> Head:
    """Both copies of the head are lost. What the boundary does not tell, the record's metadata may."""
    return Head(
        state=_STATE_AFTER.get(boundary.kind, ExecutionState.RUNNING),
        hold=boundary.kind == "pause",
        fence=int(metadata.get("fence", "0")),
        revision=int(metadata.get("saves", "0")),
        owner=metadata.get("owner"),
        seq=boundary.seq,
        step=boundary.next,
        visit=boundary.visit,
        iteration=boundary.iteration,
        updated=boundary.ended,
        ended=boundary.ended if boundary.kind in ("finish", "fail", "cancel") else None,
    )


def _mend(found: Document, damaged: int, quarantine: str) -> None:
    """Move the head back to the newest readable boundary, if a newer one is lost; say what happened."""
    found.found_damaged = True
    what = f"{damaged} damaged parts of the stored task" if damaged else "the end of the stored task is missing"
    found.damage += (f"{what}; its bytes are kept as {quarantine}",)
    readable = found.loaded().boundary
    first = found.pages[-1][1] + 1 if found.pages else 1
    lost = [seq for seq in range(max(first, readable.seq + 1), found.head.seq + 1) if found.is_lost(seq)]
    if not lost:
        return
    head = found.head
    found.head = attrs.evolve(head, step=readable.next, visit=readable.visit, iteration=readable.iteration, attempt=0)
    if readable.visit != head.visit:
        found.entries.clear()
    found.damage += (f"checkpoint {lost[-1]} cannot be read; taken back to checkpoint {readable.seq}",)
