"""The same commands on stores that have a server."""

from __future__ import annotations

import json
import uuid
from urllib.parse import urlsplit

import psycopg

from tests.cli.conftest import APP, call, finished, interrupted, prepare, read, submitted
from tests.servers import PostgresServer, Source


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


def test_looking_makes_no_store_on_postgres(postgres_server: PostgresServer | Source) -> None:
    assert postgres_server.url is not None
    name = f"empty_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            url = urlsplit(postgres_server.url)._replace(path=f"/{name}").geturl()
            for command in (["list"], ["show", "a"], ["store", "info"], ["pause", "a"], ["gc", "--older-than", "1d"]):
                assert "there is none in schema 'longrun'" in call(*command, "--store", url, code=5).stderr
            assert read("store", "migrate", "--store", url)["facts"]["schema"] == "longrun"
            assert read("list", "--store", url)["executions"] == []
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_redis(redis_url: str) -> None:
    look_and_control(redis_url, doctors=0)
