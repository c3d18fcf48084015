"""What the campaign's tests share: a seed that a failure prints, and time in proportion to the size."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

SEED = "LONGRUN_CAMPAIGN_SEED"
SECONDS_EACH = 6.0
"""What one kill, fault or round may take at most, on a busy machine."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = 100.0 + SECONDS_EACH * int(config.getoption("--campaign-size"))
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture
def campaign_seed() -> int:
    """Another one in every run, printed with a failure; the environment variable gives it back."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(2**32))
    print(f"{SEED}={seed}")
    return seed
