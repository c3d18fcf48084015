"""A crawler: one long step over many pages, with a durable cursor. Kill it at any time and run it again.

    python examples/crawler.py [DIRECTORY]

It serves a small site to itself on loopback, crawls it, and prints what it found. A crash costs one page. The state
holds no address: after a crash the site may be elsewhere.
"""

from __future__ import annotations

import http.server
import re
import sys
import threading
import time
import urllib.request
from functools import partial
from typing import Any

import anyio

from longrun import Executor, ExecutorConfig, RetryPolicy, StepRegistry, SyncStepContext

registry = StepRegistry()
PAGES = 40
SECONDS = 0.05
"""What each page takes."""


@registry.step
def find_pages(state: dict[str, Any]) -> dict[str, Any]:
    """Read the index: a plain function, so it runs in a worker thread."""
    index = read("/")
    return {**state, "pages": re.findall(r'href="(/[^"]+)"', index)}


@registry.step(retry=RetryPolicy(max_attempts=5, initial=0.1), timeout=600)
def crawl(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    """One item a page, durable before the next. `ctx.local` is saved together with the cursor, so both always fit each
    other."""
    sizes: dict[str, int] = ctx.local.setdefault("sizes", {})
    for page in ctx.each("pages", state["pages"], every=1):
        sizes[page] = len(read(page))
    return {**state, "sizes": sizes}


@registry.step
def summarise(state: dict[str, Any]) -> dict[str, Any]:
    return {"pages": len(state["sizes"]), "bytes": sum(state["sizes"].values())}


registry.workflow("crawl-site", [find_pages, crawl, summarise])


def read(path: str) -> str:
    with urllib.request.urlopen(Site.address + path, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


class Site(http.server.BaseHTTPRequestHandler):
    """The site that is crawled: an index and some pages."""

    address = ""

    def do_GET(self) -> None:
        time.sleep(SECONDS)
        links = "".join(f'<a href="/page/{n}">page {n}</a>' for n in range(PAGES))
        body = (links if self.path == "/" else f"<p>{self.path} " + "x" * len(self.path) * 10).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


async def main(directory: str = ".longrun") -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Site.address = f"http://127.0.0.1:{server.server_port}"
        try:
            async with Executor(registry, config=ExecutorConfig(checkpoint_dir=directory)) as executor:
                run = await executor.start("crawl-site", {}, id="crawl-1")
                print(await run.result())
        finally:
            server.shutdown()


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:2]))
