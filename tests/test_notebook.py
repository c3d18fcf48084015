"""In a notebook: executions as values of cells, a bar that moves, and an example that is executed as it stands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from longrun import Execution, ExecutionState, Executor, Forecast, Progress, StepContext, notebook
from longrun.client import Client
from tests.crashing import PATIENCE, registry_of

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
NOW = datetime(2026, 1, 31, tzinfo=UTC)
EVIL = "<script>alert('x')</script>\"&"
RUNNING = Execution(
    id="site-42",
    name="crawl",
    state=ExecutionState.RUNNING,
    progress=0.5,
    current_step=1,
    total_steps=3,
    step_names=("fetch", "crawl", "report"),
    start_time=NOW,
    last_update=NOW,
    step_progress=Progress(done=25, total=100, message="pages"),
    forecast=Forecast(fraction=0.6789, remaining=70.4),
)


class Texts(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_an_execution_shows_its_state_a_bar_and_the_time_left() -> None:
    shown = Texts(RUNNING._repr_html_())
    assert shown.text == "site-42 crawl running67% · step 2/3 crawl, 25/100 pages, 0:01:10 left"
    assert "width:67%" in RUNNING._repr_html_()
    assert notebook.text(RUNNING) == "site-42  crawl  running  67%  step 2/3 crawl, 25/100 pages, 0:01:10 left"
    listed = attrs.evolve(RUNNING, forecast=None, step_names=(), step_progress=None)
    assert notebook.text(listed) == "site-42  crawl  running  50%  step 2/3"


def test_nothing_that_a_program_says_becomes_markup_and_no_error_is_shown() -> None:
    """I15's neighbour: names, messages and errors come from elsewhere."""
    evil = attrs.evolve(
        RUNNING,
        name=EVIL,
        step_names=("", EVIL, ""),
        step_progress=Progress(done=1, message=EVIL),
        error=f"ValueError: {EVIL}",
        reason=EVIL,
        metadata={EVIL: EVIL},
    )
    html = evil._repr_html_()
    assert Texts(html).tags == {"div", "b", "span"}
    assert "alert" not in html.replace("&lt;script&gt;alert(&#x27;x&#x27;)", "")
    assert "ValueError" not in html
    assert Texts(notebook.unknown(EVIL)).tags == {"div", "b", "code"}


async def test_a_handle_shows_what_runs_here_and_how_to_look_at_the_rest() -> None:
    begun, go = anyio.Event(), anyio.Event()

    async def work(ctx: StepContext, state: Any) -> None:
        ctx.progress(1, 4)
        begun.set()
        await go.wait()

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(work), store="memory:") as executor:
            run = await executor.start("work", id="x")
            await begun.wait()
            assert Texts(run._repr_html_()).text.startswith("x work running25% · step 1/1 work, 1/4, ")
            async with Client(executor.store) as client:
                assert "await run.info()" in client.handle("x")._repr_html_()
            go.set()
            await run.result()


async def test_outside_a_notebook_a_line_is_printed_whenever_something_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = anyio.Event(), anyio.Event()

    async def work(ctx: StepContext, state: Any) -> None:
        ctx.progress(1, 4)
        begun.set()
        await go.wait()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if "25%" in self.getvalue():
                go.set()
            return written

    shown = Watched()
    monkeypatch.setattr(sys, "stdout", shown)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(work), store="memory:") as executor:
            run = await executor.start("work", id="x")
            await begun.wait()
            ended = await notebook.show(run, interval=0.01)
    assert ended.state is ExecutionState.COMPLETED
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("x  work  running  25%  step 1/1 work, 1/4, ")
    assert lines[-1].startswith("x  work  completed  100%  1 step, ")
    assert len(lines) == len(set(lines))


EXECUTE = """
import json, sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}})
client.execute()
json.dump(notebook, sys.stdout)
"""


def outputs(notebook: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {cell["id"]: cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"}


def values(notebook: dict[str, Any]) -> dict[str, str]:
    """What the last line of each cell gave, but for what has times in it."""
    found = {
        id: "".join(one["data"]["text/plain"])
        for id, several in outputs(notebook).items()
        for one in several
        if one["output_type"] == "execute_result"
    }
    return {id: text for id, text in found.items() if "datetime" not in text}


def test_the_notebook_runs_as_it_stands_and_gives_what_is_stored_in_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    executed, stored = json.loads(done.stdout), json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for found in (executed, stored):
        assert [one for several in outputs(found).values() for one in several if one["output_type"] == "error"] == []
        assert values(found).keys() == {"rest", "steps"}
        [handle] = outputs(found)["half"]
        assert "running" in "".join(handle["data"]["text/html"]), "left in the middle"
        bar = outputs(found)["rest"][0]["data"]["text/html"]
        assert "completed" in "".join(bar), "the last of its updates"
    assert values(executed) == values(stored)
    assert "words': 780" in values(stored)["rest"]
