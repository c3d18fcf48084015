"""Instructions instead of seconds: `python -m benchmarks.instructions`, where valgrind is installed.

Place in the life of a measurement: beside the clock. Seconds depend on the disk, on neighbours and on what the machine
did a moment before; the number of instructions that a step takes does not, so that even a change of one percent shows.
What waits for the disk costs none, and nothing is said of caches. A step's price is the difference between runs with
few and with many steps; that of an execution, its start and its end, between runs with few and with many executions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from attrs import frozen

from benchmarks.child import ROOT, MeasurementError, answer_in, command, job_of
from benchmarks.orders import ALL_STORES
from benchmarks.places import Places, available

VALGRIND = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
FEW, MANY = 2, 12
"""Steps of an execution."""
TIMEOUT = 900.0

Count = Callable[[int, int], int]
"""The instructions of a whole process, by the number of executions and of steps of each."""


@frozen
class Prices:
    """Instructions."""

    step: float
    execution: float


def prices(count: Count, executions: int) -> Prices:
    base = count(executions, FEW)
    step = (count(executions, MANY) - base) / (executions * (MANY - FEW))
    execution = (count(3 * executions, FEW) - base) / (2 * executions)
    return Prices(step, execution - FEW * step)


def counted(role: str, store: str, places: Places) -> Count:
    def count(executions: int, steps: int) -> int:
        with places.fresh(store) as url:
            sizes = {"executions": executions, "steps": steps}
            order = {"job": "J2", "role": role, "store": store, "url": url, "sizes": sizes}
            run = [*VALGRIND, *command(order)]
            done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        answer_in(done.stdout, done.stderr)  # no figure of a run that did not check its answer
        found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
        if found is None:
            raise MeasurementError(done.stderr.strip()[-1500:])
        return int(found[1].replace(",", ""))

    return count


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions", description=(__doc__ or "").split("\n")[0]
    )
    asking.add_argument("--store", default="sqlite", help=f"of {', '.join(ALL_STORES)}, a comma between names")
    asking.add_argument("--executions", type=int, default=200, help="at once; another run has three times as many")
    asking.add_argument("--json", action="store_true", help="one object a line")
    asked = asking.parse_args(arguments)
    if shutil.which(VALGRIND[0]) is None:
        asking.error("valgrind is not installed")
    stores, missing = available(tuple(asked.store.split(",")))
    for name, reason in missing.items():
        asking.error(f"{name}: {reason}")
    with Places() as places:
        for store in stores:
            for role in job_of("J2").roles:
                found = prices(counted(role, store, places), asked.executions)
                say(store, role, found, as_json=asked.json)
    return 0


def say(store: str, role: str, found: Prices, *, as_json: bool) -> None:
    step, execution = round(found.step), round(found.execution)
    if as_json:
        print(json.dumps({"store": store, "role": role, "step": step, "execution": execution}), flush=True)
    else:
        print(f"{store:9} {role:8} {step:9,} a step {execution:11,} a start and an end", flush=True)


if __name__ == "__main__":
    sys.exit(main())
