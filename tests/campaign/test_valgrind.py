"""The instructions of a benchmark are counted by a real valgrind, under which everything takes many times as long."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import instructions
from benchmarks.places import Places


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions, and is not installed")
def test_the_instructions_of_a_run_are_counted_and_its_answer_checked(tmp_path: Path) -> None:
    with Places(tmp_path) as places:
        assert instructions.counted("bare", "sqlite", places)(1, 2) > 100_000
