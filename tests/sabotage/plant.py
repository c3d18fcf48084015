"""The pytest plugin of the child process that runs a test on a sabotaged library: `--sabotage=NAME`."""

from __future__ import annotations

import os

import pytest

from tests.campaign.forks import SABOTAGE
from tests.sabotage import bugs
from tests.sabotage.bug import NothingToPlantError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sabotage", metavar="NAME", help="plant this bug in the library before any test runs")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--sabotage")
    if name is None:
        return
    os.environ[SABOTAGE] = name  # for the processes that a storm kills
    try:
        bugs.BUGS[name].plant()
    except (KeyError, NothingToPlantError, ImportError) as error:
        raise pytest.UsageError(f"cannot plant {name}: {type(error).__name__}: {error}") from error
