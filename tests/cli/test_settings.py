"""Settings come from the flag, then the environment, then the nearest file, then the default."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest

from longrun.cli._options import Duration, Moment, Pair
from longrun.cli._settings import DEFAULT_STORE, Settings
from longrun.cli.queues import Rate
from tests.cli.conftest import call, finished, prepare, read


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    assert Settings({}, tmp_path).store() == DEFAULT_STORE
    (tmp_path / "longrun.toml").write_text('store = "redis://file"\nconcurrency = 7\n')
    assert Settings({}, tmp_path).store() == "redis://file"
    environment = {"LONGRUN_STORE": "redis://environment", "LONGRUN_CONCURRENCY": "8"}
    settings = Settings(environment, tmp_path)
    assert settings.store() == "redis://environment"
    assert settings.store("redis://flag") == "redis://flag"
    assert settings.get("concurrency", None, 100) == 8
    assert settings.get("concurrency", 9, 100) == 9
    assert Settings({}, tmp_path).get("concurrency", None, 100) == 7
    assert Settings({}, tmp_path).get("queues", (), ["all"]) == ["all"]


def test_pyproject_counts_too_and_the_nearest_file_wins(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.longrun]\nstore = "file:here"\nqueues = ["a", "b"]\n')
    inner = tmp_path / "inner"
    inner.mkdir()
    assert Settings({}, inner).store() == f"file:{tmp_path / 'here'}"
    assert Settings({}, inner).get("queues") == ["a", "b"]
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert Settings({}, inner).store() == f"file:{tmp_path / 'here'}"
    (inner / "longrun.toml").write_text('store = "sqlite:///x.db"\n')
    assert Settings({}, inner).store() == f"sqlite:///{inner / 'x.db'}"


def test_a_relative_path_in_the_environment_is_relative_to_where_one_is(tmp_path: Path) -> None:
    (tmp_path / "longrun.toml").write_text('store = "file:a"\n')
    assert Settings({"LONGRUN_STORE": "file:b"}, tmp_path).store() == "file:b"


@pytest.mark.parametrize(
    "text", ["stroe = 1\n", "concurrency = 'many'\n", "store = 3\n", "max_retries = true\n", "= broken"]
)
def test_what_a_file_cannot_mean_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "longrun.toml").write_text(text)
    with pytest.raises(click.UsageError, match=r"longrun\.toml"):
        Settings({}, tmp_path)
    call("list", code=2)


@pytest.mark.parametrize("text", ["a = " + "[" * 5000 + "]" * 5000, "concurrency = " + "9" * 5000])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "longrun.toml").write_text(text)
    with pytest.raises(click.UsageError, match=r"longrun\.toml cannot be read"):
        Settings({}, tmp_path)


@pytest.mark.parametrize("text", ["tool = 'x'\n", "tool = []\n", "[tool]\nlongrun = 1\n"])
def test_a_pyproject_that_has_no_table_of_ours_is_passed_by(tmp_path: Path, text: str) -> None:
    (tmp_path / "longrun.toml").write_text('store = "file:here"\n')
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "pyproject.toml").write_text(text)
    assert Settings({}, tmp_path / "inner").store() == f"file:{tmp_path / 'here'}"


def test_a_number_in_the_environment_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="LONGRUN_LEASE_TTL"):
        Settings({"LONGRUN_LEASE_TTL": "long"}, tmp_path).config()


def test_the_executor_is_configured_by_them(tmp_path: Path) -> None:
    (tmp_path / "longrun.toml").write_text("lease_ttl = 77\nmax_retries = 1\n")
    config = Settings({"LONGRUN_DRAIN_TIMEOUT": "3"}, tmp_path).config(auto_resume=False)
    assert (config.lease_ttl, config.max_retries, config.drain_timeout, config.auto_resume) == (77, 1, 3.0, False)


def test_they_say_how_long_an_executor_keeps_what_has_ended(tmp_path: Path) -> None:
    """As `longrun worker` and `longrun run` enter it, and not only `longrun gc`."""
    assert Settings({}, tmp_path).config().retention.max_age is None
    (tmp_path / "longrun.toml").write_text('max_age = "30d"\n')
    assert Settings({}, tmp_path).config().retention.max_age == 30 * 86_400
    assert Settings({"LONGRUN_MAX_AGE": "90"}, tmp_path).config().retention.max_age == 90
    with pytest.raises(click.UsageError, match="max_age is a duration"):
        Settings({"LONGRUN_MAX_AGE": "some"}, tmp_path).config()


def test_a_command_reads_its_store_from_them(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(url, finished("site", {}, "a"))
    call("show", "a", code=5)
    (tmp_path / "longrun.toml").write_text(f'store = "{url}"\n')
    assert read("show", "a")["execution"]["id"] == "a"
    monkeypatch.setenv("LONGRUN_STORE", f"file:{tmp_path / 'other'}")
    call("show", "a", code=5)
    assert read("show", "a", "--store", url)["execution"]["id"] == "a"


def test_a_store_can_be_an_object_of_the_application(file_url: str, tmp_path: Path) -> None:
    prepare(file_url, finished("site", {}, "a"))
    path = file_url.removeprefix("file:")
    (tmp_path / "places.py").write_text(
        f"from longrun import FileCheckpointStore\ndef make():\n    return FileCheckpointStore({path!r})\nwrong = 3\n"
    )
    assert read("show", "a", "--store", "places:make")["execution"]["state"] == "completed"
    assert "no CheckpointStore" in call("list", "--store", "places:wrong", code=2).stderr
    assert "cannot import" in call("list", "--store", "nowhere_at_all:make", code=2).stderr


@pytest.mark.parametrize(
    ("kind", "value"), [(Moment(), datetime.now(UTC)), (Duration(), 2.5), (Pair(), ("key", 1)), (Rate(), (1.0, 60.0))]
)
def test_a_default_that_is_no_text_is_taken_as_it_is(kind: click.ParamType[Any], value: object) -> None:
    """click converts what a program passes to a command, too."""
    assert kind.convert(value, None, None) == value
