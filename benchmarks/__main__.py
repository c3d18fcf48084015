"""The command line: `python -m benchmarks [J1 J2 …]`, with `--help` for the rest.

Place in the life of a measurement: where it is asked for, and where its table is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import machine, plots, results
from benchmarks.child import MODULES, job_of
from benchmarks.orders import ALL_STORES
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
    made.add_argument("--page", type=Path, metavar="FILE", help="put the table there, between its two marks")
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
    for unknown in [job for job in asked.jobs if job not in MODULES]:
        asking.error(f"{unknown!r} is no job; there are {', '.join(MODULES)}")
    for unknown in [store for store in asked.store if store not in ALL_STORES]:
        asking.error(f"{unknown!r} is no store; there are {', '.join(ALL_STORES)}")
    if asked.rounds < 1:
        asking.error("--rounds must be at least 1")
    if asked.page is not None and not (asked.page.exists() and results.has_marks(asked.page.read_text())):
        asking.error(f"{asked.page} has no place for the table: {results.BEGIN} … {results.END}")
    if asked.plots is not None and importlib.util.find_spec("matplotlib") is None:
        asking.error("--plots needs matplotlib: pip install 'longrun[bench]'")
    return asked


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
        asked.page.write_text(results.put_into(asked.page.read_text(), results.markdown(rows, facts)))
    if asked.plots is not None:
        plots.draw(rows, asked.plots)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and children end with this process
    jobs = [job_of(name) for name in asked.jobs or MODULES]
    if asked.short:
        jobs = [job for job in jobs if job.short is not None]
    stores, missing = available(asked.store)
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
