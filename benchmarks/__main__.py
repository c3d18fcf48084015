"""The command line: `python -m benchmarks [J1 J2 …]`, with `--help` for the rest.

Place in the life of a measurement: where it is asked for, and where its table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import machine, page, plots, results, targets
from benchmarks.child import MODULES, job_of
from benchmarks.orders import ALL_STORES, Job
from benchmarks.peers.catalogue import Installed
from benchmarks.places import Places, available
from benchmarks.results import Row, Trouble
from benchmarks.run import run_jobs


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks", description="longrun against its limits and its peers")
    made.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(MODULES)} (default: all)")
    made.add_argument("--store", default=",".join(ALL_STORES), help="a comma between names (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="times each side is measured (default: %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    made.add_argument(
        "--page", type=Path, metavar="FILE", help="put the rows into the table there, between its two marks"
    )
    made.add_argument("--plots", type=Path, metavar="DIR", help="write charts there (needs matplotlib)")
    made.add_argument("--peers", action="store_true", help="measure other libraries too, as far as installed")
    made.add_argument("--peers-in", type=Path, metavar="DIR", help="where each peer has a virtual environment")
    made.add_argument("--short", action="store_true", help="under a minute: ratios alone, exit code 1 if one is missed")
    made.add_argument("--directory", type=Path, help="where stores are made (default: the temporary directory)")
    made.add_argument("--quiet", action="store_true", help="the table alone")
    return made


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    asking = parser()
    asked = asking.parse_args(arguments)
    asked.store = tuple(asked.store.split(","))
    for reason in refusals(asked):
        asking.error(reason)
    return asked


def refusals(asked: argparse.Namespace) -> Iterator[str]:
    """Why this cannot be run, or its figures not be kept: known before anything is measured."""
    for unknown in [job for job in asked.jobs if job not in MODULES]:
        yield f"{unknown!r} is no job; there are {', '.join(MODULES)}"
    for unknown in [store for store in asked.store if store not in ALL_STORES]:
        yield f"{unknown!r} is no store; there are {', '.join(ALL_STORES)}"
    if asked.rounds < 1:
        yield "--rounds must be at least 1"
    looks: dict[str, Callable[[Path], str | None]] = {
        "json": targets.file_trouble,
        "page": targets.page_trouble,
        "plots": targets.plots_trouble,
        "directory": targets.directory_trouble,
    }
    for option, look in looks.items():
        path = getattr(asked, option)
        if path is not None and (reason := look(path)) is not None:
            yield f"--{option}: {reason}"


def nothing_left(jobs: Sequence[Job], asked: argparse.Namespace, missing: Mapping[str, str]) -> str:
    """Why no job is left for any store: those that do not run on what was asked for, and what is not installed."""
    reasons: dict[str, list[str]] = {}
    for job in jobs:
        where = job.runs_on(short=asked.short)
        if not where:
            reasons.setdefault("not in the short form", []).append(job.name)
        elif not set(where) & set(asked.store):
            form = " in the short form" if asked.short else ""
            reasons.setdefault(f"on {', '.join(where)} alone{form}", []).append(job.name)
    told = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "; ".join(told + [f"{store}: {reason}" for store, reason in missing.items()])


def teller(*, quiet: bool) -> Callable[[str], None]:
    began = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def tell(rows: Sequence[Row], troubles: Sequence[Trouble], missing: Mapping[str, str], *, short: bool) -> None:
    print(results.table(rows, short=short))
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    for trouble in troubles:
        print(f"FAILED {trouble.job} {trouble.store} {trouble.role}:\n{trouble.text}")


def keep(asked: argparse.Namespace, rows: Sequence[Row], troubles: Sequence[Trouble], facts: dict[str, str]) -> None:
    if asked.json is not None:
        asked.json.write_text(json.dumps(results.as_json(rows, troubles, facts, short=asked.short), indent=1) + "\n")
    if asked.page is not None:
        asked.page.write_text(page.put_into(asked.page.read_text(), rows, facts, tuple(MODULES)))
    if asked.plots is not None:
        plots.draw(rows, asked.plots)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled once, not anew in every process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and children end with this process
    jobs = [job_of(name) for name in asked.jobs or MODULES]
    stores, missing = available(asked.store)
    if not any(set(stores) & set(job.runs_on(short=asked.short)) for job in jobs):
        print(f"nothing is left to measure: {nothing_left(jobs, asked, missing)}", file=sys.stderr)
        return 2
    peers = Installed(asked.peers_in) if asked.peers else None
    with Places(asked.directory) as places:
        facts = {**machine.facts(asked.directory or Path(tempfile.gettempdir())), **places.describe(stores)}
        print("  ".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
        say = teller(quiet=asked.quiet)
        rows, troubles = run_jobs(jobs, stores, places, rounds=asked.rounds, short=asked.short, say=say, peers=peers)
    tell(rows, troubles, {**missing, **({} if peers is None else peers.missing)}, short=asked.short)
    keep(asked, rows, troubles, facts)
    missed = asked.short and any(row.ok(short=True) is False for row in rows)
    return 1 if troubles or missed else 0


if __name__ == "__main__":
    sys.exit(main())
