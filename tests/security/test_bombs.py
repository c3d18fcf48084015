"""Data that unfolds, nests or counts without end is refused, in bounded time and memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMORY = 1 << 30
SECONDS = 20

PROGRAM = """
import sys
from typing import Any
{prepare}
from longrun import codec
from longrun.errors import CodecError
bombs = {{
    "deep lists": b"[" * 200_000 + b"]" * 200_000,
    "deep dicts": b'{{"a":' * 200_000 + b"1" + b"}}" * 200_000,
    "deep and cut": b"[" * 1_000_000,
    "a long number": b"9" * 1_000_000,
    "a long negative number": b"-" + b"9" * 1_000_000,
    "a huge exponent": b"1e" + b"9" * 1000,
    "a decimal without end": b'{{"$":"decimal","v":"1e999999999"}}',
    "a deep tag": b'{{"$":"tuple","v":' * 100_000 + b"[]" + b"}}" * 100_000,
    "a long timedelta": b'{{"$":"timedelta","v":1' + b"0" * 400 + b"}}",
    "many keys": b"{{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}}",
}}
for name, data in bombs.items():
    for annotation in (Any, dict, int, list[int]):
        try:
            codec.decode(data, annotation)
        except CodecError as error:
            assert len(str(error)) < 1000, (name, len(str(error)))
print("quiet")
"""
WITHOUT_ORJSON = "import sys; sys.modules['orjson'] = None"


@pytest.mark.parametrize("prepare", ["", WITHOUT_ORJSON], ids=["as installed", "without orjson"])
def test_no_stored_bytes_take_more_than_they_are_worth(prepare: str) -> None:
    """In a process with a gigabyte and twenty seconds of the processor: a bomb that goes off ends it."""

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))

    command = [sys.executable, "-c", PROGRAM.format(prepare=prepare)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=bound)
    assert done.stdout == "quiet\n", (done.returncode, done.stderr[-2000:])
