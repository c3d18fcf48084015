"""The commands that look: list, show, events, watch, workers, plan, doctor, store. Each for people and as JSON."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from longrun import CheckpointStore, ExecutionState, MemoryCheckpointStore, open_store, schema
from longrun.cli import doctor
from longrun.errors import CorruptDataError
from longrun.life import LifeLock
from longrun.stored import Owner
from longrun.testing import FaultyStore
from longrun.testing.samples import create
from tests.cli.conftest import APP, call, finished, interrupted, prepare, read, submitted
from tests.cli.sample_app import HOSTILE, Order

ESCAPES = ("\x1b", "\x07", "\r", "\u202e")


def populate(url: str) -> None:
    prepare(
        url,
        finished("site", {"pages": 2}, "done"),
        finished("bad", {}, "failed"),
        finished("approve", {}, "waiting"),
        interrupted("interrupted"),
        submitted("site", "queued", queue="slow", priority=3, metadata={"customer": "ACME"}),
    )


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_shows_what_there_is_newest_first_and_counts_it(url: str) -> None:
    populate(url)
    result = call("list", "--store", url)
    ids = [line.split()[-9:] for line in result.stdout.splitlines()]
    assert len(ids) == 6
    found = read("list", "--store", url)
    assert [one["id"] for one in found["executions"]] == ["queued", "interrupted", "waiting", "failed", "done"]
    assert found["counts"]["failed"] == 1
    assert found["counts"]["cancelled"] == 0
    assert found["next"] is None
    assert "5 executions: 1 initialized, 1 running, 1 waiting, 1 completed, 1 failed" in result.stderr
    for word in ("✓ completed", "✗ failed", "◷ waiting", "▸ running (interrupted)"):
        assert word in result.stdout


def test_list_filters_and_pages(url: str) -> None:
    populate(url)

    def ids(*words: str) -> list[str]:
        return [one["id"] for one in read("list", "--store", url, *words)["executions"]]

    assert ids("--state", "failed", "--state", "completed") == ["failed", "done"]
    assert ids("--workflow", "approve") == ["waiting"]
    assert ids("--queue", "slow") == ["queued"]
    assert ids("--text", "acme") == ["queued"]
    assert ids("--meta", "customer=ACME") == ["queued"]
    assert ids("--since", "1h", "--until", "0s")[-1] == "done"
    assert ids("--until", "1h") == []
    page = read("list", "--store", url, "--limit", "2")
    assert page["next"] == "interrupted"
    assert ids("--limit", "2", "--after", page["next"]) == ["waiting", "failed"]


def test_lists_and_show_have_one_forecast(url: str) -> None:
    """Whoever looks, the same fraction and the same time left: on the first run of a workflow too."""
    prepare(url, interrupted("a"), finished("approve", {}, "b"))
    for words in (["list"], ["watch", "--once"]):
        for one in read(*words, "--store", url)["executions"]:
            assert one["progress"] == read("show", one["id"], "--store", url)["execution"]["progress"]


def test_lists_hold_no_error_reason_or_state(url: str) -> None:
    """Errors and states are shown where one execution is, never in lists."""
    populate(url)
    for words in (["list"], ["watch", "--once", "--state", "failed"], ["list", "--json"]):
        shown = call(*words, "--store", url).output
        assert "bell" not in shown
        assert "failed" in shown


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_tells_steps_attempts_errors_and_history(url: str) -> None:
    populate(url)
    found = read("show", "failed", "--store", url)
    assert found["error"] == f"ValueError: {HOSTILE}"
    assert [(row["kind"], row["name"], row["attempts"]) for row in found["steps"]] == [
        ("start", None, 0),
        ("step", "prepare", 1),
        ("fail", "boom", 2),
    ]
    assert all(row["seconds"] >= 0 for row in found["steps"])
    assert [one["seq"] for one in found["checkpoints"]] == [1, 2]
    assert found["step_names"] == ["prepare", "boom"]
    assert found["state"] is None
    assert read("show", "failed", "--store", url, "--state")["state"] == {"prepared": True}


def test_show_says_where_a_resume_would_go_on(url: str) -> None:
    populate(url)
    found = read("show", "interrupted", "--store", url)
    (loop,) = found["inside"]
    assert (loop["kind"], loop["name"], loop["total"]) == ("each", "pages", 1000)
    assert loop["done"] >= 3
    assert found["execution"]["step_progress"]["done"] >= 3
    shown = call("show", "interrupted", "--store", url).stdout
    assert f"would resume at step 2 of 3 (crawl), pages: from item {loop['done'] + 1} of 1000" in shown
    assert "last checkpoint" in shown
    assert "waits for signal 'approval'" in call("show", "waiting", "--store", url).stdout


def test_show_folds_long_histories(url: str) -> None:
    populate(url)
    found = read("show", "done", "--store", url, "--steps", "2")
    assert [row["seq"] for row in found["steps"]] == [3, 4]
    assert found["steps_left_out"] == 2
    assert "2 older rows are left out" in call("show", "done", "--store", url, "--steps", "2").stdout


def test_no_text_from_a_store_can_move_the_cursor(url: str) -> None:
    """An error's text, metadata and a signal's name are shown escaped, with colours too."""
    prepare(url, finished("bad", {}, "failed"), submitted("site", "queued", metadata={"note": "\x1b[2Jgone"}))
    for words in (["show", "failed"], ["show", "queued"], ["events", "failed"], ["show", "failed", "--json"]):
        shown = call(*words, "--store", url).output
        assert not any(escape in shown for escape in ESCAPES), words
    assert "\\x1b[31mred" in call("show", "failed", "--store", url).stdout
    assert "\\x1b[2Jgone" in call("show", "queued", "--store", url).stdout


def test_colour_follows_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(url, finished("site", {}, "a"))
    assert "\x1b[" not in call("list", "--store", url).output
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m✓ completed" in call("list", "--store", url).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in call("list", "--store", url).output
    assert "✓ completed" in call("list", "--store", url).output


def test_show_says_where_what_has_not_begun_or_is_over_stands(url: str) -> None:
    """Submitted by name it has no steps yet; one that has none left has only to be finished."""

    async def write() -> None:
        async with open_store(url) as store:
            await store.create(create("new", steps=(), total=0, data=b"1"))
            await store.create(create("over", head_fields={"step": 3}, data=b"1"))
            await store.create(create("child", parent_id="over", data=b"1"))

    anyio.run(write)
    assert "not begun" in call("show", "new", "--store", url).stdout
    shown = call("show", "over", "--store", url).stdout
    assert "all steps done" in shown
    assert re.search(r"children\n(.*\n)*.*child ", shown)


def test_show_has_the_state_when_asked(url: str) -> None:
    populate(url)
    assert '  state\n{\n  "pages": 2,' in call("show", "done", "--store", url, "--state").stdout
    assert "  state\n" not in call("show", "done", "--store", url).stdout


def test_show_tells_damage(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    prepare(url, interrupted("a"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE boundary SET data = x'00' WHERE seq = 2")
    connection.close()
    assert "damage: " in call("show", "a", "--store", url).stdout


# --- events and watch -------------------------------------------------------------------------------------------------


def test_events_come_in_order_one_document_a_line(url: str) -> None:
    populate(url)
    lines = call("events", "failed", "--store", url, "--json").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [problem for one in found for problem in schema.problems(one)] == []
    assert [one["type"] for one in found] == ["execution_started", "step_completed", "execution_failed"]
    assert [one["data"]["seq"] for one in found] == [1, 2, 3]
    assert len(call("events", "failed", "--store", url, "--after", "2").stdout.splitlines()) == 1
    assert "waiting" in call("events", "waiting", "--store", url).stdout


def test_following_a_finished_execution_ends_by_itself(url: str) -> None:
    populate(url)
    assert call("events", "done", "--follow", "--store", url).stdout.splitlines()[-1].endswith("report")


def test_watch_shows_what_is_unfinished(url: str) -> None:
    populate(url)
    found = read("watch", "--once", "--store", url)
    assert [one["id"] for one in found["executions"]] == ["queued", "interrupted", "waiting"]
    shown = call("watch", "--once", "--store", url).stdout
    assert "interrupted  running  " in shown
    assert "step 2/3 (" in shown


def test_watch_says_what_has_changed_since_the_last_look(
    file_url: str, process: Callable[..., subprocess.Popen[str]]
) -> None:
    """A line for what is new or has moved, one for what is gone, none for what is as it was."""
    prepare(file_url, finished("approve", {}, "stays"), finished("approve", {}, "goes"))
    watching = process("watch", "--interval", "0.2", "--store", file_url)
    assert watching.stdout is not None
    assert {watching.stdout.readline().split()[2] for _ in range(2)} == {"stays", "goes"}
    call("cancel", "goes", "--store", file_url)
    assert watching.stdout.readline().rstrip().endswith("goes  no longer in this view")
    watching.send_signal(signal.SIGINT)
    assert watching.communicate(timeout=60)[0] == ""


# --- workers ----------------------------------------------------------------------------------------------------------


def register(url: str, *owners: Owner, ttl: float = 60.0) -> None:
    async def run() -> None:
        async with open_store(url) as store:
            for owner in owners:
                await store.register(owner, ttl)

    anyio.run(run)


def test_workers_says_who_lives(url: str) -> None:
    prepare(url)
    assert read("workers", "--store", url)["workers"] == []
    assert "no process is registered" in call("workers", "--store", url).stderr
    register(
        url,
        Owner(id="far-away-1", life={"host": "far\x1b[31m", "pid": 7}, remaining=0, workflows=("site",), queues=("q",)),
    )
    register(url, Owner(id="late-2", life={}, remaining=0), ttl=-1.0)
    found = {one["id"]: one for one in read("workers", "--store", url)["workers"]}
    assert (found["far-away-1"]["status"], found["late-2"]["status"]) == ("alive", "expired")
    assert 0 < found["far-away-1"]["lease_seconds"] <= 60
    shown = call("workers", "--store", url).output
    assert "far\\x1b[31m" in shown
    assert "! expired" in shown


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_says_what_a_resume_would_do(url: str) -> None:
    populate(url)
    found = read("plan", "--store", url, "--app", APP)
    plans = {one["id"]: one for one in found["plans"]}
    assert {id: one["action"] for id, one in plans.items()} == {
        "queued": "start",
        "interrupted": "run-again",
        "waiting": "wait",
    }
    assert plans["interrupted"]["skipped"] == ["prepare"]
    assert plans["interrupted"]["inside"][0]["name"] == "pages"
    assert (found["blocked"], found["unchecked"]) == (0, [])
    shown = call("plan", "interrupted", "--store", url, "--app", APP).output
    assert "step 2 of 3 goes on inside: pages: from item" in shown
    assert "skips 1 finished step: prepare" in shown


def test_plan_exits_with_1_if_the_code_no_longer_fits(url: str) -> None:
    """New code without a step that is still to run, and with a state of another type."""
    prepare(url, interrupted("crawling"), submitted("order", "ordered", Order(3)), submitted("bad", "other"))
    prepare(url, finished("approve", {}, "waiting"))
    new = "tests.cli.sample_app:later"
    found = read("plan", "--store", url, "--app", new, code=1)
    plans = {one["id"]: one for one in found["plans"]}
    assert plans["crawling"]["action"] == plans["ordered"]["action"] == "block"
    assert plans["crawling"]["missing"] == ["crawl"]
    assert "currency" in plans["ordered"]["misfit"]
    assert any("other steps" in note for note in plans["crawling"]["notes"])
    assert any("version 1, the code has 2" in note for note in plans["crawling"]["notes"])
    assert plans["other"]["action"] == "leave"
    assert plans["waiting"]["action"] == "wait"
    assert found["blocked"] == 2
    assert "the code has no step 'crawl'" in call("plan", "crawling", "--store", url, "--app", new, code=1).stdout
    shown = call("plan", "--blocked", "--store", url, "--app", new, code=1)
    assert "waiting" not in shown.stdout
    call("plan", "waiting", "--store", url, "--app", new)


def test_plan_without_the_code_says_what_it_cannot_check(url: str) -> None:
    prepare(url, interrupted("crawling"))
    assert "--app" in read("plan", "--store", url)["unchecked"][0]
    assert "the code was not checked" in call("plan", "--store", url).stderr


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_finds_a_healthy_store_healthy(url: str) -> None:
    populate(url)
    found = read("doctor", "--store", url)
    checks = {one["name"]: one for one in found["checks"]}
    assert found["worst"] == "ok", found
    assert {"reachable", "durable", "versions", "permissions", "writable", "clock", "owners", "quarantine"} <= set(
        checks
    )
    assert "empty" in checks["quarantine"]["message"]
    assert "✓ ok" in call("doctor", "--store", url).stdout
    assert read("workers", "--store", url)["workers"] == [], "the probe is gone again"


def test_doctor_finds_what_no_living_worker_knows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    prepare(url, submitted("site", "a"))

    def stranded() -> dict[str, Any]:
        (found,) = [one for one in read("doctor", "--store", url)["checks"] if one["name"] == "stranded"]
        return dict(found)

    async def register(owner: Owner) -> None:
        async with open_store(url) as store:
            await store.register(owner, 60.0)

    assert stranded()["status"] == "ok", "nobody works at all"
    lock = LifeLock.acquire()
    life = lock.life
    for workflows, status in (("other",), "warn"), (("site", "other"), "ok"):
        owner = Owner(id=life.owner, life=life.to_dict(), remaining=0, workflows=workflows)
        anyio.run(register, owner)
        assert stranded()["status"] == status
        shown = call("show", "a", "--store", url).stdout
        assert ("It waits for a worker that knows 'site'" in shown) == (status == "warn")
    lock.release()


@pytest.mark.parametrize("left", ["running", "waiting"])
def test_doctor_finds_what_was_left_and_no_living_worker_knows(tmp_path: Path, left: str) -> None:
    """By an owner that is dead, or by one that parked it until a time that has come."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    dead, alive = LifeLock.acquire(), LifeLock.acquire()

    async def leave() -> None:
        fields = {"owner": dead.life.owner} if left == "running" else {"due": 1.0}
        made = create("a", ExecutionState(left), head_fields=fields, data=b"{}", workflow="site")
        async with open_store(url) as store:
            for lock in (dead, alive):
                owner = Owner(id=lock.life.owner, life=lock.life.to_dict(), remaining=0, workflows=("other",))
                await store.register(owner, 60.0)
            await store.create(made)

    anyio.run(leave)
    dead.abandon()
    (found,) = [one for one in read("doctor", "--store", url)["checks"] if one["name"] == "stranded"]
    assert found["status"] == "warn"
    assert "It waits for a worker that knows 'site'" in call("show", "a", "--store", url).stdout
    alive.release()


