"""Log lines: the application's own set-up is respected, and there is one for those without."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

import longrun.logging
from longrun import ConfigError, ExecutionFailedError, Executor, StepContext
from longrun.logging import get_logger
from tests.crashing import ONE, registry_of

ROOT = Path(__file__).parent.parent
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """structlog as a program finds it, before and after."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


async def fail() -> None:
    async def work(ctx: StepContext, state: Any) -> None:
        ctx.log.warning("mine", page=7)
        raise ValueError(SECRET)

    async with Executor(registry_of(work, retry=ONE), store="memory:") as executor:
        with pytest.raises(ExecutionFailedError):
            await (await executor.start("work", {"password": SECRET}, id="x")).result()


async def test_the_applications_own_configuration_gets_every_line() -> None:
    heard = LogCapture()
    structlog.configure(processors=[heard])
    await fail()
    [mine] = [line for line in heard.entries if line["event"] == "mine"]
    assert mine == {
        "event": "mine",
        "log_level": "warning",
        "page": 7,
        "execution": "x",
        "workflow": "work",
        "step": "work",
        "attempt": 1,
    }
    [failed] = [line for line in heard.entries if line["event"] == "step.failed"]
    assert (failed["error_type"], failed["log_level"]) == ("ValueError", "info")
    assert not any(SECRET in str(line) for line in heard.entries), "neither a state nor an error's text"


def test_a_configuration_that_comes_later_counts_too() -> None:
    log = get_logger(execution="x")
    first, second = LogCapture(), LogCapture()
    log.info("before")
    structlog.configure(processors=[first])
    log.info("one")
    structlog.configure(processors=[second])
    log.info("two")
    assert [line["event"] for line in first.entries] == ["one"]
    assert second.entries == [{"event": "two", "execution": "x", "log_level": "info"}]


def test_without_any_the_standard_library_gets_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longrun"):
        get_logger(execution="x").info("step.failed", problem="two words\x1b[2J")
    assert caplog.messages == ["step.failed execution=x problem='two words\\x1b[2J'"]
    assert caplog.records[0].name == "longrun"


def run(code: str) -> subprocess.CompletedProcess[str]:
    program = f"from longrun.logging import configure, get_logger\nlog = get_logger(execution='x')\n{code}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_nothing_is_printed_below_a_warning_unless_asked_for() -> None:
    done = run("log.info('quiet')\nlog.warning('loud')")
    assert (done.stdout, done.stderr) == ("", "loud execution=x\n")


def test_configure_writes_to_standard_error_from_a_level_on() -> None:
    done = run("configure('warning')\nlog.info('quiet')\nlog.warning('loud', n=3)\nimport structlog\n"
               "structlog.get_logger().error('yours')")  # fmt: skip
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.split()[1:] == ["[warning", "]", "loud", "execution=x", "n=3"]
    assert "yours" in second
    assert "\x1b" not in done.stderr, "no colours where there is no terminal"


def test_configure_can_write_json() -> None:
    done = run("configure(json=True)\nlog.info('told', n=3)\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
               "    log.exception('broke')")  # fmt: skip
    told, broke = map(json.loads, done.stderr.splitlines())
    assert (told["event"], told["level"], told["execution"], told["n"]) == ("told", "info", "x", 3)
    assert told["timestamp"].endswith("Z")
    assert broke["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_no_field_can_steer_a_terminal() -> None:
    done = run("configure()\nlog.warning('told', problem='a\\x1b[2Jb\\nfake line')")
    [line] = done.stderr.splitlines()
    assert "x1b[2Jb" in line
    assert "\x1b" not in line


def test_nor_where_the_standard_library_writes_it(caplog: pytest.LogCaptureFixture) -> None:
    get_logger(execution="a\rb").warning("told", problem="c\x1b[2Jd\nfake line\x9b2J")
    [record] = caplog.records
    assert record.getMessage().isprintable()


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="loudly"):
        longrun.logging.configure("loudly")
    assert not structlog.is_configured()
