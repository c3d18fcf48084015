"""`longrun demo`: the point of this library in under twenty seconds."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from longrun.cli.demo_app import PAGES

KILL_AT = PAGES // 2


@click.command("demo")
@click.option("--keep", is_flag=True, help="Keep the directory, to look at its files.")
def demo_command(keep: bool) -> None:
    """Run a workflow, kill it with SIGKILL in the middle of a step, and watch it go on."""
    from rich.console import Console

    console = Console(highlight=False)
    with _directory(keep) as directory:
        console.print("[bold]longrun demo[/]: plan → crawl (150 pages) → report, checkpointed in files\n")
        before = _first_life(console, directory)
        after = _second_life(console, directory)
        ok = _judge(console, directory, before, after)
        if keep:
            console.print(f"\nThe store and the log of effects are in {directory}")
    if not ok:
        raise SystemExit(1)


@contextlib.contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    if keep:
        yield Path(tempfile.mkdtemp(prefix="longrun-demo-"))
    else:
        with tempfile.TemporaryDirectory(prefix="longrun-demo-") as name:
            yield Path(name)


def _first_life(console, directory: Path) -> int:  # type: ignore[no-untyped-def]  # rich is imported when needed
    """Run the program until half the pages are done, then kill it; how many pages it had done."""
    with _program(directory) as program, _bar(console, "first run ") as bar:
        while (done := _pages(directory)) < KILL_AT:
            _check(program, bar, done)
        program.send_signal(signal.SIGKILL)
        program.wait()
        done = _pages(directory)
        bar(done)
    console.print(f"   [red]✗ SIGKILL[/] in the middle of step 2, after {done} of {PAGES} pages\n")
    return done


def _second_life(console, directory: Path) -> int:  # type: ignore[no-untyped-def]  # rich is imported when needed
    """Start the same program again and let it end; at which page it went on."""
    lines = len(_effects(directory))
    with _program(directory) as program, _bar(console, "second run") as bar:
        while program.poll() is None:
            bar(len(set(_effects(directory))))
            time.sleep(0.02)
        bar(PAGES)
    if program.returncode != 0:
        raise click.ClickException(f"the second run ended with exit code {program.returncode}")
    first = next((effect for effect in _effects(directory)[lines:] if effect.startswith("page ")), f"page {PAGES}")
    return int(first.removeprefix("page "))


def _judge(console, directory: Path, killed_at: int, resumed_at: int) -> bool:  # type: ignore[no-untyped-def]
    counts = Counter(_effects(directory))
    again = sorted(effect for effect, count in counts.items() if count > 1)
    steps_again = [effect for effect in again if not effect.startswith("page ")]
    missing = [page for page in range(PAGES) if f"page {page}" not in counts]
    console.print(
        f"   [green]✓[/] went on at page {resumed_at}: {killed_at - resumed_at} of {killed_at} pages done again"
    )
    ok = not steps_again and not missing and counts["plan"] == counts["report"] == 1
    if ok:
        console.print("   [green]✓[/] no finished step ran twice, and no page was lost")
    else:
        console.print(f"   [red]✗[/] ran twice: {', '.join(steps_again) or 'nothing'}; lost: {missing or 'nothing'}")
    return ok


@contextlib.contextmanager
def _program(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-m", "longrun.cli.demo_app", str(directory)]) as program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.kill()


@contextlib.contextmanager
def _bar(console, title: str):  # type: ignore[no-untyped-def]  # rich is imported when needed
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TextColumn("pages"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=PAGES)
        yield lambda done: progress.update(task, completed=min(done, PAGES))


def _check(program: subprocess.Popen[bytes], bar, done: int) -> None:  # type: ignore[no-untyped-def]
    if program.poll() is not None:
        raise click.ClickException(f"the first run ended early, with exit code {program.returncode}")
    bar(done)
    time.sleep(0.02)


def _pages(directory: Path) -> int:
    return sum(effect.startswith("page ") for effect in _effects(directory))


def _effects(directory: Path) -> list[str]:
    log = directory / "effects.log"
    return [line.split(" ", 1)[1] for line in log.read_text().splitlines()] if log.exists() else []
