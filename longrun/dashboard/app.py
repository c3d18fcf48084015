"""The application: routes to what the other modules read and do.

Place in the life of an execution: beside it, at the edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import longrun
from longrun import schema
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.dashboard import live
from longrun.dashboard.actions import BODY_LIMIT, BULK_VERBS, VERBS, Actions, body_of
from longrun.dashboard.charts import Charts
from longrun.dashboard.detail import Details
from longrun.dashboard.guard import Guard, check_token, new_token, refusal
from longrun.dashboard.listing import Filters, Listing, whole
from longrun.dashboard.wire import reply
from longrun.errors import (
    CodecError,
    ConfigError,
    ExecutionError,
    ExecutionNotFoundError,
    InvalidIdError,
    LongrunError,
    StoreError,
    StoreUnavailableError,
)
from longrun.eta import Forecaster
from longrun.records import ExecutionState, check_id, to_time
from longrun.stored import Query
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ASSETS = frozenset(path.name for path in STATIC.iterdir() if path.suffix in TYPES)
SUGGESTIONS = 300
NEWS = 200
"""How many new rows one event carries; more are folded."""
NUMBER = 10**12

Answer = Callable[[Request], Awaitable[Response]]


class DashboardApp:
    """The dashboard as an ASGI application.

    Standing alone it opens its store when the server starts. Mounted in another application, where nobody tells it of
    the start, it opens at the first request; `async with app:` in that application's lifespan closes it again.
    """

    def __init__(
        self,
        store: CheckpointStore | str,
        *,
        allow_control: bool = False,
        token: str | None = None,
        hosts: Iterable[str] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.store = store if isinstance(store, CheckpointStore) else open_store(store)
        self.token = new_token() if token is None else check_token(token)
        self.allow_control = allow_control
        self._clock = clock
        self._opened = self._left = False
        self._opening: anyio.Lock | None = None
        self._listing = Listing(self.store, Forecaster(self.store, clock), clock.now)
        self._details = Details(self.store, self._listing, clock.now)
        self._charts = Charts(self.store, clock.now)
        self._actions = Actions(self.store, self._listing)
        self.routes = self._routes()
        inner = Starlette(routes=self.routes, lifespan=self._lifespan, exception_handlers={HTTPException: _http})
        self._guarded = Guard(inner, token=self.token, hosts=hosts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.store!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    # life

    async def __aenter__(self) -> Self:
        self._left = False
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True  # a request that comes late must not open it again: nobody would close it
        if self._opened:
            self._opened = False
            await self.store.aclose()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self:
            yield

    async def _open(self) -> None:
        if self._opening is None:
            self._opening = anyio.Lock()
        async with self._opening:
            if self._left:
                raise StoreUnavailableError(self.store.backend.kind, "the dashboard has been left")
            if not self._opened:
                await self.store.open()
                self._opened = True

    # routes

    def _routes(self) -> list[Route]:
        reads: dict[str, Answer] = {
            "/": self._page,
            "/static/{name}": self._asset,
            "/api/overview": self._overview,
            "/api/executions": self._executions,
            "/api/executions/{id}": self._execution,
            "/api/executions/{id}/timeline": self._timeline,
            "/api/executions/{id}/checkpoints/{seq}": self._checkpoint,
            "/api/executions/{id}/diff": self._diff,
            "/api/workers": self._workers,
            "/api/charts": self._chart,
            "/api/live/executions": self._live_executions,
            "/api/live/executions/{id}": self._live_execution,
            "/api/live/workers": self._live_workers,
            "/metrics": self._metrics,
        }
        writes: dict[str, Answer] = {
            "/api/executions/{id}/{verb}": self._control,
            "/api/bulk/{verb}": self._bulk,
        }
        routes = [Route(path, self._handled(answer), methods=["GET"]) for path, answer in reads.items()]
        return routes + [Route(path, self._handled(answer), methods=["POST"]) for path, answer in writes.items()]

    def _handled(self, answer: Answer) -> Answer:
        async def handle(request: Request) -> Response:
            try:
                await self._open()
                return await answer(request)
            except LongrunError as error:
                return refusal(status_of_error(error), str(error), type(error).__name__)

        return handle

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404)
        path = STATIC / name
        return FileResponse(path, media_type=TYPES[path.suffix], headers={"cache-control": "no-cache"})

    # looking

    def _now(self) -> str | None:
        return schema.time(to_time(self._clock.now()))

    def _dated(self, answer: dict[str, Any]) -> Response:
        return reply({"now": self._now(), **answer})

    async def _overview(self, request: Request) -> Response:
        newest = await self.store.find(Query(limit=SUGGESTIONS))
        owners = await self.store.owners()
        workflows = {name for owner in owners for name in owner.workflows} | {one.definition.workflow for one in newest}
        queues = {name for owner in owners for name in owner.queues} | {one.definition.queue for one in newest}
        return self._dated(
            {
                "control": self.allow_control,
                "store": self.store.backend.kind,
                "version": longrun.__version__,
                "workflows": sorted(workflows)[:SUGGESTIONS],
                "queues": sorted(queues)[:SUGGESTIONS],
            }
        )

    async def _executions(self, request: Request) -> Response:
        return self._dated(await self._listing.page(Filters.read(request.query_params)))

    async def _execution(self, request: Request) -> Response:
        return self._dated(await self._details.of(request.path_params["id"]))

    async def _timeline(self, request: Request) -> Response:
        after = whole(request.query_params, "after", 0, 0, NUMBER)
        before = whole(request.query_params, "before", 0, 1, NUMBER) or None
        return self._dated(await self._details.rows(request.path_params["id"], after, before))

    async def _checkpoint(self, request: Request) -> Response:
        seq = whole(request.path_params, "seq", 0, 0, NUMBER)
        return self._dated(await self._details.checkpoint(request.path_params["id"], seq))

    async def _diff(self, request: Request) -> Response:
        given = request.query_params
        before, after = (whole(given, name, 0, 0, NUMBER) for name in ("from", "to"))
        return self._dated(await self._details.diff(request.path_params["id"], before, after))

    async def _workers(self, request: Request) -> Response:
        return self._dated(await self._all_workers())

    async def _all_workers(self) -> dict[str, Any]:
        shown = []
        for owner in await self.store.owners():
            number = sum((await self.store.count(Query(owner=owner.id))).values())
            shown.append(schema.worker(owner, number))
        return {"workers": sorted(shown, key=lambda one: (one["status"], one["id"]))}

    async def _metrics(self, request: Request) -> Response:
        """For Prometheus, with the token as its bearer: what a store can tell. The rest each worker serves itself."""
        counts = await self.store.count()
        statuses = Counter(one["status"] for one in (await self._all_workers())["workers"])
        lines = ["# HELP longrun_executions Executions in the store", "# TYPE longrun_executions gauge"]
        lines += [f'longrun_executions{{state="{one.value}"}} {counts.get(one, 0)}' for one in ExecutionState]
        lines += ["# HELP longrun_workers Processes that may own executions", "# TYPE longrun_workers gauge"]
        lines += [f'longrun_workers{{status="{one}"}} {statuses[one]}' for one in schema.STATUSES]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _chart(self, request: Request) -> Response:
        hours = whole(request.query_params, "hours", 24, 1, 24 * 90)
        return self._dated(await self._charts.started(hours, request.query_params.get("workflow") or None))

    # watching

    async def _live_executions(self, request: Request) -> Response:
        filters = Filters.read(request.query_params)
        return live.stream(self.store, lambda: self._listing.page(filters), self._now)

    async def _live_workers(self, request: Request) -> Response:
        return live.stream(self.store, self._all_workers, self._now)

    async def _live_execution(self, request: Request) -> Response:
        id = check_id(request.path_params["id"])
        seen = whole(request.query_params, "after", 0, 0, NUMBER)

        async def look() -> dict[str, Any]:
            nonlocal seen
            detail = await self._details.of(id)
            behind = detail["last_seq"] - seen
            rows = await self._details.news(id, seen, NEWS) if 0 < behind <= NEWS else []
            seen = detail["last_seq"] if behind > NEWS else rows[-1]["seq"] if rows else seen
            return {"detail": detail, "rows": rows, "refold": behind > NEWS}

        return live.stream(self.store, look, self._now)

    # controlling

    async def _control(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in VERBS:
            raise HTTPException(404)
        body = await self._body(request)
        outcome = await self._actions.one(request.path_params["id"], verb, body)
        return reply({"done": outcome.done, **outcome.data}, 200 if outcome.done else 202)

    async def _bulk(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in BULK_VERBS:
            raise HTTPException(404)
        return reply(await self._actions.many(verb, await self._body(request)))

    async def _body(self, request: Request) -> dict[str, Any]:
        if not self.allow_control:
            raise HTTPException(403, "this dashboard only shows: start it with --allow-control, or allow_control=True")
        data = b""
        try:
            async with aclosing(request.stream()) as chunks:  # left before its end, it is ended here
                async for chunk in chunks:
                    data += chunk
                    if len(data) > BODY_LIMIT:
                        raise HTTPException(413, f"give at most {BODY_LIMIT:,} bytes")
        except ClientDisconnect:
            raise HTTPException(400, "whoever asked has left in the middle") from None
        return body_of(data)


def create_app(
    store: CheckpointStore | str,
    *,
    allow_control: bool = False,
    token: str | None = None,
    hosts: Iterable[str] = (),
) -> DashboardApp:
    """The dashboard of a store (or a store's URL), to serve or to mount in your own application.

    It only shows, unless `allow_control`. `token` is what opens it, a random one if None: see the `token` attribute.
    `hosts` are names it may be reached by besides those of this machine, for instance `["ops.example.com"]`.
    """
    return DashboardApp(store, allow_control=allow_control, token=token, hosts=hosts)


def status_of_error(error: LongrunError) -> int:
    """The HTTP status that says what kind of error it is."""
    if isinstance(error, ExecutionNotFoundError):
        return 404
    if isinstance(error, ConfigError | InvalidIdError):
        return 400
    if isinstance(error, ExecutionError):
        return 409
    if isinstance(error, StoreError):
        return 503
    return 422 if isinstance(error, CodecError) else 500


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = refusal(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response
