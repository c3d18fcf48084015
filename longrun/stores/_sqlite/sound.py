"""Executions of which everything fits its checksum, as it does of nearly all: a row of one statement each.

Place in the life of an execution: claim. What does not fit, in whatever way, is left out here: `load` reads it again,
and says what is wrong with it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from longrun.errors import CorruptDataError
from longrun.stored import Definition, Loaded
from longrun.stores import rows
from longrun.stores._sqlite import pack, sql
from longrun.stores.assemble import fits

Sound = tuple[Loaded, int, int]
"""An execution, the first of its boundaries that may have its state, and the number of its last message."""

Row = tuple[Any, ...]
_UNFIT = (*pack.UNREADABLE, CorruptDataError)


def read_sound(connection: sqlite3.Connection, listed: str) -> dict[int, Sound]:
    """Those of `listed`, a JSON list of keys, by their key. Inside a transaction, to be consistent."""
    found: dict[int, Sound] = {}
    for row in connection.execute(sql.LOAD_WHOLE, (listed,)):
        try:
            one = _sound(row[1:6], row[6:15], row[15:23], row[23:30], row[30])
        except _UNFIT:
            continue
        if one is not None:
            found[row[0]] = one
    _add_blobs(connection, found)
    _add_entries(found, connection.execute(sql.LOAD_ENTRIES, (listed,)))
    _add_messages(found, connection.execute(sql.LOAD_MESSAGES, (listed,)))
    return found


def _sound(rest: Row, definition: Row, head: Row, newest: Row, stated: str) -> Sound | None:
    kept, last_message, names, names_crc, definition_crc = rest
    id = definition[0]
    state, fence, revision, owner, _, numbers, words, crc = head
    if rows.definition_crc(definition) != definition_crc or rows.steps_crc(id, names) != names_crc:
        return None
    if not pack.head_fits(id, state, fence, owner, (revision, numbers, words, crc)):
        return None
    seq, numbers, words, crc, state_crc, blobs, data = newest
    if not (pack.boundary_fits(id, seq, numbers, words, crc) and pack.state_fits(id, seq, blobs, data, state_crc)):
        return None
    states = _states(stated)
    where = pack.head_from(*head[:7])
    if states[-1][0] != seq or where.seq > seq:
        return None
    boundary = pack.boundary_from(seq, numbers, words, states[-1][1], data)
    loaded = Loaded(definition=_definition(definition, names), head=where, boundary=boundary, kept=states)
    return loaded, kept, last_message


@lru_cache(1024)
def _states(lines: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The numbers of the boundaries that have their state, in order, and the names of the blobs of each. Without blobs
    they are the same for every execution that has come as far."""
    found = []
    for line in lines.split("\n"):
        number, _, names = line.partition(" ")
        found.append((int(number), tuple(json.loads(names)) if names else ()))
    found.sort()
    return tuple(found)


def _definition(values: Row, names: str) -> Definition:
    id, workflow, version, total, queue, priority, metadata, parent_id, created = values
    return Definition(
        id=id,
        workflow=workflow,
        version=version,
        steps=rows.steps_from(names),
        total=total,
        queue=queue,
        priority=priority,
        metadata=rows.json_mapping(metadata),
        parent_id=parent_id,
        created=created,
    )


def _add_blobs(connection: sqlite3.Connection, found: dict[int, Sound]) -> None:
    wanted = [(key, name) for key, (loaded, *_) in found.items() for name in loaded.boundary.blobs]
    if not wanted:
        return
    blobs = _parts(found, connection.execute(sql.LOAD_BLOBS, (json.dumps(wanted),)), rows.blob_crc)
    for key, name in wanted:
        if name not in blobs.get(key, ()):
            found.pop(key, None)
    for key in found.keys() & blobs.keys():
        found[key][0].blobs = blobs[key]


def _add_entries(found: dict[int, Sound], stored: Iterable[Row]) -> None:
    entries = _parts(found, stored, rows.entry_crc)
    for key in found.keys() & entries.keys():
        found[key][0].entries = entries[key]


def _parts(found: dict[int, Sound], stored: Iterable[Row], crc: Callable[..., int]) -> dict[int, dict[str, bytes]]:
    """Blobs or entries by the key of their execution, which is taken out if one of them does not fit."""
    parts: dict[int, dict[str, bytes]] = {}
    for key, name, stored_crc, data in stored:
        if key in found:
            if fits(partial(crc, found[key][0].definition.id, name, data), stored_crc):
                parts.setdefault(key, {})[name] = data
            else:
                del found[key]
    return parts


def _add_messages(found: dict[int, Sound], stored: Iterable[Row]) -> None:
    for key, stored_crc, *values in stored:
        if key in found:
            loaded = found[key][0]
            if fits(partial(rows.message_crc, loaded.definition.id, values), stored_crc):
                loaded.messages += (rows.message_from(values),)
            else:
                del found[key]
