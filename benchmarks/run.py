"""Rounds: each side of each job in turn, again and again, so that what disturbs one disturbs the others too.

Place in the life of a measurement: around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from benchmarks.child import MeasurementError, run_child
from benchmarks.orders import Job
from benchmarks.peers.catalogue import ROLE as PEER_ROLE
from benchmarks.peers.catalogue import Installed, peer_rows
from benchmarks.places import Places, settle
from benchmarks.results import Figures, Row, Trouble

Say = Callable[[str], None]


def run_jobs(
    jobs: Iterable[Job],
    stores: tuple[str, ...],
    places: Places,
    *,
    rounds: int,
    short: bool,
    say: Say,
    peers: Installed | None = None,
) -> tuple[list[Row], list[Trouble]]:
    """Every job on every store asked for; rows in the catalogue's order."""
    rows: list[Row] = []
    troubles: list[Trouble] = []
    for job in jobs:
        for store in [one for one in stores if one in job.runs_on(short=short)]:
            measured = _Measured(job, store, short=short, peers=peers)
            with contextlib.ExitStack() as stack:
                measured.rounds(rounds, places, stack, say)
            troubles += measured.troubles
            if all(measured.samples[role] for role in job.sides(short=short)):
                rows += job.rows(store, measured.samples, measured.sizes)
                rows += peer_rows(job.name, store, measured.samples, measured.sizes)
    return rows, troubles


class _Measured:
    """The figures of one job on one store."""

    def __init__(self, job: Job, store: str, *, short: bool, peers: Installed | None) -> None:
        self.job, self.store, self.peers = job, store, peers
        self.sizes = job.short if short and job.short is not None else job.full
        others = () if peers is None else peers.roles(job.name, store)
        self.roles = (*job.sides(short=short), *others)
        self.samples: dict[str, list[Figures]] = {role: [] for role in self.roles}
        self.troubles: list[Trouble] = []
        self._kept: dict[str, str] = {}

    def rounds(self, count: int, places: Places, stack: contextlib.ExitStack, say: Say) -> None:
        for number in range(1, count + 1):
            for role in self.roles:
                if any(trouble.role == role for trouble in self.troubles):
                    continue  # it will not work the next time either
                say(f"{self.job.name} {self.store} {role}, round {number} of {count}")
                try:
                    self.samples[role].append(self._one(role, places, stack))
                except MeasurementError as error:
                    self.troubles.append(Trouble(job=self.job.name, store=self.store, role=role, text=str(error)))

    def _one(self, role: str, places: Places, stack: contextlib.ExitStack) -> Figures:
        if role in self.job.lasting:
            return self._child(role, self._lasting(role, places, stack))
        with places.fresh(self.store) as url:
            return self._child(role, url)

    def _lasting(self, role: str, places: Places, stack: contextlib.ExitStack) -> str:
        """A place that is filled once and serves every round."""
        if role not in self._kept:
            url = stack.enter_context(places.fresh(self.store))
            prepared = self._child(f"prepare-{role}", url)
            self.samples.setdefault(f"prepare-{role}", []).append(prepared)
            settle(self.store, url)
            self._kept[role] = url
        return self._kept[role]

    def _child(self, role: str, url: str) -> Figures:
        if self.peers is not None and role.startswith(PEER_ROLE):
            return self.peers.measure(role, self.job.name, url, self.sizes, self.job.timeout)
        return run_child(self.job.name, role, self.store, url, self.sizes, self.job.timeout)
