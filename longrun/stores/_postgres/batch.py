"""A batch of writes as few statements: one for all saves, one for all creations, a handful for all messages.

Place in the life of an execution: start, checkpoint, finish. The server compares fence and revision and writes in one
statement, so nothing is read before. Writes that concern one execution are put into waves, which follow each other
inside one transaction.

Repeating a batch whose outcome is unknown is safe (I9): a save is compared by its revision, and each creation and each
message has a random token, under which the first attempt is found again.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longrun.errors import ExecutionNotFoundError, LeaseLostError, WriteOrderError
from longrun.moves import End, Move
from longrun.stored import Create, Definition, Save, Send, Write, searched_texts
from longrun.stores import rows
from longrun.stores._postgres import moves
from longrun.stores._postgres.arrays import Ints, Texts
from longrun.stores._postgres.links import Connection
from longrun.stores._postgres.parts import ENDED, Parts
from longrun.stores._postgres.queries import KIND, Queries
from longrun.stores._postgres.sending import send, send_alone
from longrun.stores.base import Answer

TRIES = 3
STATEMENT_BYTES = 32 << 20
"""A statement takes no more data than about this; a batch with more becomes several, in one transaction."""

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Batch:
    """One call of `commit`: its writes, and the tokens that let a repetition find what the first attempt did."""

    def __init__(self, writes: Sequence[Write], queries: Queries) -> None:
        self.writes = writes
        self.queries = queries
        self.answers: list[Answer] = [None] * len(writes)
        self._moves_only = set(map(type, writes)) == {Move}
        first = secrets.randbits(62)
        others = () if self._moves_only else enumerate(writes, first)
        self._tokens = {token - first: token for token, write in others if not isinstance(write, Save)}
        self._plain: dict[int, list[moves.Row]] = {}
        """Place of the first in a group of plain moves → their rows."""

    def apply(self, connection: Connection) -> list[Answer]:
        """Do all of it on this connection, durably; to be called again after a lost connection."""
        if not self.writes:
            return []
        if self._moves_only:
            plain = moves.narrow_rows(self.writes, STATEMENT_BYTES)
            if plain is not None:
                self._save(connection, self._move(connection, range(len(self.writes)), plain))
                return list(self.answers)
        groups = self._groups()
        if len(groups) == 1:
            groups = self._apply_alone(connection, groups[0])
        if groups:
            with connection.transaction():
                for group in groups:
                    self._apply(connection, group)
        return list(self.answers)

    def _apply_alone(self, connection: Connection, group: list[int]) -> list[list[int]]:
        """Do what a single statement can do, in the server's own transaction around it; what is left is answered."""
        first = self.writes[group[0]]
        if group[0] in self._plain:
            left = self._move(connection, group, self._plain.pop(group[0]))
            if type(first) is End:
                return [left] if left else []
            self._save(connection, left)
            return []
        if isinstance(first, Create):
            self._create(connection, group)
            return []
        if isinstance(first, Send):
            return [] if len(group) == 1 and self._send_alone(connection, group[0], first) else [group]
        saves = [write for n in group if isinstance(write := self.writes[n], Save)]
        if not any(_lets_go(save) for save in saves):
            self._save(connection, group)
            return []
        applied = set(self._write_saves(connection, saves, alone=True))
        left = []
        for place in group:
            if self.writes[place].id in applied:
                self.answers[place] = None
            else:
                left.append(place)
        return [left] if left else []

    def _groups(self) -> list[list[int]]:
        """Places of writes of one kind, each group one statement; what concerns one execution keeps its order."""
        waves: list[dict[type, list[int]]] = []
        last: dict[str, tuple[int, type]] = {}
        for place, write in enumerate(self.writes):
            id, kind = write.id, type(write)
            before = last.get(id)
            number = 0
            if before is not None:
                number = before[0] if before[1] is kind is Send else before[0] + 1
            last[id] = (number, kind)
            if number == len(waves):
                waves.append({})
            waves[number].setdefault(kind, []).append(place)
        return [part for wave in waves for part in self._parts(wave)]

    def _parts(self, wave: dict[type, list[int]]) -> Iterator[list[int]]:
        """Moves and ends have statements of their own, unless there are few of them beside others."""
        for kind in (Move, End):
            group = wave.pop(kind, [])
            beside = Save in wave or End in wave
            if group and (not beside or len(group) > moves.FEW):
                plain = moves.narrow_rows([self.writes[place] for place in group], STATEMENT_BYTES)
                if plain is not None:
                    self._plain[group[0]] = plain
                    yield group
                    continue
            if group:
                wave[Save] = [*wave.get(Save, ()), *group]
        for group in wave.values():
            yield from self._bounded(group)

    def _bounded(self, group: list[int]) -> list[list[int]]:
        """The group in parts of a size that one statement can take. A message is small and stays with its kind."""
        if isinstance(self.writes[group[0]], Send):
            return [group]
        parts: list[list[int]] = [[]]
        size = 0
        for place in group:
            weight = _weight(self.writes[place])
            if parts[-1] and size + weight > STATEMENT_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(place)
            size += weight
        return parts

    def _apply(self, connection: Connection, group: list[int]) -> None:
        first = self.writes[group[0]]
        if group[0] in self._plain:
            self._save(connection, self._move(connection, group, self._plain[group[0]]))
        elif isinstance(first, Save):
            self._save(connection, group)
        elif isinstance(first, Create):
            self._create(connection, group)
        else:
            sends = {place: (write, self._tokens[place]) for place, write in self._sends(group)}
            for place, answer in send(connection, self.queries, sends).items():
                self.answers[place] = answer

    def _send_alone(self, connection: Connection, place: int, one: Send) -> bool:
        answer = send_alone(connection, self.queries, one, self._tokens[place])
        self.answers[place] = answer
        return answer is not None

    def _sends(self, group: list[int]) -> Iterator[tuple[int, Send]]:
        for place in group:
            write = self.writes[place]
            if isinstance(write, Send):
                yield place, write

    # saves

    def _move(self, connection: Connection, group: Sequence[int], plain: list[moves.Row]) -> list[int]:
        """Places of those that were not applied: they go the way of other saves, which says why."""
        ends = type(self.writes[group[0]]) is End
        applied = moves.apply(connection, self.queries, plain, ends=ends)
        if len(applied) == len(self.writes):
            self.answers = [None] * len(applied)
            return []
        done = set(applied)
        left = []
        for place in group:
            if self.writes[place].id in done:
                self.answers[place] = None
            else:
                left.append(place)
        return left

    def _save(self, connection: Connection, group: list[int]) -> None:
        saves: dict[str, tuple[int, Save]] = {}
        if not group:
            return
        for place in group:
            write = self.writes[place]
            assert isinstance(write, Save)
            saves[write.id] = place, write
        for _ in range(TRIES):
            for id in self._run_saves(connection, [save for _, save in saves.values()]):
                self.answers[saves.pop(id)[0]] = None
            saves = self._judge(connection, saves) if saves else saves
            if not saves:
                return
        for place, save in saves.values():
            self.answers[place] = WriteOrderError(KIND, save.id, save.head.revision - 1, save.head.revision)

    def _write_saves(self, connection: Connection, saves: list[Save], *, alone: bool) -> list[str]:
        parts = Parts()
        for save in saves:
            parts.add_save(save)
        if alone and any(save.take for save in saves):
            parts.add_sweeps(saves)
        named = {save.id: save for save in saves if save.steps is not None}
        if named:
            for definition in self.queries.run(connection, "definitions_of", ids=Texts(named)):
                parts.add_steps(named[definition[0]], definition)
        # Who sent a request waits to see it obeyed.
        tell = any(save.take or _lets_go(save) for save in saves)
        return parts.apply(connection, self.queries, tell=tell, alone=alone)

    def _run_saves(self, connection: Connection, saves: list[Save]) -> list[str]:
        applied = self._write_saves(connection, saves, alone=False)
        released = [save for save in saves if _lets_go(save)]
        if released:
            self._let_go(connection, released, set(applied))
        return applied

    def _let_go(self, connection: Connection, released: list[Save], applied: set[str]) -> None:
        """What follows for an execution without an owner. Its row is locked by the save, so no message crosses this."""
        ended = [save.id for save in released if save.id in applied and save.head.state in ENDED]
        resting = [save.id for save in released if save.id in applied and not save.head.state.finished]
        if ended:
            self.queries.run(connection, "sweep_ended", ids=Texts(ended))
        if resting:
            self.queries.run(connection, "wake_released", ids=Texts(resting))

    def _judge(self, connection: Connection, saves: dict[str, tuple[int, Save]]) -> dict[str, tuple[int, Save]]:
        """Why these were not applied. Returned is what would fit by now, and is tried again."""
        found = self.queries.run(connection, "positions", ids=Texts(saves))
        stored = {id: (fence, revision) for id, fence, revision in found}
        again: dict[str, tuple[int, Save]] = {}
        for id, (place, save) in saves.items():
            head = save.head
            fence, revision = stored.get(id, (None, 0))
            if fence is None:
                self.answers[place] = ExecutionNotFoundError(id)
            elif fence != head.fence:
                self.answers[place] = LeaseLostError(id, head.fence)
            elif revision >= head.revision:
                self.answers[place] = None
            elif revision != head.revision - 1:
                self.answers[place] = WriteOrderError(KIND, id, revision, head.revision)
            else:
                again[id] = place, save
        return again

    # creations

    def _create(self, connection: Connection, group: list[int]) -> None:
        places: dict[str, int] = {}
        parts = Parts()
        for place in group:
            create = self.writes[place]
            assert isinstance(create, Create)
            places[create.id] = place
            parts.add_create(create, definition_row(create.definition, self._tokens[place]))
        applied = set(parts.apply(connection, self.queries, tell=True))
        missing = [id for id in places if id not in applied]
        if missing:  # taken; or made by an attempt whose answer was lost, as its token tells
            tokens = Ints(self._tokens[places[id]] for id in missing)
            found = self.queries.run(connection, "created_by", ids=Texts(missing), tokens=tokens)
            applied.update(id for (id,) in found)
        for id, place in places.items():
            self.answers[place] = id in applied


