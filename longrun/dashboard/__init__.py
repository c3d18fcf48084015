"""The dashboard: the executions of a store in a browser, and the JSON that the page is made of.

Place in the life of an execution: beside it, at the edge. `serve` is what `longrun dashboard` runs; `create_app` gives
an ASGI application to mount in your own. It needs the extra `web`.

Every request needs the token: as `?token=` on the page's own address, which turns it into a cookie, or as
`Authorization: Bearer`. `Host` must be a name that is allowed; a request that another site caused is refused; a write
also needs the header `X-Longrun: 1`, and `allow_control`. Errors are `{"error": "...", "kind": "..."}`: 400 for a value
that will not do, 401 without the token, 403 where something is not allowed, 404 for what is not there, 409 for what
the execution's state forbids, 503 while the store is away.

The parts named *summary*, *step*, *plan* and *worker* are those of `--json` of the command line. Times are ISO 8601 in
UTC. Errors and states of executions stand only where one execution is shown, never in lists.

====================================================  ==================================================================
`GET /api/overview`                                   `control`, `store` (its kind), `version`, `workflows` and `queues`
                                                      (suggestions: those of the workers and of the newest executions)
`GET /api/executions`                                 a page: `executions` ([summary]), `counts` (by state, without the
                                                      filter by state), `total`, `next` (give it as `after`),
                                                      `sorted_among` (see below), `now`
`GET /api/executions/{id}`                            `execution` (summary), `error`, `reason`, `plan`, `resume`,
                                                      `in_flight`, `messages`, `children`, `checkpoints`, `damage`, …
`GET /api/executions/{id}/timeline?after=&before=`    `rows` ([step or fold]) between two numbers, `pending`
`GET /api/executions/{id}/checkpoints/{seq}`          `step`, `input` and `output`: `text` (JSON), `size`, `truncated`
`GET /api/executions/{id}/diff?from=&to=`             `changes`: `path`, `kind`, `before`, `after`
`GET /api/workers`                                    `workers` ([worker])
`GET /api/charts?hours=24&workflow=`                  `buckets` by when executions were created: `start`, `completed`,
                                                      `failed`, `cancelled`, `unfinished`; `width` in seconds
`GET /metrics`                                        executions by state and workers by status, for Prometheus
`GET /api/live/executions`, `/api/live/workers`,      the same as server-sent events `data`, at most four a second, sent
`/api/live/executions/{id}?after=`                    when something changed; `problem` while the store is away. That of
                                                      one execution is `detail`, `rows` behind `after`, `refold`
`POST /api/executions/{id}/{verb}`                    pause, resume (`state`), cancel (`reason`, `children`), retry
                                                      (`state`), signal (`name`, `payload`, `key`), fork (`checkpoint`,
                                                      `state`, `new_id`): `done`, or 202 when the request is stored and
                                                      its effect is not there yet
`POST /api/bulk/{verb}`                               pause, resume, cancel of `ids`, of a `filter` with the names of a
                                                      listing, or of everything with `"all": true`: `done`, `refused`,
                                                      `next` (give it as `after`)
====================================================  ==================================================================

A listing's filters: `state` (several times), `workflow`, `queue`, `text` (in id and metadata), `since` (seconds),
`from` and `to` (when it was created), `sort` (created, updated, duration, progress, workflow, state; with `-` in
front, downwards), `limit`, `after`, and `counts=0` not to count. Any other name is refused. Newest first comes from the
store's index, however many there are; any other order is made among the newest `sorted_among` that match.
"""

from __future__ import annotations

from longrun.errors import MissingExtraError

try:
    import sse_starlette as _sse
    import starlette as _starlette
except ModuleNotFoundError as error:
    raise MissingExtraError("the dashboard", "web") from error

from longrun.dashboard.app import DashboardApp, create_app
from longrun.dashboard.server import serve

__all__ = ["DashboardApp", "create_app", "serve"]

del _sse, _starlette
