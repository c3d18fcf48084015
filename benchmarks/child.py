"""One measurement in a process of its own: `python -m benchmarks.child ORDER`, answered by one line on stdout.

Place in the life of a measurement: its whole. `run_child` is the other end, for whoever asks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.orders import Job, Order, Sizes
from benchmarks.results import Figures
from tests.launch_server import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "RESULT "

MODULES = {
    "J1": "steps",
    "J1x10": "steps",
    "J2": "steps",
    "J2x5": "steps",
    "J3": "large",
    "J4": "recovery",
    "J5": "cold",
    "J6": "parked",
    "J7": "latency",
    "J8": "items",
    "J9": "workers",
}
"""Where each job is; imported only when asked for, so that a child holds no more than it measures."""


class MeasurementError(Exception):
    """A child that gave no figures."""


def job_of(name: str) -> Job:
    module: Any = importlib.import_module(f"benchmarks.{MODULES[name]}")
    job: Job = module.JOBS[name]
    return job


def command(order: dict[str, Any]) -> list[str]:
    """How a process for an order is started. `asked` is now."""
    order = {**order, "asked": time.monotonic_ns()}
    return [sys.executable, "-m", "benchmarks.child", json.dumps(order)]


def run_child(job: str, role: str, store: str, url: str, sizes: Sizes, timeout: float) -> Figures:
    """Measure in a fresh process. It and all it starts are one process group, which never outlives this call."""
    order = {"job": job, "role": role, "store": store, "url": url, "sizes": dict(sizes)}
    process = subprocess.Popen(
        command(order), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"no answer within {timeout:g} s") from None
    finally:
        end_group(process)
    return answer_in(out, err)


def end_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def answer_in(out: str, err: str) -> Figures:
    for line in reversed(out.splitlines()):
        if line.startswith(ANSWER):
            figures: Figures = json.loads(line.removeprefix(ANSWER))
            return figures
    raise MeasurementError((err or out).strip()[-1500:] or "it said nothing")


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    if not order.role.startswith("resume-"):  # those end by themselves, and their start-up is what is measured
        die_with_parent(os.getppid(), signal.SIGKILL)
    figures = job_of(order.job).measure(order)
    print(ANSWER + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
