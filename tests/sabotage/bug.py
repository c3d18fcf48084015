"""A bug: a name, the tests that must catch it, and how it is planted in the library.

Planting is by name and loud: an attribute or a line that is no longer there is an error, never a bug that does nothing.
"""

from __future__ import annotations
import __future__ as future

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

from attrs import frozen

Plant = Callable[[], None]
BUGS: dict[str, Bug] = {}


@frozen
class Bug:
    name: str
    says: str
    tests: tuple[str, ...]
    plant: Plant
    quick: bool
    """Whether `pytest tests/campaign` plants it too, without `--thorough`."""


class NothingToPlantError(Exception):
    """The library has changed: the place for a bug is gone, and whoever changed it says where it belongs now."""


def bug(name: str, *tests: str, quick: bool = False) -> Callable[[Plant], Plant]:
    """Register a function that plants a bug; its docstring says what is wrong then."""

    def register(plant: Plant) -> Plant:
        if name in BUGS:
            raise ValueError(f"two bugs are called {name}")
        BUGS[name] = Bug(name, (plant.__doc__ or "").strip(), tests, plant, quick)
        return plant

    return register


def replace(module: str, attribute: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the place of `Class.method` or of a function, wherever it was imported to."""
    holder, name, original = _find(module, attribute)
    planted = make(original)
    if isinstance(inspect.getattr_static(holder, name), staticmethod):
        planted = staticmethod(planted)
    setattr(holder, name, planted)
    if isinstance(holder, ModuleType):
        _replace_imports(name, original, planted)


def edit(module: str, attribute: str, *pieces: str) -> None:
    """Put the function itself, with pieces of its text changed (old, new, old, new …), in its own place."""
    holder, name, original = _find(module, attribute)
    text = textwrap.dedent(inspect.getsource(original))
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        text = swap(text, old, new)
    home = importlib.import_module(module)
    made: dict[str, Any] = {}
    code = compile(text, f"<planted {attribute}>", "exec", future.annotations.compiler_flag, dont_inherit=True)
    exec(code, vars(home), made)
    setattr(holder, name, made[name])
    if isinstance(holder, ModuleType):
        _replace_imports(name, original, made[name])


def swap(text: str, old: str, new: str) -> str:
    """For statements and scripts: one place, or it is not there any more."""
    if text.count(old) != 1:
        raise NothingToPlantError(f"there is {text.count(old)} times {old!r}")
    return text.replace(old, new)


def _find(module: str, attribute: str) -> tuple[Any, str, Any]:
    holder: Any = importlib.import_module(module)
    *outer, name = attribute.split(".")
    for part in outer:
        holder = getattr(holder, part, None)
    if holder is None or name not in vars(holder):
        raise NothingToPlantError(f"{module} has no {attribute} of its own any more")
    return holder, name, getattr(holder, name)


def _replace_imports(name: str, original: Any, planted: Any) -> None:
    for other, found in list(sys.modules.items()):
        if other.startswith("longrun") and vars(found).get(name) is original:
            setattr(found, name, planted)
