"""The same commands on stores that have a server."""

from __future__ import annotations

import json

from tests.cli.conftest import APP, call, finished, interrupted, prepare, read, submitted


def look_and_control(url: str, doctors: int) -> dict[str, str]:
    """Go through the commands; what doctor found, which must end with the code `doctors`."""
    prepare(url, finished("bad", {}, "failed"), interrupted("interrupted"), submitted("site", "queued"))
    found = read("list", "--store", url)
    assert [one["id"] for one in found["executions"]] == ["queued", "interrupted", "failed"]
    assert read("show", "failed", "--store", url)["error"].startswith("ValueError: bad")
    assert read("plan", "--store", url, "--app", APP)["blocked"] == 0
    call("pause", "queued", "--store", url)
    assert json.loads(call("run", APP, "site", "--id", "interrupted", "--store", url).stdout)["reported"] is True
    assert read("store", "info", "--store", url)["facts"]["server"]
    checks = {one["name"]: one["status"] for one in read("doctor", "--store", url, code=doctors)["checks"]}
    assert checks["reachable"] == checks["writable"] == "ok"
    return checks


def test_postgres(postgres_url: str) -> None:
    """The tests' server runs without fsync, to be quick, and doctor must say so."""
    assert look_and_control(postgres_url, doctors=1)["durable"] == "fail"


def test_redis(redis_url: str) -> None:
    look_and_control(redis_url, doctors=0)
