"""Restate: a service behind its own server, whose program the variable RESTATE_SERVER_BIN names. J1 and J2.

Place in the life of a measurement: a peer's process, which starts the server and the service and asks them over HTTP on
the loopback address.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import begin
from benchmarks.peers.common import Figures, check, main, rate

CLIENTS = 64
START_WITHIN = 60.0


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def serve(port: int) -> None:
    """The service; runs until it is killed."""
    restate, hypercorn = import_module("restate"), import_module("hypercorn.asyncio")
    service: Any = restate.Service("bench")

    async def step(state: dict[str, int]) -> dict[str, int]:
        return {**state, "n": state["n"] + 1}

    async def flow(ctx: Any, request: dict[str, Any]) -> int:
        state = {"n": 0}
        for _ in range(request["steps"]):
            state = await ctx.run_typed("step", step, state=state)
        return state["n"]

    flow.__annotations__ = {"ctx": restate.Context, "request": dict, "return": int}  # it reads them at run time
    service.handler()(flow)
    config: Any = import_module("hypercorn.config").Config()
    config.bind, config.loglevel, config.h2_max_concurrent_streams = [f"127.0.0.1:{port}"], "ERROR", 4096
    asyncio.run(hypercorn.serve(restate.app([service]), config))


def post(url: str, body: object) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return bytes(answer.read())


def until(url: str, body: object | None = None) -> None:
    """Ask until there is an answer."""
    deadline = time.monotonic() + START_WITHIN
    while True:
        try:
            if body is None:
                urllib.request.urlopen(url, timeout=1).read()
            else:
                post(url, body)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


class Restate:
    """Server and service, on ports of their own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.ingress, self.admin, self.node, self.service = free_ports(4)
        settings = {
            "RESTATE_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
            "RESTATE_BIND_IP": "127.0.0.1",
            "RESTATE_LOG_FILTER": "error",
            "RESTATE_INGRESS__BIND_PORT": str(self.ingress),
            "RESTATE_ADMIN__BIND_PORT": str(self.admin),
            "RESTATE_BIND_PORT": str(self.node),
            "RESTATE_WORKER__INVOKER__CONCURRENT_INVOCATIONS_LIMIT": "4000",
        }
        server = [os.environ["RESTATE_SERVER_BIN"], "--base-dir", str(directory), "--no-logo", "--node-name", "n1"]
        with (directory / "log").open("w") as log:
            self.processes = [
                subprocess.Popen(server, env={**os.environ, **settings}, stdout=log, stderr=log),
                subprocess.Popen([sys.executable, "-m", __spec__.name, "serve", "", str(self.service)]),
            ]

    def __enter__(self) -> Restate:
        until(f"http://127.0.0.1:{self.admin}/health")
        until(f"http://127.0.0.1:{self.ingress}/restate/health")
        deployment = {"uri": f"http://127.0.0.1:{self.service}", "force": True}
        until(f"http://127.0.0.1:{self.admin}/deployments", deployment)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def call(self, steps: int) -> int:
        return int(post(f"http://127.0.0.1:{self.ingress}/bench/flow", {"steps": steps}))


def many(url: str, sizes: dict[str, int]) -> Figures:
    executions, steps = sizes["executions"], sizes["steps"]
    directory = Path(url.partition(":")[2].replace("///", "/", 1)).with_suffix(".restate")
    with Restate(directory) as restate, ThreadPoolExecutor(CLIENTS) as clients:
        restate.call(1)
        began = begin()
        found = list(clients.map(lambda _: restate.call(steps), range(executions)))
        answer = rate(executions, steps, began)
    check(found, [steps] * executions)
    return answer


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[3]))
    main({"J1": many, "J2": many})
