"""The program of the quick start works as it is printed, on both event loops, in a real process, twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import anyio
from longrun import Executor, RetryPolicy, StepContext, StepRegistry

registry = StepRegistry()

@registry.step
async def fetch(state: dict) -> dict:
    return {**state, "pages": 3}

@registry.step(retry=RetryPolicy(max_attempts=5), timeout=600)
async def crawl(ctx: StepContext, state: dict) -> dict:
    async for page in ctx.each("pages", range(state["pages"])):
        ctx.local["bytes"] = ctx.local.get("bytes", 0) + 1000 * page
    return {**state, "bytes": ctx.local["bytes"]}

registry.workflow("crawl-site", [fetch, crawl])

async def main() -> None:
    async with Executor(registry) as executor:      # files in ./.longrun; resumes what a crash left
        run = await executor.start("crawl-site", {"url": "https://example.org"}, id="site-42")
        print(await run.result())

anyio.run(main)
"""
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_the_program_prints_its_result_and_prints_it_again(tmp_path: Path, loop: str) -> None:
    """A second run of the same program finds the finished execution and its result."""
    program = PROGRAM if loop == "asyncio" else PROGRAM.replace("anyio.run(main)", 'anyio.run(main, backend="trio")')
    (tmp_path / "program.py").write_text(program)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "program.py"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "LONGRUN_RUN_DIR": str(tmp_path / "run")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        assert done.stdout == "{'url': 'https://example.org', 'pages': 3, 'bytes': 3000}\n"
        assert done.returncode == 0
    assert (tmp_path / ".longrun").is_dir()
