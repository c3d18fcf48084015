"""The URL of a pair: the URLs of its stores, percent-encoded, and what else the pair is told.

Place in the life of an execution: before it. No part of such a URL is ever shown: an `&` that somebody forgot to encode
would cut a password in two, and the half of it would look like a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from urllib.parse import quote, unquote

from attrs import field, frozen

from longrun.errors import StoreSettingsError

FORM = "replicated:?primary=URL&secondary=URL[&witness=URL][&mode=async]"
STORES = ("primary", "secondary", "witness")
OPTIONS: dict[str, Callable[[str], object]] = {
    "mode": str,
    "health_interval": float,
    "max_failovers": int,
    "failover_reset": float,
    "failback_after": float,
    "strikes": int,
    "queue_limit": int,
}
"""Those of `ReplicatedCheckpointStore`, and how each is read. `single_process` is none of them: whoever looks at the
pair with the same URL is a second process."""
KNOWN = (*STORES, "witness_name", *OPTIONS)


@frozen(kw_only=True)
class Address:
    primary: str = field(repr=False)
    secondary: str = field(repr=False)
    witness: str | None = field(repr=False)
    witness_name: str | None
    options: Mapping[str, object]


def parse(url: str) -> Address:
    """What a URL of the form `FORM` says; `StoreSettingsError` if it is none."""
    found = _parts(url)
    for name in ("primary", "secondary"):
        if not found.get(name):
            raise _wrong(f"it names no {name}")
    for name in STORES:
        if found.get(name, "").startswith("replicated:"):
            raise _wrong(f"its {name} is a pair itself")
    if len({found[name] for name in STORES if name in found}) < len([name for name in STORES if name in found]):
        raise _wrong("two of its stores are the same")
    witness = found.get("witness", "")
    if witness.startswith("memory:"):
        raise _wrong("a witness in memory is not shared by anybody")
    if "witness_name" in found and (not witness or witness.startswith("file:")):
        raise _wrong("a witness_name is for a witness in a database: give each pair a directory of its own otherwise")
    return Address(
        primary=found["primary"],
        secondary=found["secondary"],
        witness=found.get("witness"),
        witness_name=found.get("witness_name"),
        options={name: _value(name, found[name]) for name in OPTIONS if name in found},
    )


def with_stores(url: str, change: Callable[[str], str]) -> str:
    """The same URL with the URLs in it changed."""
    found = _parts(url)
    changed = {name: change(value) if name in STORES else value for name, value in found.items()}
    return "replicated:?" + "&".join(f"{name}={quote(value, safe='/:')}" for name, value in changed.items())


def _parts(url: str) -> dict[str, str]:
    scheme, _, rest = url.partition(":?")
    if scheme != "replicated" or not rest:
        raise _wrong("it names no stores")
    found: dict[str, str] = {}
    for number, part in enumerate(rest.split("&"), 1):
        name, _, value = part.partition("=")
        if name not in KNOWN:
            like = "".join(f", most like {one}," for one in get_close_matches(name, KNOWN, 1, 0.7))
            known = ", ".join(KNOWN)
            raise _wrong(f"part {number} of it{like} is none of {known}; an & inside the URL of a store is written %26")
        if name in found:
            raise _wrong(f"it has more than one {name}")
        found[name] = unquote(value)
    return found


def _value(name: str, text: str) -> object:
    try:
        return OPTIONS[name](text)
    except ValueError:
        raise _wrong(f"its {name} is not a number") from None


def _wrong(problem: str) -> StoreSettingsError:
    return StoreSettingsError("replicated", f"{problem}; write {FORM}, the URLs in it percent-encoded")
