"""What a batch of saves writes besides the heads: gathered row by row, and only the parts that occur are sent.

Place in the life of an execution: checkpoint. Each part is a piece of the one statement that saves the batch. All
pieces of a statement see the rows as they were before it, so what one piece removes and another one adds is settled
here: an entry that is cleared and put is only put.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrun.stored import Boundary, Save
from longrun.stores import rows
from longrun.stores._postgres.arrays import Blobs, Column, Floats, Ints, Texts, columns

_BOUNDARY_NAMES = ("b_execution", "b_crc", *(f"b_{name}" for name in rows.BOUNDARY_COLUMNS[:12]))
_BOUNDARY_KINDS: tuple[type[Column], ...] = (
    *(Texts, Ints, Ints, Texts, Ints, Texts, Floats, Floats, Ints, Texts, Ints, Ints, Ints, Ints),
)

_SHAPES: dict[str, tuple[tuple[str, ...], tuple[type[Column], ...]]] = {
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
}
"""Each part with the names and types of its columns, in the order in which they are joined."""


class Parts:
    """The rows of each part of one statement."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _SHAPES}

    def add_save(self, save: Save) -> None:
        id, found = save.id, self._rows
        keep_from = save.keep_from
        for boundary in save.boundaries:
            self.add_boundary(id, boundary, keep_from)
        if save.blobs:
            self.add_blobs(id, {n: data for n, data in save.blobs.items() if n not in save.drop_blobs})
        if keep_from is not None:
            found["with_strips"].append((id, keep_from))
        if save.drop_blobs:
            found["with_drop_blobs"] += [(id, name) for name in set(save.drop_blobs)]
        if save.clear:
            found["with_clears"].append((id,))
        elif save.drop:
            found["with_drops"] += [(id, key) for key in set(save.drop) if key not in save.put]
        if save.put:
            found["with_puts"] += [(id, key, data, rows.entry_crc(id, key, data)) for key, data in save.put.items()]
        if save.take:
            found["with_takes"] += [(id, number) for number in set(save.take)]

    def add_boundary(self, id: str, boundary: Boundary, keep_from: int | None = None) -> None:
        """The boundary's row, and its state unless the same save lets it go already."""
        values = rows.boundary_values(boundary)
        self._rows["with_boundaries"].append((id, rows.boundary_crc(id, values), *values[:12]))
        if values[13] is not None and (keep_from is None or boundary.seq >= keep_from):
            crc = rows.state_crc(id, values)
            self._rows["with_states"].append((id, boundary.seq, values[12], values[13], crc))

    def add_blobs(self, id: str, blobs: Mapping[str, bytes]) -> None:
        self._rows["with_blobs"] += [(id, name, data, rows.blob_crc(id, name, data)) for name, data in blobs.items()]

    def names(self) -> list[str]:
        return [name for name, found in self._rows.items() if found]

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {}
        for name, found in self._rows.items():
            if found:
                parameters |= columns(*_SHAPES[name], found)
        if self._rows["with_clears"] and not self._rows["with_puts"]:
            parameters |= {"put_execution": Texts(()), "put_key": Texts(())}
        return parameters