def test_doctor_finds_damage(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    prepare(url, submitted("site", "a"))
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO quarantine (execution, part, found, content) VALUES ('a', 'head', 0, 'x')")
    connection.close()
    checks = {one["name"]: one for one in read("doctor", "--store", url)["checks"]}
    assert checks["quarantine"]["status"] == "warn"
    assert "1 damaged piece kept" in checks["quarantine"]["message"]


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"durable": True, "fsync": "on", "synchronous_commit": "on"}, "ok"),
        ({"durable": False}, "warn"),
        ({"fsync": "off"}, "fail"),
        ({"synchronous_commit": "off"}, "fail"),
        ({"full_page_writes": "off"}, "warn"),
        ({"read_only": True}, "fail"),
        ({"warnings": ["appendfsync is everysec"]}, "warn"),
    ],
)
def test_doctor_knows_settings_that_lose_writes(facts: dict[str, object], status: str) -> None:
    (check,) = [one for one in doctor._durability(facts) if one.name == "durable"]
    assert check.status == status


def test_doctor_looks_at_modes_and_space(tmp_path: Path) -> None:
    for mode, status in ((0o700, "ok"), (0o755, "warn"), (0o770, "warn")):
        tmp_path.chmod(mode)
        assert [one.status for one in doctor._place({"directory": str(tmp_path)})] == [status]
    assert [one.name for one in doctor._place({"free_bytes": 1000})] == ["space"]


