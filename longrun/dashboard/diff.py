"""What changed between two states: added, removed and changed values, each with its place.

Place in the life of an execution: whenever somebody looks into one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attrs import frozen

CHANGES = 500
"""How many changes are shown."""
TEXT = 2000
"""How many characters of a value are shown beside another."""
Step = str | int


@frozen
class Change:
    path: str
    kind: str
    """added, removed, changed."""
    before: str | None
    after: str | None


def differences(before: Any, after: Any) -> tuple[list[Change], bool]:
    """The changes from one state to another, and whether there are more than are given."""
    found: list[Change] = []
    for change in _walk(before, after, ()):
        if len(found) == CHANGES:
            return found, True
        found.append(change)
    return found, False


def _walk(before: Any, after: Any, path: tuple[Step, ...]) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            yield from _pair(before, after, key, key in before, key in after, path)
    elif isinstance(before, list) and isinstance(after, list):
        for index in range(max(len(before), len(after))):
            yield from _pair(before, after, index, index < len(before), index < len(after), path)
    elif not _same(before, after):
        yield Change(_name(path), "changed", _shown(before), _shown(after))


def _pair(before: Any, after: Any, key: Any, was: bool, is_there: bool, path: tuple[Step, ...]) -> Iterator[Change]:
    here = (*path, key)
    if was and is_there:
        yield from _walk(before[key], after[key], here)
    elif was:
        yield Change(_name(here), "removed", _shown(before[key]), None)
    else:
        yield Change(_name(here), "added", None, _shown(after[key]))


def _same(before: Any, after: Any) -> bool:
    """JSON's equality: true is not 1."""
    return type(before) is type(after) and bool(before == after)


def _name(path: tuple[Step, ...]) -> str:
    return "state" + "".join(f"[{json.dumps(step, ensure_ascii=False)}]" for step in path)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= TEXT else text[: TEXT - 1] + "…"
