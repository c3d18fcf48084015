"""What a batch writes, gathered row by row as the parts of one statement; only the parts that occur are sent.

Place in the life of an execution: start, checkpoint. The first part decides which writes fit, and the others follow it.
All parts of a statement see the rows as they were before it, so what one part removes and another one adds is settled
here: an entry that is cleared and put is only put.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from longrun.records import ExecutionState
from longrun.stored import Boundary, Create, Head, Save
from longrun.stores import rows
from longrun.stores._postgres.arrays import Blobs, Column, Flags, Floats, Ints, Texts
from longrun.stores._postgres.links import Connection, OwnConnection
from longrun.stores._postgres.queries import Queries
from longrun.stores._postgres.writing import Writing

ENDED = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})
"""Neither progress nor messages are left of these."""

HEAD_NAMES = ("id", "crc", *rows.HEAD_COLUMNS)
HEAD_KINDS: tuple[type[Column], ...] = (
    *(Texts, Ints, Texts, Ints, Ints, Texts, Ints, Ints, Ints, Ints, Ints, Floats, Floats, Floats, Floats, Texts),
    *(Flags, Flags, Ints, Texts, Texts, Floats, Floats, Floats, Texts),
)
DEFINITION_NAMES = (
    *("workflow", "version", "total", "queue", "priority", "metadata", "parent_id", "created", "definition_crc"),
    *("steps", "steps_crc", "labels", "search", "token"),
)
_DEFINITION_KINDS: tuple[type[Column], ...] = (
    *(Texts, Texts, Ints, Texts, Ints, Texts, Texts, Floats, Ints),
    *(Texts, Ints, Texts, Texts, Ints),
)
_BOUNDARY_NAMES = ("b_execution", "b_crc", *(f"b_{name}" for name in rows.BOUNDARY_COLUMNS[:12]))
_BOUNDARY_KINDS: tuple[type[Column], ...] = (
    *(Texts, Ints, Ints, Texts, Ints, Texts, Floats, Floats, Ints, Texts, Ints, Ints, Ints, Ints),
)

_SHAPES: dict[str, tuple[tuple[str, ...], tuple[type[Column], ...]]] = {
    "save": (HEAD_NAMES, HEAD_KINDS),
    "create": (HEAD_NAMES + DEFINITION_NAMES, HEAD_KINDS + _DEFINITION_KINDS),
    "with_boundaries": (_BOUNDARY_NAMES, _BOUNDARY_KINDS),
    "with_states": (
        ("s_execution", "s_seq", "s_blobs", "s_data", "s_crc"),
        (Texts, Ints, Texts, Blobs, Ints),
    ),
    "with_blobs": (("blob_execution", "blob_name", "blob_data", "blob_crc"), (Texts, Texts, Blobs, Ints)),
    "with_strips": (("strip_execution", "strip_before"), (Texts, Ints)),
    "with_drop_blobs": (("drop_blob_execution", "drop_blob_name"), (Texts, Texts)),
    "with_clears": (("clear_execution",), (Texts,)),
    "with_drops": (("drop_execution", "drop_key"), (Texts, Texts)),
    "with_puts": (("put_execution", "put_key", "put_data", "put_crc"), (Texts, Texts, Blobs, Ints)),
    "with_takes": (("take_execution", "take_id"), (Texts, Ints)),
    "with_sweeps": (("sweep_execution",), (Texts,)),
    "with_steps": (
        ("n_execution", "n_steps", "n_steps_crc", "n_version", "n_total", "n_crc"),
        (Texts, Texts, Ints, Texts, Ints, Ints),
    ),
}
"""Each part with the names and types of its columns, in the order in which they are joined."""


def head_row(id: str, head: Head) -> tuple[Any, ...]:
    """In the order of `HEAD_NAMES`."""
    values = rows.head_values(head)
    return id, rows.head_crc(id, values), *values


class Parts:
    """The rows of each part of one statement."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _SHAPES}

    def add_create(self, create: Create, definition: tuple[Any, ...]) -> None:
        """`definition` is in the order of `DEFINITION_NAMES`."""
        self._rows["create"].append((*head_row(create.id, create.head), *definition))
        self.add_boundary(create.id, create.boundary)
        self.add_blobs(create.id, create.blobs)

    def add_save(self, save: Save) -> None:
        id, found = save.id, self._rows
        found["save"].append(head_row(id, save.head))
        keep_from = save.keep_from
        for boundary in save.boundaries:
            self.add_boundary(id, boundary, keep_from)
        if save.blobs:
            self.add_blobs(id, {n: data for n, data in save.blobs.items() if n not in save.drop_blobs})
        if keep_from is not None:
            found["with_strips"].append((id, keep_from))
        if save.drop_blobs:
            found["with_drop_blobs"] += [(id, name) for name in set(save.drop_blobs)]
        if save.clear or save.head.state in ENDED:
            found["with_clears"].append((id,))
        elif save.drop:
            found["with_drops"] += [(id, key) for key in set(save.drop) if key not in save.put]
        if save.put and save.head.state not in ENDED:
            found["with_puts"] += [(id, key, data, rows.entry_crc(id, key, data)) for key, data in save.put.items()]
        if save.take:
            found["with_takes"] += [(id, number) for number in set(save.take)]

    def add_sweeps(self, saves: Iterable[Save]) -> None:
        """No message stays with what has ended."""
        self._rows["with_sweeps"] += [(save.id,) for save in saves if save.head.state in ENDED]

    def add_steps(self, save: Save, definition: Sequence[Any]) -> None:
        """The steps of an execution that was submitted without, and the definition as it is stored, its checksum
        last: only who may make this save can have changed it since it was read."""
        *values, crc = definition
        intact = rows.definition_crc(values) == crc  # a damaged definition stays one
        version, total = rows.set_named(values, save)
        steps = rows.steps_text(save.steps or ())
        fresh = rows.definition_crc(values) if intact else crc
        self._rows["with_steps"].append((save.id, steps, rows.steps_crc(save.id, steps), version, total, fresh))

    def add_boundary(self, id: str, boundary: Boundary, keep_from: int | None = None) -> None:
        """The boundary's row, and its state unless the same save lets it go already."""
        values = rows.boundary_values(boundary)
        self._rows["with_boundaries"].append((id, rows.boundary_crc(id, values), *values[:12]))
        if values[13] is not None and (keep_from is None or boundary.seq >= keep_from):
            crc = rows.state_crc(id, values)
            self._rows["with_states"].append((id, boundary.seq, values[12], values[13], crc))

    def add_blobs(self, id: str, blobs: Mapping[str, bytes]) -> None:
        self._rows["with_blobs"] += [(id, name, data, rows.blob_crc(id, name, data)) for name, data in blobs.items()]

    def apply(self, connection: Connection, queries: Queries, *, tell: bool, alone: bool = False) -> list[str]:
        """Write all of it in one statement; answered are the ids for which it was done. With `alone` those are left
        out that could need another one after it: whatever was sent messages, or, where some take messages and all that
        have ended are swept, what was sent one just now."""
        found = {name: lines for name, lines in self._rows.items() if lines}
        news = queries.news if tell else ()
        if isinstance(connection, OwnConnection) and all(len(lines) == 1 for lines in found.values()):
            values = [value for (line,) in found.values() for value in line]
            return _statement(queries, tuple(found), True, tell, alone).one(connection, values, news)
        columns = [column for lines in found.values() for column in zip(*lines, strict=True)]
        return _statement(queries, tuple(found), False, tell, alone).many(connection, columns, news)


@lru_cache(256)
def _statement(queries: Queries, names: tuple[str, ...], single: bool, tell: bool, alone: bool) -> Writing:
    texts = ["with_clears_around_puts" if name == "with_clears" and "with_puts" in names else name for name in names]
    text = queries.joined([*texts, "answer_and_tell" if tell else "answer"])
    taking = alone and "with_takes" in names
    unless = queries.text("unless_crossed" if taking else "unless_written_to") if alone else ""
    text = text.replace("{unless}", unless).replace("{or_woken}", queries.text("or_woken") if taking else "")
    columns = [column for name in names for column in zip(*_SHAPES[name], strict=True)]
    return Writing(text, columns, single=single, tell=tell)
