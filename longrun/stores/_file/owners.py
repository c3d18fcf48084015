"""Leases: one small file for each process that may own executions.

Place in the life of an execution: claim. The time of change of the file is the moment at which the lease runs out, so
that a renewal is one atomic call that cannot bring back an owner whom somebody has removed. Nothing is synced here:
after a power cut every owner is dead.
"""

from __future__ import annotations

import json

from longrun.clock import Clock
from longrun.stored import Owner
from longrun.stores._file.disk import UnopenableError
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, pack, unpack_any
from longrun.stores._file.place import Place, stem_of


def register(place: Place, clock: Clock, owner: Owner, ttl: float) -> None:
    name = _name(owner.id)
    fields = {"life": dict(owner.life), "workflows": list(owner.workflows), "queues": list(owner.queues)}
    temporary, fd = place.temporary(pack(Identity(owner.id, 0), 1, {"kind": "owner", **fields}), sync=False)
    place.disk.close(fd)
    place.disk.utime(temporary, clock.now() + ttl, place.tmp.fd)
    place.replace(temporary, place.owners, name)


def renew(place: Place, clock: Clock, owner: str, ttl: float) -> bool:
    try:
        place.disk.utime(_name(owner), clock.now() + ttl, place.owners.fd)
    except FileNotFoundError:
        return False
    return True


def unregister(place: Place, owner: str) -> None:
    place.owners.remove(_name(owner))


def read_owners(place: Place, clock: Clock) -> list[Owner]:
    """Everybody who is registered. A file that cannot be read names nobody: its owner counts as dead, and is fenced."""
    found: list[Owner] = []
    for name in sorted(place.owners.names()):
        try:
            with place.owners.opened(name) as fd:
                until = place.disk.fstat(fd).st_mtime
                data = place.disk.pread(fd, 1 << 20, 0)
            identity, line = unpack_any(data.rstrip(b"\n"))
        except FileNotFoundError:
            continue
        except (UnopenableError, BrokenLineError, ForeignLineError, json.JSONDecodeError):
            continue
        if _name(identity.id) == name:
            fields = line.fields
            found.append(
                Owner(
                    id=identity.id,
                    life=fields["life"],
                    remaining=until - clock.now(),
                    workflows=tuple(fields["workflows"]),
                    queues=tuple(fields["queues"]),
                )
            )
    return found


def _name(owner: str) -> str:
    return f"{stem_of(owner)}.json"
