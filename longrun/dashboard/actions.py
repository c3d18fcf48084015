"""Pause, resume, cancel, retry, signal and fork: what the page may do where control is allowed.

Place in the life of an execution: beside it. Each request opens a client of its own, which leaves when it is answered:
a dashboard that is only looked at is no owner of anything.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import anyio
from attrs import frozen
from starlette.datastructures import QueryParams

from longrun.client import Client
from longrun.dashboard.listing import SHAPE, Filters, Listing
from longrun.desk import UNCHANGED
from longrun.errors import ConfigError, LongrunError, StoreUnavailableError
from longrun.records import check_id
from longrun.stores.store import CheckpointStore

BODY_LIMIT = 1_000_000
WAIT = 3.0
"""How long to wait for the effect of one request; it stays stored after that."""
BULK_WAIT = 1.0
BULK_PAGE = 200
BULK_AT_ONCE = 16
WHOM = f'give one of "ids" (at most {BULK_PAGE}), "filter" (such as "state=running") and "all" (true)'

Verb = Callable[[Client, str, Mapping[str, Any], float], Awaitable[dict[str, Any]]]


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object that a request carries; an empty one if it carries nothing. The standard library reads it: a
    number that somebody sends keeps all its digits."""
    if not data:
        return {}
    try:
        value = json.loads(str(data, "utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ConfigError("body", "…", "give a JSON object") from None
    if not isinstance(value, dict):
        raise ConfigError("body", type(value).__name__, "give a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


async def _pause(client: Client, id: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    await client.pause(id, hold=True, interrupt=body.get("interrupt") is True, timeout=timeout)
    return {}


async def _resume(client: Client, id: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    await client.resume(id, state=body.get("state", UNCHANGED), timeout=timeout)
    return {}


async def _cancel(client: Client, id: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    await client.cancel(id, body.get("reason"), children=body.get("children") is True, timeout=timeout)
    return {}


async def _retry(client: Client, id: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    await client.retry(id, state=body.get("state", UNCHANGED), timeout=timeout)
    return {}


async def _signal(client: Client, id: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Its time-out is that of the store, and not of an effect: nobody knows what became of it."""
    name: Any = body.get("name")
    try:
        await client.signal(id, name, body.get("payload"), key=body.get("key"), timeout=timeout)
    except TimeoutError:
        problem = f"nothing within {timeout:g} s; the signal may or may not be stored (with a key it can be sent again)"
        raise StoreUnavailableError(client.store.backend.kind, problem) from None
    return {}


async def _fork(client: Client, id: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    state, new_id = body.get("state", UNCHANGED), body.get("new_id")
    made = await client.fork(id, checkpoint=body.get("checkpoint"), state=state, new_id=new_id)
    return {"id": made.id}


VERBS: Mapping[str, Verb] = {
    "pause": _pause,
    "resume": _resume,
    "cancel": _cancel,
    "retry": _retry,
    "signal": _signal,
    "fork": _fork,
}
BULK_VERBS = ("pause", "resume", "cancel")


@frozen
class Outcome:
    """What a control request came to."""

    done: bool
    data: dict[str, Any]


class Actions:
    def __init__(self, store: CheckpointStore, listing: Listing) -> None:
        self._store, self._listing = store, listing

    async def one(self, id: str, verb: str, body: Mapping[str, Any]) -> Outcome:
        async with Client(self._store) as client:
            try:
                return Outcome(True, await VERBS[verb](client, check_id(id), body, WAIT))
            except TimeoutError:
                return Outcome(False, {"note": f"the {verb} is stored; it takes effect at the next checkpoint"})

    async def many(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The ids given, or a page of what a filter matches, or of everything."""
        ids, follows = await self._chosen(body)
        answers: dict[str, str | None] = {}
        limiter = anyio.CapacityLimiter(BULK_AT_ONCE)

        async def act(client: Client, id: str) -> None:
            async with limiter:
                answers[id] = await _attempt(client, id, verb, body)

        async with Client(self._store) as client, anyio.create_task_group() as tasks:
            for id in ids:
                tasks.start_soon(act, client, id)
        refused = [{"id": id, "error": error} for id, error in answers.items() if error is not None]
        return {"done": len(answers) - len(refused), "refused": refused, "next": follows}

    async def _chosen(self, body: Mapping[str, Any]) -> tuple[list[str], str | None]:
        whom = {name: body[name] for name in ("ids", "filter", "all") if body.get(name) is not None}
        match whom:
            case {"ids": list(ids)} if len(whom) == 1 and len(ids) <= BULK_PAGE:
                return [check_id(id) for id in dict.fromkeys(map(str, ids))], None
            case {"filter": str(given)} if len(whom) == 1:
                filters = _filters(given, body.get("after"))
                if not filters.chooses:
                    raise ConfigError("filter", given, f"it leaves nothing out; {WHOM}")
            case {"all": True} if len(whom) == 1:
                filters = _filters("", body.get("after"))
            case _:
                raise ConfigError("ids", "…", WHOM)
        found, follows = await self._listing.find(filters)
        return [one.definition.id for one in found], follows


def _filters(given: str, after: object) -> Filters:
    """A page of what a filter matches, in an order that changes do not disturb."""
    chosen = [(name, value) for name, value in QueryParams(given).multi_items() if name not in SHAPE]
    place = [] if after is None else [("after", str(after))]
    return Filters.read(QueryParams([*chosen, ("limit", str(BULK_PAGE)), *place]))


async def _attempt(client: Client, id: str, verb: str, body: Mapping[str, Any]) -> str | None:
    """Why it was refused; None if it was done, or is stored."""
    try:
        await VERBS[verb](client, id, {"reason": body.get("reason")}, BULK_WAIT)
    except TimeoutError:
        return None
    except LongrunError as error:
        return str(error)
    return None