def test_doctor_sees_what_comes_from_the_future(url: str) -> None:
    async def write() -> None:
        async with open_store(url) as store:
            await store.create(create("a", created=time.time() + 3600))

    anyio.run(write)
    checks = {one["name"]: one for one in read("doctor", "--store", url)["checks"]}
    assert checks["clock"]["status"] == "warn"
    assert "in the future" in checks["clock"]["message"]


def test_doctor_finds_orphans_and_what_is_blocked(url: str) -> None:
    """An execution whose owner is not registered any more, and one that cannot go on."""

    async def orphan() -> None:
        from longrun.records import ExecutionState
        from longrun.stored import Save

        async with open_store(url) as store:
            for id, owner, state in (("a", "gone-1", ExecutionState.RUNNING), ("b", None, ExecutionState.BLOCKED)):
                head = (await store.load(id)).head
                changed = attrs.evolve(head, owner=owner, state=state, revision=head.revision + 1)
                await store.save(Save(id=id, head=changed))

    prepare(url, submitted("site", "a"), submitted("site", "b"))
    anyio.run(orphan)
    checks = {one["name"]: one for one in read("doctor", "--store", url)["checks"]}
    assert checks["owners"]["status"] == "warn"
    assert "1 execution of 1 dead owner" in checks["owners"]["message"]
    assert checks["blocked"]["status"] == "warn"


