"""`longrun queues`: what waits in each queue, and limits that every worker keeps to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import APP, ROOT, call, environment, prepare, read, submitted


def test_queues_are_listed_with_their_limits(url: str) -> None:
    prepare(url, submitted("site", "a"), submitted("site", "b", queue="gpu"), submitted("site", "c", queue="gpu"))
    call("queues", "limit", "gpu", "--concurrency", "2", "--rate", "10/1m", "--store", url)
    blank = {"running": 0, "concurrency": None, "rate": None, "per_seconds": None}
    assert read("queues", "--store", url)["queues"] == [
        {"name": "default", "queued": 1, **blank},
        {"name": "gpu", "queued": 2, **blank, "concurrency": 2, "rate": 10.0, "per_seconds": 60.0},
    ]
    shown = call("queues", "--store", url).output
    assert "10 in 60 s" in shown
    assert "any" in shown


def test_a_limit_is_shown_when_it_is_set_and_goes_with_off(url: str) -> None:
    prepare(url)
    (set_to,) = read("queues", "limit", "gpu", "--concurrency", "0", "--store", url)["queues"]
    assert (set_to["name"], set_to["concurrency"]) == ("gpu", 0)
    (gone,) = read("queues", "limit", "gpu", "--off", "--store", url)["queues"]
    assert (gone["concurrency"], gone["rate"]) == (None, None)
    assert read("list", "--store", url)["executions"] == [], "a queue is no execution"
    assert read("store", "info", "--store", url)["counts"]["paused"] == 0
    assert read("workers", "--store", url)["workers"] == []


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--off", "--concurrency", "1"),
        ("--concurrency", "-1"),
        ("--rate", "many"),
        ("--rate", "10/soon"),
        ("--rate", "/60s"),
    ],
)
def test_a_limit_that_makes_no_sense_is_a_wrong_call(file_url: str, words: tuple[str, ...]) -> None:
    prepare(file_url)
    call("queues", "limit", "gpu", *words, "--store", file_url, code=2)
    assert len(read("queues", "--store", file_url)["queues"]) == 1


def test_a_rate_of_nothing_is_refused(file_url: str) -> None:
    prepare(file_url)
    assert "above 0" in call("queues", "limit", "gpu", "--rate", "0/1s", "--store", file_url, code=2).stderr


# --- a worker that cannot have its store ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "code", "words"),
    [
        ("nonsense", 5, "a URL is needed"),
        ("mysql://u:s3cret@host/db", 5, "'mysql' is no kind of store"),
        ("sqlite:relative.db", 5, "sqlite:///PATH"),
        ("file:", 5, "names no directory"),
        ("postgresql://me:s3cret@127.0.0.1:1/db", 5, "postgres"),
        ("redis://:s3cret@127.0.0.1:1/0", 5, "Redis"),
        ("redis://:s3cret@127.0.0.1:port/0", 5, "redis"),
    ],
)
def test_a_worker_says_in_a_line_why_it_cannot_have_its_store(store: str, code: int, words: str) -> None:
    """And never what the password is."""
    result = subprocess.run(
        [sys.executable, "-m", "longrun", "worker", APP, "--store", store],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == code, said
    assert words in said
    assert "s3cret" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("scheme", "module", "extra"), [("postgresql", "psycopg", "postgres"), ("redis", "redis", "redis")]
)
def test_a_worker_without_the_driver_says_what_to_install(scheme: str, module: str, extra: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from longrun.cli import main\n"
        f"main(['worker', {APP!r}, '--store', '{scheme}://u:s3cret@127.0.0.1:1/0'])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = result.stdout + result.stderr
    assert result.returncode == 5, said
    assert f"longrun[{extra}]" in said
    assert len(said.strip().splitlines()) == 1, said
