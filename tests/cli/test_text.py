"""What reaches a terminal is escaped; times, durations and secrets are shown as people expect."""

from __future__ import annotations

import json

import click
import pytest

from longrun.cli import _text as text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain ✓", "plain ✓"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\tb\r\nc", "a\\tb\\r\\nc"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        (7, "7"),
    ],
)
def test_unprintable_characters_are_shown_as_numbers(value: object, expected: str) -> None:
    assert text.clean(value) == expected
    assert text.clean(value).isprintable()


def test_lines_can_be_kept_and_long_text_is_cut() -> None:
    assert text.clean("a\nb\x07", lines=True) == "a\nb\\x07"
    assert text.clean("x" * 50, limit=10) == "x" * 9 + "…"


def test_json_is_still_json_and_cannot_move_the_cursor() -> None:
    value = {"a": "\x1b[31m\x9b\u202e\U000e0041 ä", "b": [1, None]}
    shown = text.json_text(value)
    assert shown.isprintable()
    assert "ä" in shown
    assert json.loads(shown) == value
    assert json.loads(text.json_text(value, indent=2)) == value


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *[
            (0.04, "0.0 s"),
            (1.26, "1.3 s"),
            (9.96, "10 s"),
            (59.4, "59 s"),
            (59.6, "1 min 00 s"),
            (3599.9, "1 h 00 min"),
        ],
        *[(7260, "2 h 01 min"), (90000, "1 d 1 h"), (-3, "0.0 s"), (None, "–")],
    ],
)
def test_durations(seconds: float | None, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("given", "seconds"), [("90", 90), ("15m", 900), ("2 h", 7200), ("1.5d", 129600), ("1w", 604800)]
)
def test_durations_are_read(given: str, seconds: float) -> None:
    assert text.parse_duration(given) == seconds


@pytest.mark.parametrize(
    ("per_second", "expected"),
    [(None, "–"), (1234.0, "1,234/s"), (2.5, "2.5/s"), (0.5, "30.0/min"), (1 / 3600, "1.0/h")],
)
def test_a_rate_is_never_shown_as_nothing(per_second: float | None, expected: str) -> None:
    assert text.rate(per_second) == expected


@pytest.mark.parametrize("given", ["", "x", "3 years", "-3s", "1h30"])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        text.parse_duration(given)


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://me:s3cret@host/db",
        "redis://:s3cret@host:6379/0",
        "cannot reach postgresql://me:s3c@s3c/s3c:x@host, sorry",
        "postgresql://host/db?user=me&password=s3cret&x=1",
        "host=h password=s3cret dbname=d",
        "replicated:?primary=postgresql://me:s3cret@host/db&secondary=redis://:s3cret@host",
        "replicated:?primary=postgresql%3A%2F%2Fme%3As3cret%40host%2Fdb&secondary=redis%3a%2f%2f%3as3c%2540ret%40host",
        "replicated:?primary=file:a&secondary=postgresql%3A//me%3As3cret%40host/db",
        "replicated:?primary=postgresql%3A%2F%2Fhost%2Fdb%3Fuser%3Dme%26password%3Ds3cret%26x%3D1&secondary=file:a",
        "postgresql://me@host/db?sslmode=require&sslpassword=s3cret",
        "rediss://host/0?ssl_password=s3cret&ssl_keyfile_password=s3cret",
        "replicated:?primary=postgresql%3A%2F%2Fhost%2Fdb%3Fa%3D1%26sslpassword%3Ds3cret&secondary=file:b",
        "replicated:?primary=rediss%3A%2F%2Fhost%3Fssl_password%3Ds3cret&secondary=file:b",
    ],
)
def test_passwords_are_hidden(given: str) -> None:
    assert "s3c" not in text.hide_secrets(given)
    assert "***" in text.hide_secrets(given)


@pytest.mark.parametrize(
    "given",
    [
        "replicated:?primary=postgresql%3A%2F%2Fhost%2Fdb&secondary=redis%3A%2F%2Fhost%3A6379%2F0&mode=async",
        "postgresql://me@host/db",
        "file:/srv/a%40b",
        pytest.param("a" * 100_000, id="long"),
    ],
)
def test_what_has_no_password_is_shown_as_it_is(given: str) -> None:
    assert text.hide_secrets(given) == given


def test_every_state_has_a_word_a_glyph_and_a_colour() -> None:
    from longrun import ExecutionState

    assert set(text.STATES) == {state.value for state in ExecutionState}
    glyphs = [glyph for glyph, _ in text.STATES.values()]
    assert len(set(glyphs)) == len(glyphs)
    assert all(state in text.state_text(state) for state in text.STATES)


def test_columns_line_up_whatever_their_colours() -> None:
    rows = [(text.state_text("failed"), "1"), ("x", "200")]
    lines = [click.unstyle(line) for line in text.table(("state", "n"), rows, right=(1,))]
    assert lines == ["STATE       N", "✗ failed    1", "x         200"]


def test_a_moment_that_never_came_has_no_age() -> None:
    assert text.age(None) == text.moment(None) == "–"