def examined(store: CheckpointStore) -> tuple[dict[tuple[str, str], str], bool]:
    """What the doctor says of a store, by name and status; and whether the store answered."""
    checks, answered = anyio.run(doctor._examine, store)
    return {(check.name, check.status): check.message for check in checks}, answered


@pytest.mark.parametrize("call_that_fails", ["ping", "count", "find"])
def test_doctor_stops_at_a_store_that_goes_away(call_that_fails: str) -> None:
    store = FaultyStore(MemoryCheckpointStore())
    store.fail(call_that_fails, times=None)
    checks, answered = examined(store)
    assert not answered
    assert "told to fail" in checks["reachable", "fail"]


def test_doctor_goes_on_behind_an_examination_that_cannot_be_made() -> None:
    store = FaultyStore(MemoryCheckpointStore())
    store.fail("find", error=CorruptDataError("an execution", "it cannot be read"))
    checks, answered = examined(store)
    assert answered
    assert "it cannot be read" in checks["clock", "fail"]
    assert ("owners", "ok") in checks


def test_doctor_knows_a_store_that_does_not_keep_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(MemoryCheckpointStore())
    store.fail("register")
    assert "told to fail" in examined(store)[0]["writable", "fail"]
    monkeypatch.setattr(store.backend, "owners", list)
    assert "could not be read back" in examined(store)[0]["writable", "fail"]


