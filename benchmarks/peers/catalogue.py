"""Which peers there are, which of them are installed, and how one is measured in the rounds of a job.

Place in the life of a measurement: beside it. A peer often needs an environment of its own: `--peers-in DIR` names a
directory with one virtual environment for each, under the peer's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from benchmarks.child import ROOT, MeasurementError, answer_in, end_group
from benchmarks.orders import Samples, Sizes
from benchmarks.results import Figures, Goal, Row, at_least
from benchmarks.samples import column

ROLE = "peer "


@frozen(kw_only=True)
class Peer:
    """One library. `jobs` holds sizes of its own where the job's would take minutes."""

    name: str
    package: str
    """What is imported, and whether it can be tells whether the peer is installed."""
    stores: tuple[str, ...]
    durable: str
    jobs: Mapping[str, Sizes] = field(factory=lambda: {"J1": {}, "J2": {}, "J4": {}})
    variable: str | None = None
    """An environment variable without which it cannot run."""

    @property
    def program(self) -> str:
        return f"benchmarks.peers.peer_{self.name.replace('-', '_')}"


FEW: dict[str, Sizes] = {"J1": {}, "J2": {"executions": 100}, "J4": {"executions": 100}}
"""For those that take a minute for a thousand executions."""

PEERS = (
    Peer(name="burr", package="burr", stores=("sqlite",), durable="4 fsyncs a step; J2: tasks share commits"),
    Peer(name="dbos", package="dbos", stores=("sqlite", "postgres"), durable="fsync a step", jobs=FEW),
    Peer(name="langgraph", package="langgraph", stores=("sqlite", "postgres"), durable="2 commits a step", jobs=FEW),
    Peer(name="absurd", package="absurd_sdk", stores=("postgres",), durable="a commit a step; J4: lease of 10 s"),
    Peer(
        name="restate",
        package="restate",
        stores=("sqlite", "file"),
        durable="its own server, 2 fsyncs a step",
        jobs={"J1": {}, "J2": {}},
        variable="RESTATE_SERVER_BIN",
    ),
    Peer(
        name="pydantic-graph",
        package="pydantic_graph",
        stores=("file",),
        durable="NO FSYNC",
        jobs={"J1": {"steps": 200}, "J2": {"executions": 100}},
    ),
)


class Installed:
    """The peers that can run here, each with its interpreter."""

    def __init__(self, directory: Path | None) -> None:
        self.pythons: dict[str, Path] = {}
        self.missing: dict[str, str] = {}
        for peer in PEERS:
            python = _python_of(peer, directory)
            if not _imports(python, peer.package):
                self.missing[peer.name] = "not installed"
            elif peer.variable is not None and peer.variable not in os.environ:
                self.missing[peer.name] = f"{peer.variable} is not set"
            else:
                self.pythons[peer.name] = python

    def roles(self, job: str, store: str) -> tuple[str, ...]:
        """The rounds of a job on a store gain these."""
        return tuple(ROLE + peer.name for peer in PEERS if self._takes_part(peer, job, store))

    def _takes_part(self, peer: Peer, job: str, store: str) -> bool:
        return peer.name in self.pythons and job in peer.jobs and store in peer.stores

    def measure(self, role: str, job: str, url: str, sizes: Sizes, timeout: float) -> Figures:
        peer = _peer(role)
        sizes = {**sizes, **peer.jobs[job]}
        if job != "J4":
            return self._ask(peer, job, url, sizes, timeout)
        self._kill_in_flight(peer, url, sizes)
        return self._ask(peer, "J4-resume", url, {**sizes, "asked": time.monotonic_ns()}, timeout)

    def _start(self, peer: Peer, job: str, url: str, sizes: Sizes) -> subprocess.Popen[str]:
        command = [str(self.pythons[peer.name]), "-m", peer.program, job, url, json.dumps(dict(sizes))]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def _ask(self, peer: Peer, job: str, url: str, sizes: Sizes, timeout: float) -> Figures:
        process = self._start(peer, job, url, sizes)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"no answer within {timeout:g} s") from None
        finally:
            end_group(process)
        return answer_in(out, err)

    def _kill_in_flight(self, peer: Peer, url: str, sizes: Sizes) -> None:
        process = self._start(peer, "J4-crash", url, sizes)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                if line.startswith("READY"):
                    return
            raise MeasurementError(process.stderr.read()[-1500:])
        finally:
            end_group(process)
            process.stdout.close()
            process.stderr.close()


def _python_of(peer: Peer, directory: Path | None) -> Path:
    own = None if directory is None else directory / peer.name / "bin" / "python"
    return own if own is not None and own.exists() else Path(sys.executable)


def _imports(python: Path, package: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", find], check=False).returncode == 0


def _peer(role: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == role.removeprefix(ROLE))


def peer_rows(job: str, store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    """longrun beside each peer that was measured in the same rounds. The peer stands in the column of the bare loop."""
    return [
        _row(_peer(role), job, store, samples, sizes) for role in samples if role.startswith(ROLE) and samples[role]
    ]


def _row(peer: Peer, job: str, store: str, samples: Samples, sizes: Sizes) -> Row:
    own = {**sizes, **peer.jobs[job]}
    size = f"{own['executions']:,} in flight" if job == "J4" else f"{own['executions']:,} × {own['steps']:,} steps"
    figure = "seconds" if job == "J4" else "steps_per_s"
    return Row(
        job=job,
        store=store,
        what=f"beside {peer.name} with {size}",
        unit="s" if job == "J4" else "steps/s",
        ours=column(samples, "longrun", figure),
        bare=column(samples, ROLE + peer.name, figure),
        bare_name=peer.name,
        goal=_goal(peer, job, store),
        durable=peer.durable,
    )


def _goal(peer: Peer, job: str, store: str) -> Goal | None:
    if job == "J1" and peer.durable != "NO FSYNC":
        return at_least(2)
    if job == "J2" and peer.name in ("dbos", "restate"):
        return at_least(4 if store == "file" else 20)
    return None
