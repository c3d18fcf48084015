"""Progress inside a step, in real processes that are killed with SIGKILL, on stores that survive it (I1, I2)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("crashing_program.py")
EFFECTS = [
    *(f"item {n}" for n in range(4)),
    "pay",
    *(f"{name} {what}" for name in "ab" for what in ("begins", "ends")),
    *(f"call {n}" for n in range(2)),
]


@pytest.mark.parametrize(("store", "backend"), [("file:{}", "asyncio"), ("sqlite:///{}/x.db", "trio")])
def test_only_the_effect_that_was_cut_off_is_had_again(store, backend, tmp_path):
    """Killed in the middle of every third effect: one call, one item, one branch is done again, and nothing else."""
    effects = tmp_path / "effects"
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "LONGRUN_RUN_DIR": str(tmp_path / "run")}
    (tmp_path / "store").mkdir()
    command = [sys.executable, str(PROGRAM), store.format(tmp_path / "store"), str(effects), backend, "3"]
    for _ in range(len(EFFECTS)):
        life = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if life.returncode == 0:
            break
        assert life.returncode == -signal.SIGKILL, life.stderr
    else:
        pytest.fail("it never came to its end")
    assert life.stdout == "item 0,item 1,item 2,item 3,a ends,b ends,call 1\n"
    lines = effects.read_text().splitlines()
    assert lines.count("KILLED") >= 4
    acknowledged = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if "KILLED" not in (line, after)]
    assert acknowledged == EFFECTS