def test_doctor_sees_a_lease_that_the_store_counts_by_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryCheckpointStore()
    real = store.backend.owners
    late = lambda: [attrs.evolve(owner, remaining=owner.remaining + 3600) for owner in real()]  # noqa: E731
    monkeypatch.setattr(store.backend, "owners", late)
    assert "the clocks disagree" in examined(store)[0]["clock", "fail"]


def test_doctor_says_when_deaths_cannot_be_proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longrun.life.boot_id", lambda: "")
    assert doctor._run_directory().status == "warn"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "file"))
    assert doctor._run_directory().status == "fail"


def test_doctor_warns_of_a_store_that_cannot_fence_and_of_somebody_elses_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ("fenced", "warn") in [(one.name, one.status) for one in doctor._durability({"fenced": False})]
    tmp_path.chmod(0o700)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    (check,) = doctor._place({"directory": str(tmp_path)})
    assert (check.status, "not to 12345" in check.message) == ("warn", True)


def test_doctor_says_5_when_the_store_does_not_answer() -> None:
    found = read("doctor", "--store", "redis://127.0.0.1:1/0", code=5)
    assert found["worst"] == "fail"


# --- store ------------------------------------------------------------------------------------------------------------


def test_store_info_and_migrate(url: str) -> None:
    call("store", "info", "--store", url, code=5)
    assert read("store", "migrate", "--store", url)["counts"]["running"] == 0
    populate(url)
    found = read("store", "info", "--store", url)
    assert found["facts"]["kind"] in ("file", "sqlite")
    assert found["counts"]["completed"] == 1
    assert "durable" in call("store", "info", "--store", url).stdout