def definition_row(definition: Definition, token: int) -> tuple[Any, ...]:
    """In the order of `DEFINITION_NAMES`."""
    d = definition
    metadata, known, steps = "{}", "{}", rows.steps_text(d.steps)
    if d.metadata:
        metadata, known = rows.json_text(d.metadata), labels_text(d.metadata)
    values = d.id, d.workflow, d.version, d.total, d.queue, d.priority, metadata, d.parent_id, d.created
    crcs = rows.definition_crc(values), rows.steps_crc(d.id, steps)
    return (*values[1:], crcs[0], steps, crcs[1], known, search_text(d), token)


def labels(value: Any) -> Any:
    """Metadata as a jsonb column takes it. What it would refuse (NUL, half characters, NaN) is written as text."""
    if isinstance(value, str):
        return rows.clean(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {rows.clean(str(key)): labels(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [labels(one) for one in value]
    return value


def labels_text(value: Any) -> str:
    """As JSON without escapes: a database in SQL_ASCII takes every character, and none that is escaped."""
    return _json(labels(value))


def search_text(definition: Definition) -> str:
    """What a text filter looks into: the id and each metadata value, folded by Python's rules, not by the server's."""
    id, metadata = definition.id, definition.metadata
    text = "\x1f".join(searched_texts(id, metadata)) if metadata else id
    return rows.clean(text.casefold()) or ""


def _lets_go(save: Save) -> bool:
    """Whether others may take the execution up, or see its end, after this save."""
    return save.head.owner is None or save.head.state.finished


def _weight(write: Write) -> int:
    """Bytes of data, near enough."""
    if isinstance(write, Send):
        return 0
    if isinstance(write, Create):
        size = len(write.boundary.data or b"")
    else:
        size = sum([len(b.data) for b in write.boundaries if b.data is not None])
        if write.put:
            size += sum(map(len, write.put.values()))
    return size + sum(map(len, write.blobs.values())) if write.blobs else size
