"""The programs of every page of the documentation run, and print what it shows: `tests/test_docs.py` says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_docs import READ_FIRST, cases, check_programs, with_programs


@pytest.mark.parametrize("page", cases(page for page in with_programs() if page not in READ_FIRST))
def test_the_programs_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    check_programs(page, tmp_path)


def test_those_that_are_read_first_have_programs() -> None:
    """They run with plain `pytest`."""
    assert set(READ_FIRST) <= set(with_programs())
