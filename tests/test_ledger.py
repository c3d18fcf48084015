"""The ledger alone: what a capture takes, what becomes of it, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from longrun import DuplicateKeyError, NotStorableError, TooLargeError, codec, ledger
from longrun.ledger import Cursor, Group, Ledger


def open_loop(group: Group, name: str) -> tuple[Cursor, Any]:
    key = group.claim("each", name)
    cursor = Cursor(key, group.ledger.entries.get(key))
    scope = group.item_scope(name, cursor)
    group.item_opened([*group.stack, scope])
    return cursor, scope


def values(entries: dict[str, bytes]) -> dict[str, Any]:
    return {key: codec.decode(data) for key, data in entries.items()}


def test_nothing_is_collected_before_a_capture():
    book = Ledger()
    group = book.group("")
    open_loop(group, "pages")
    group.local["n"] = 1
    assert not book.dirty
    assert book.collect() == ({}, ())


def test_a_capture_takes_cursor_and_local_of_one_moment():
    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    group.local["n"] = 1
    group.item_ended(cursor, scope)
    group.local["n"] = 2  # in the middle of the next item
    put, drop = book.collect()
    assert values(put) == {"each:pages": {"n": 1, "of": None}, "local": {"n": 1}}
    assert drop == ()
    assert not book.dirty


@pytest.mark.parametrize("value", [[1], {"a": 1}, [[1]], (1, [2]), {1, 2}])
def test_what_is_changed_after_a_capture_is_not_in_it(value):
    book = Ledger()
    group = book.group("")
    group.local["deep"] = value
    group.capture()
    if isinstance(value, list):
        value.append(9)
    elif isinstance(value, dict):
        value["z"] = 9
    elif isinstance(value, set):
        value.add(9)
    else:
        value[1].append(9)
    put, _ = book.collect()
    assert "9" not in put["local"].decode()


def test_the_next_attempt_is_given_the_last_capture():
    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    group.local["list"] = [1]
    group.item_ended(cursor, scope)
    group.local["list"].append(2)
    book.forget_groups()
    again = book.group("")
    assert again.local == {"list": [1]}
    assert Cursor("each:pages", book.entries["each:pages"]).n == 1
    assert again.local["list"] is not group.local["list"]


def test_a_closed_context_changes_nothing_any_more():
    """A thread that an attempt left behind may still be in the middle of an item."""
    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    group.record(group.claim("once", "fetch"), b"1")
    book.forget_groups()
    before = dict(book.entries)
    book.collect()
    group.local["n"] = 1
    group.item_ended(cursor, scope)
    group.record("late", b"1")
    assert book.entries == before
    assert not book.dirty
    assert book.collect() == ({}, ())


def test_keys_of_an_item_go_with_the_capture_that_saves_past_it():
    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    key = group.claim("once", "fetch")
    group.record(key, b"1")
    assert key == "pages#0/once:fetch"
    put, _ = book.collect()
    assert key in put
    group.item_ended(cursor, scope)
    put, drop = book.collect()
    assert values(put) == {"each:pages": {"n": 1, "of": None}}
    assert drop == (key,)
    assert group.claim("once", "fetch") == "pages#1/once:fetch"


def test_keys_of_nested_items_go_with_the_outer_one():
    book = Ledger()
    group = book.group("")
    outer, outer_scope = open_loop(group, "outer")
    inner, inner_scope = open_loop(group, "inner")
    group.record(group.claim("once", "a"), b"1")
    group.item_ended(inner, inner_scope)
    group.record(group.claim("once", "a"), b"2")
    book.collect()
    group.item_ended(outer, outer_scope)
    put, drop = book.collect()
    assert values(put) == {"each:outer": {"n": 1, "of": None}}
    assert sorted(drop) == ["outer#0/each:inner", "outer#0/inner#1/once:a"]
    assert set(book.entries) == {"each:outer"}


def test_what_an_earlier_attempt_left_of_an_item_goes_with_it_too():
    book = Ledger({"each:pages": codec.dumps({"n": 1, "of": 3}), "pages#1/once:old": b"1", "pages#1/x#0/once:y": b"1"})
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    group.item_ended(cursor, scope)
    _, drop = book.collect()
    assert sorted(drop) == ["pages#1/once:old", "pages#1/x#0/once:y"]


@pytest.mark.parametrize("name", ["a/b", "a#1", "100%", "a%2Fb", "#", "/", "each:a"])
def test_names_with_special_letters_do_not_meet(name):
    book = Ledger()
    group = book.group("")
    others = {group.claim("once", other) for other in ("a", "b", "1", "a%2Fb#", "%23x")}
    key = group.claim("once", name)
    assert key not in others
    assert "/" not in key
    assert "#" not in key


def test_a_name_is_used_once_in_a_scope_and_again_in_the_next_item():
    group = Ledger().group("")
    cursor, scope = open_loop(group, "pages")
    group.claim("once", "a")
    with pytest.raises(DuplicateKeyError):
        group.claim("once", "a")
    group.item_ended(cursor, scope)
    group.claim("once", "a")


def test_kinds_of_names_do_not_meet():
    group = Ledger().group("")
    assert len({group.claim(kind, "a") for kind in ("once", "each", "map")}) == 3


def test_the_end_of_a_branch_leaves_its_result_alone():
    book = Ledger({"map:m/0/once:old": b"1", "map:m/01/once:other": b"1"})
    book.group("")
    branch = book.group("map:m/0/")
    branch.local["n"] = 1
    branch.record(branch.claim("once", "a"), b"1")
    branch.capture()
    book.collect()
    book.finish("map:m/0/", "map:m/0", b"7")
    put, drop = book.collect()
    assert put == {"map:m/0": b"7"}
    assert sorted(drop) == ["map:m/0/local", "map:m/0/once:a", "map:m/0/once:old"]
    branch.local["n"] = 2
    branch.capture()
    branch.record("map:m/0/once:late", b"1")
    assert not book.dirty


def test_a_local_emptied_is_stored_as_empty():
    book = Ledger({"local": b'{"a":1}'})
    group = book.group("")
    group.local.clear()
    group.capture()
    put, _ = book.collect()
    assert put == {"local": b"{}"}


def test_an_unchanged_local_is_not_written_again():
    book = Ledger()
    group = book.group("")
    group.local["a"] = [1]
    group.capture()
    book.collect()
    group.capture()
    assert book.collect() == ({}, ())


def test_a_local_that_cannot_be_stored_is_refused_where_it_is_captured():
    group = Ledger().group("")
    group.local["client"] = object()
    with pytest.raises(NotStorableError, match=r"local\['client'\]"):
        group.capture()


def test_a_local_too_large_fails_the_step_and_never_the_saver(monkeypatch):
    """A small dict of scalars is encoded when it is saved, which may be by the clock, in no step at all."""

    def refuse(*args, **options):
        raise TooLargeError("local", 2, 1)

    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    group.local["a"] = 1
    group.item_ended(cursor, scope)
    monkeypatch.setattr(codec, "encode", refuse)
    assert book.collect() == ({}, ())  # neither the cursor without its local, nor an error here
    with pytest.raises(TooLargeError):
        group.capture()


def test_a_dear_local_is_captured_less_often_but_always_whole(monkeypatch):
    """Above a millisecond for one, and a second in all, encoding takes a fifth of the time at most; a forced capture is
    always taken."""
    monkeypatch.setattr(ledger, "CHEAP", 0.0)
    monkeypatch.setattr(ledger, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(ledger, "SHARE", 0.0)
    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    group.local["list"] = [0]
    group.item_ended(cursor, scope)
    group.record(group.claim("once", "a"), b"1")
    group.local["list"].append(1)
    group.item_ended(cursor, scope)  # left out
    put, drop = book.collect()
    assert values(put) == {"each:pages": {"n": 1, "of": None}, "local": {"list": [0]}, "pages#1/once:a": 1}
    assert drop == ()
    assert group.capture(force=True)
    put, drop = book.collect()
    assert values(put) == {"each:pages": {"n": 2, "of": None}, "local": {"list": [0, 1]}}
    assert drop == ("pages#1/once:a",)


def test_a_cheap_local_is_captured_at_every_item(monkeypatch):
    monkeypatch.setattr(ledger, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(ledger, "SHARE", 0.0)
    monkeypatch.setattr(ledger, "CHEAP", 60.0)
    book = Ledger()
    group = book.group("")
    cursor, scope = open_loop(group, "pages")
    for n in range(200):
        group.local.setdefault("list", []).append(n)
        group.item_ended(cursor, scope)
    assert values(book.collect()[0])["local"] == {"list": list(range(200))}
