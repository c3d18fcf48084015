"""What a run says of itself, look by look: lines elsewhere, bars on a terminal."""

from __future__ import annotations

import io
import re
import time

import attrs
import pytest
from rich.console import Console

from longrun.cli import _bars
from longrun.cli._bars import Bars, Lines
from longrun.cli._follow import View
from longrun.records import ExecutionState, Forecast, Progress
from longrun.stored import Boundary, Head
from longrun.testing.samples import boundary, definition, head

State = ExecutionState
HALF = Forecast(fraction=0.5)


def view(now: Head, *rows: Boundary, live: Progress | None = None, steps: int = 3) -> View:
    names = tuple(f"step {n}" for n in range(1, steps + 1))
    return View(definition("a", steps=names, total=steps), now, live, list(rows), here=True)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that `Lines` says."""
    said: list[str] = []
    monkeypatch.setattr(_bars, "say", said.append)
    return said


def test_a_failed_attempt_is_told_once_with_its_kind_and_its_wait(lines: list[str]) -> None:
    shown = Lines()
    shown.update(view(head()), HALF)
    failed = head(attempt=1, error="ValueError: secret\nmore", due=time.time() + 90)
    for _ in range(2):
        shown.update(view(failed), HALF)
    (line,) = lines
    assert re.fullmatch(r"step 1/3 step 1: attempt 1 failed \(ValueError\), again in 1 min \d\d s", line)


def test_attempts_of_another_visit_begin_anew(lines: list[str]) -> None:
    """A step that is visited again after three failures has failed not even once."""
    shown = Lines()
    shown.update(view(head(attempt=3)), HALF)
    shown.update(view(head(visit=2, attempt=0)), HALF)
    shown.update(view(head(visit=2, attempt=1, error="KeyError: 'x'")), HALF)
    assert len(lines) == 1
    assert "attempt 1 failed (KeyError), again in 0.0 s" in lines[0]


def test_what_it_waits_for_is_told_once(lines: list[str]) -> None:
    shown = Lines()
    for _ in range(2):
        shown.update(view(head(State.WAITING, signal="go")), HALF)
    shown.update(view(head(State.WAITING, due=time.time() + 3600.5)), HALF)
    assert len(lines) == 2
    assert "for signal 'go': longrun signal a go" in lines[0]
    assert lines[1].endswith(" for 1 h 00 min")


def test_now_and_then_a_line_says_how_far_it_is(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bars, "PROGRESS_EVERY", 0.0)
    shown = Lines()
    shown.update(view(head(done=20, of=40)), Forecast(fraction=0.25, remaining=59.0, rate=2.0))
    shown.update(view(head()), Forecast(fraction=0.0))
    shown.update(view(head(State.PAUSED)), HALF)
    assert lines == ["25%, step 1/3 step 1, 20/40, 2.0/s, about 59 s left", "0%, step 1/3 step 1"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (boundary(2, name="x", started=100.0, ended=102.0, attempts=3), "✓ step 1/3 x in 2.0 s, 3 attempts"),
        (boundary(2, kind="fail", name="x", attempts=1), "✗ step 1/3 x failed"),
        (boundary(3, kind="pause", name="x"), "step 2/3 x: pause"),
        (boundary(9, kind="cancel", name=None), "step 3/3: cancel"),
        (boundary(1), None),
        (boundary(2, kind="wake", name="x"), None),
    ],
)
def test_each_kind_of_row(lines: list[str], row: Boundary, said: str | None) -> None:
    Lines().update(view(head(), row), HALF)
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in lines] == ([] if said is None else [said])


def test_many_rows_of_one_look_are_folded(lines: list[str]) -> None:
    rows = [boundary(n, name=f"step {n - 1}") for n in range(2, 32)]
    Lines().update(view(head(), *rows, steps=40), HALF)
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in lines] == [
        "✓ 27 steps",
        *(f"✓ step {n}/40 step {n}" for n in (28, 29, 30)),
    ]


# --- bars -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bars() -> Bars:
    made = Bars()
    made._live.console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    return made


def drawn(bars: Bars, *looks: tuple[View, Forecast]) -> str:
    """What stands on the terminal after some looks, everything that was ever drawn included."""
    with bars:
        for one in looks:
            bars.update(*one)
    text = bars._live.console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_the_step_in_flight_has_its_items_its_rate_its_message_and_its_attempt(bars: Bars) -> None:
    now = head(attempt=1)
    shown = drawn(bars, (view(now, live=Progress(done=5, total=20, message="pages")), Forecast(fraction=0.1, rate=2.5)))
    assert re.search(r"1/3 step 1\s.*▸\s+5/20\s+2\.5/s\s+pages\s+attempt 2", shown)
    assert re.search(r"2/3 step 2", shown)


def window(shown: str) -> list[int]:
    """The steps of forty that have a bar."""
    return sorted({int(n) for n in re.findall(r"^ +(\d+)/40 step", shown, re.MULTILINE)})


def test_a_long_workflow_shows_the_steps_around_the_one_in_flight_and_lines_for_the_others(bars: Bars) -> None:
    row = boundary(20, name="step 19", step=18, started=1.0, ended=2.0)
    shown = drawn(bars, (view(head(step=19), row, steps=40), Forecast(fraction=0.5, remaining=30.0)))
    assert "✓ step 19/40 step 19 in 1.0 s" in shown
    assert "about 30 s left" in shown
    assert window(shown) == [18, 19, 20, 21, 22]


def test_the_end_of_a_long_workflow_has_a_full_window_too(bars: Bars) -> None:
    shown = drawn(bars, (view(head(step=39), steps=40), HALF))
    assert window(shown) == [36, 37, 38, 39, 40]


def test_a_finished_step_keeps_its_bar_and_the_time_of_all_its_visits(bars: Bars) -> None:
    once, again = (boundary(n, step=0, name="step 1", started=10.0 * n, ended=10.0 * n + 2) for n in (2, 3))
    done = view(attrs.evolve(head(step=1), seq=3), once, again)
    shown = drawn(bars, (done, HALF))
    assert re.search(r"1/3 step 1\s+━+\s+✓\s+4\.0 s", shown)
    assert "✓ step 1/3" not in shown, "its bar says it already"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (head(State.WAITING, signal="go"), "for signal 'go'"),
        (head(State.PAUSED), "paused"),
        (head(State.FAILED, ended=1.0), "failed"),
    ],
)
def test_the_whole_says_why_it_stands_still(bars: Bars, now: Head, said: str) -> None:
    assert re.search(rf"a +━+.*50% {said}", drawn(bars, (view(now), HALF)))
