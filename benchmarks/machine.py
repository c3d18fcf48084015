"""What the figures were taken on, and small measurements of the own process.

Place in the life of a measurement: its circumstances.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import platform
import sqlite3
import sys
import time
from pathlib import Path


def facts(directory: Path) -> dict[str, str]:
    """The table's header."""
    load = os.getloadavg()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
        "file system": file_system(directory),
        "orjson": version("orjson"),
        "sqlite": sqlite3.sqlite_version,
        "kernel": platform.release(),
        "load at start": f"{load[0]:.2f}",
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory: a figure from tmpfs says nothing about a disk."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    resolved, best, kind = directory.resolve(), -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, point, found, *_ = line.split()
        if resolved.is_relative_to(point) and len(point) > best:
            best, kind = len(point), found
    return kind


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return float(line.split()[1]) / 1024
    raise LookupError(name)


def peak_mib() -> float:
    """The own peak. Not getrusage: the peak it tells begins with that of the process which forked this one."""
    return _status("VmHWM")


def resident_mib() -> float:
    return _status("VmRSS")


def begin() -> float:
    """The moment at which a measurement begins, in seconds. What importing has left is cleared away before: it is done
    once in the life of a process, and would fall into the time of whoever makes the object too many."""
    gc.collect()
    return time.perf_counter()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bytes_under(path: Path) -> int:
    """What files take, sparse space left out."""
    return sum(found.stat().st_blocks * 512 for found in path.rglob("*") if found.is_file())
