"""The URL of a Redis or Valkey server: which parameters are the store's own, and whether the driver knows the rest.

Place in the life of an execution: before it. A name is shown only where it cannot be a piece of a password.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from longrun.errors import StoreSettingsError

OWN = ("prefix", "finished_ttl", "timeout", "connect_timeout", "max_connections")
"""Arguments of the store that its URL may hold."""
_TEXTS = ("username", "password", "client_name")
_UNUSABLE = "retry_on_error"
"""The driver wants classes of errors there, and a URL has only text."""


def own_options(url: str) -> tuple[str, dict[str, Any]]:
    """The URL for the driver, and the store's own options. What is no number stays text, for the store to refuse."""
    front, _, query = url.partition("?")
    parts = [part.partition("=") for part in query.split("&")]
    own = {name: unquote(value) for name, _, value in parts if name in OWN}
    if not own:
        return url, {}
    rest = "&".join("".join(part) for part in parts if part[0] not in OWN)
    values = {name: text if name == "prefix" else _number(text) for name, text in own.items()}
    return f"{front}?{rest}" if rest else front, values


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def check_parameters(url: str, driver: Any) -> None:
    """Refuse what the driver would refuse when it first connects, or could not use as text."""
    _, _, query = url.partition("?")
    names = [unquote(part.partition("=")[0]) for part in query.split("&") if part]
    if not names:
        return
    given = driver.connection.parse_url(url)
    kind = given.pop("connection_class", driver.Connection)
    for name in names:
        if name not in given or not _is_known(name, driver) or not _takes(kind, name, given[name]):
            hidden = "@" in query or "password" in names
            which = "a parameter" if hidden else f"the parameter {name!r}"
            problem = f"{which} of the URL is not known to {url.partition(':')[0]}://, or has no value that will do"
            raise StoreSettingsError("Redis", problem)


def _is_known(name: str, driver: Any) -> bool:
    parsed = name in driver.connection.URL_QUERY_ARGUMENT_PARSERS and name != _UNUSABLE
    return parsed or name in _TEXTS or name.startswith("ssl_")


def _takes(kind: Any, name: str, value: object) -> bool:
    """Whether a connection can be made with it. Making one does not connect."""
    try:
        kind(**{name: value})
    except Exception:  # whatever the driver thinks of it
        return False
    return True
