"""A service that starts, pauses and resumes work through its own HTTP routes.

    python examples/service.py [DIRECTORY] [PORT]

    POST /jobs/ID            start a job          GET  /jobs/ID          where it is
    POST /jobs/ID/pause      pause it (held)      POST /jobs/ID/resume   go on

The HTTP side is the standard library's server in a thread; it reaches the executor through anyio's portal. SIGTERM
drains: running jobs come to a checkpoint, and the next start takes them up.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

from longrun import ExecutionNotFoundError, Executor, ExecutorConfig, InvalidStateError, StepContext, StepRegistry

registry = StepRegistry()


@registry.step
async def work(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for _ in ctx.each("items", range(state["items"])):
        await anyio.sleep(state.get("pace", 0.01))
    return state


registry.workflow("job", [work])


def handler(executor: Executor, portal: BlockingPortal) -> type[http.server.BaseHTTPRequestHandler]:
    """The routes. Every one is a single call of the executor."""

    async def show(id: str) -> dict[str, Any]:
        job = await executor.get(id)
        return {"id": job.id, "state": job.state, "progress": round(job.progress, 3), "error": job.error}

    async def start(id: str) -> dict[str, Any]:
        await executor.start("job", {"items": 500}, id=id)
        return await show(id)

    async def pause(id: str) -> dict[str, Any]:
        await executor.pause(id, hold=True)
        return await show(id)

    async def resume(id: str) -> dict[str, Any]:
        await executor.resume(id)
        return await show(id)

    verbs = {"": start, "pause": pause, "resume": resume}

    class Routes(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(show, "")

        def do_POST(self) -> None:
            self.answer(None, self.path.removeprefix("/jobs/").partition("/")[2])

        def answer(self, function: Callable[..., Any] | None, verb: str) -> None:
            id = self.path.removeprefix("/jobs/").partition("/")[0]
            function = function or verbs.get(verb)
            try:
                status, body = (200, portal.call(function, id)) if function else (404, {"error": "no such route"})
            except ExecutionNotFoundError as error:
                status, body = 404, {"error": str(error)}
            except (InvalidStateError, ValueError) as error:
                status, body = 409, {"error": str(error)}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Routes


async def main(directory: str = ".longrun", port: int | str = 8080) -> None:
    config = ExecutorConfig(checkpoint_dir=directory)
    async with Executor(registry, config=config) as executor, BlockingPortal() as portal:
        with http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), handler(executor, portal)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
            await executor.serve()
            await anyio.to_thread.run_sync(server.shutdown)


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:3]))
