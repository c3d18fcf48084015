"""What tests of the file store ask for; those of other stores say for themselves what theirs is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.stores.file import FileBackend
from tests.stores.file_tools import opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


@pytest.fixture
def other(path: Path) -> Iterator[FileBackend]:
    """Another object on the same files."""
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other
