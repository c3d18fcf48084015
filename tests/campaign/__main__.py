"""One campaign by hand, of any size, in one line: `python -m tests.campaign kills --store file --size 2000`.

The last line on the standard output is the outcome. Exit code 0: nothing found; 1: a promise was broken; 2: void, since
no fault fired; 3: this machine cannot do it, and the line says why.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.campaign import kinds
from tests.campaign.skies import NoPowerError


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("kind", choices=sorted(kinds.KINDS))
    parser.add_argument("--store", default="file", choices=["file", "sqlite", "postgres", "redis"])
    parser.add_argument(
        "--size", type=int, required=True, help="kills, takeovers, flips, schedules …; seconds of a soak"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--plot", type=Path, help="where a soak writes its curves, as SVG")
    parser.add_argument("--directory", type=Path, help="where to work; by default a new temporary directory")
    parser.add_argument("--keep", action="store_true", help="leave the directory for a look")
    return parser.parse_args(arguments)


@contextmanager
def workplace(asked: argparse.Namespace) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="campaign-", dir=asked.directory))
    (place / "run").mkdir(mode=0o700)
    os.environ["LONGRUN_RUN_DIR"] = str(place / "run")
    try:
        yield place
    finally:
        if asked.keep:
            print(f"left in {place}", file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)


def main(arguments: list[str]) -> int:
    asked = parse(arguments)
    run: Callable[..., Any] = kinds.KINDS[asked.kind]
    began = time.monotonic()
    what = f"{asked.kind} --store {asked.store} --size {asked.size} --seed {asked.seed}"
    with workplace(asked) as place:
        try:
            outcome: kinds.Outcome = run(kinds.Task(asked.store, asked.size, asked.seed, place, asked.plot))
        except NoPowerError as error:
            print(f"{what}: not on this machine: {error}")
            return 3
    for fault in outcome.faults[:20]:
        print(f"  {fault}")
    found = "VOID, no fault fired" if not outcome.fired else f"{len(outcome.faults)} broken promises"
    print(f"{what}: {outcome.text}; {found}; {time.monotonic() - began:.0f} s")
    return 1 if outcome.faults else 0 if outcome.fired else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