def test_store_copy_carries_everything_and_can_be_repeated(tmp_path: Path) -> None:
    source, target = f"file:{tmp_path / 'a'}", f"sqlite:///{tmp_path / 'b.db'}"
    populate(source)
    found = json.loads(call("store", "copy", source, target, "--json").stdout)
    assert schema.problems(found) == []
    assert sorted(found["copied"]) == ["done", "failed", "interrupted", "queued", "waiting"]
    assert "0 copied, 5 there already" in call("store", "copy", source, target).stdout
    assert read("show", "interrupted", "--store", target)["inside"][0]["name"] == "pages"
    assert read("show", "interrupted", "--store", source)["execution"]["hold"] is True


def test_what_was_moved_goes_on_in_its_old_home_only_if_it_is_named(tmp_path: Path) -> None:
    """It would run in both places."""
    source, target = f"file:{tmp_path / 'a'}", f"sqlite:///{tmp_path / 'b.db'}"
    populate(source)
    call("store", "copy", source, target)
    refused = call("run", APP, "site", "--id", "interrupted", "--store", source, code=1).stderr
    assert "cannot run execution 'interrupted': it is paused; it was moved to another store" in refused
    assert "0 resumed" in call("resume", "--state", "paused", "--yes", "--store", source).stderr
    assert read("show", "interrupted", "--store", source)["execution"]["hold"] is True
    call("resume", "queued", "--store", source)
    assert read("show", "queued", "--store", source)["execution"]["hold"] is False


def test_store_copy_does_not_carry_anything_into_a_memory_that_is_gone(tmp_path: Path) -> None:
    source = f"file:{tmp_path / 'a'}"
    populate(source)
    assert "ends with this command" in call("store", "copy", source, "memory:", code=2).stderr
    assert read("show", "interrupted", "--store", source)["execution"]["hold"] is False


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_schema_refuses_what_does_not_fit() -> None:
    good = schema.document("collected", executions=1, owners=0, dry_run=False)
    assert schema.problems(good) == []
    assert schema.problems({**good, "executions": "1"}) == ["collected.executions is no integer"]
    assert schema.problems({**good, "owners": True}) == ["collected.owners is no integer"]
    assert schema.problems({**good, "more": 1}) == ["collected.more is not in the schema"]
    assert schema.problems({"longrun": 1, "kind": "collected", "executions": 1, "owners": 1}) == [
        "collected.dry_run is missing"
    ]
    assert schema.problems({**good, "longrun": 2}) != []
    listing = schema.document("queues", queues={})
    assert schema.problems(listing) == ["queues.queues is no list"]
    assert schema.problems({**listing, "queues": [1]}) == ["queues.queues[0] is no queue"]
    assert schema.problems([]) != []
