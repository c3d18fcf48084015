"""Bad input: refused at once, with a sentence that says what to do, and never half done."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import (
    ConfigError,
    ExecutionNotFoundError,
    Executor,
    ExecutorConfig,
    InvalidIdError,
    InvalidStateError,
    LongrunError,
    MemoryCheckpointStore,
    NotStorableError,
    RetentionPolicy,
    RetryPolicy,
    SQLiteCheckpointStore,
    StepRegistry,
    StoreSettingsError,
    UnknownStepError,
    UnknownWorkflowError,
    open_store,
)

ROOT = Path(__file__).parent.parent
BAD_IDS = [
    "",
    "a/b",
    "..",
    "a..b",
    "../x",
    "a\0b",
    "x" * 5000,
    " ",
    "a b",
    "-a",
    ".a",
    "ä",
    "a\n",
    None,
    5,
    b"a",
    ["a"],
]


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def add(state: int) -> int:
        return state + 1

    registry.workflow("work", [add])
    return registry


@pytest.mark.parametrize("id", BAD_IDS, ids=lambda value: repr(value)[:20])
async def test_an_id_that_cannot_name_a_file_is_refused_everywhere(registry, id):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        requests: list[Any] = [
            executor.get,
            executor.pause,
            executor.resume,
            executor.cancel,
            executor.retry,
            executor.history,
            executor.steps,
            executor.delete,
            executor.fork,
            executor.handle,
            lambda bad: executor.signal(bad, "name"),
        ]
        if id is not None:
            requests += [
                lambda bad: executor.start("work", 1, id=bad),
                lambda bad: executor.submit("work", 1, id=bad),
            ]
        for request in requests:
            with pytest.raises(InvalidIdError) as caught:
                await request(id)
            assert isinstance(caught.value, ValueError)
            assert len(str(caught.value)) < 400
        assert await executor.list() == []


@pytest.mark.parametrize("id", ["a", "A-b_c.d:e@f=g+h~i", "0", "_x", "x" * 200, "site-42"])
async def test_ordinary_ids_are_fine(registry, id):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        assert await (await executor.start("work", 1, id=id)).result() == 2


async def test_what_is_no_workflow_is_refused(registry):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        with pytest.raises(ConfigError, match="give a name, a Workflow, or a list of steps"):
            await executor.start(None, {})  # type: ignore[arg-type]  # the mistake under test


async def test_unknown_steps_workflows_and_executions_are_named(registry):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        with pytest.raises(UnknownWorkflowError, match=r"'nope'.*'work'"):
            await executor.start("nope")
        with pytest.raises(UnknownStepError, match="'nope'"):
            await executor.start(["nope"])
        with pytest.raises(LongrunError):
            await executor.start([])
        for request in (
            executor.get,
            executor.pause,
            executor.resume,
            executor.cancel,
            executor.retry,
            executor.delete,
        ):
            with pytest.raises(ExecutionNotFoundError, match="'nobody'"):
                await request("nobody")


@pytest.mark.parametrize("timeout", ["x", float("nan"), -1, True])
async def test_a_timeout_that_makes_no_sense_is_refused_before_anything_is_stored(registry, timeout):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        run = await executor.submit("work", 1, delay=3600)
        for call in (run.cancel, run.pause, run.resume, run.result, run.wait, partial(run.signal, "go")):
            with pytest.raises(ConfigError, match="timeout="):
                await call(timeout=timeout)
        assert (await executor.store.load(run.id)).messages == ()


@pytest.mark.parametrize("metadata", [{"a": b"1"}, {"a": {1}}, {1: "a"}, "a"], ids=str)
async def test_metadata_that_nothing_can_have_is_not_looked_for(registry, metadata):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        with pytest.raises(ConfigError, match="metadata="):
            await executor.list(metadata=metadata)


def test_an_error_does_not_repeat_a_very_long_argument():
    for error in (ConfigError("key", "x" * 100_000, "another"), UnknownWorkflowError("x" * 100_000)):
        assert len(str(error)) < 500
    assert "'short'" in str(ConfigError("key", "short", "another"))


async def test_what_the_state_forbids_is_refused(registry):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        run = await executor.start("work", 1)
        await run.result()
        for request, word in (
            (run.pause, "pause"),
            (run.resume, "resume"),
            (run.retry, "retry"),
            (run.cancel, "cancel"),
        ):
            with pytest.raises(InvalidStateError, match=f"cannot {word} execution .* it is completed"):
                await request()
        assert await run.result() == 2


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_interval": -1},
        {"checkpoint_interval": float("nan")},
        {"checkpoint_interval": float("inf")},
        {"checkpoint_interval": "5"},
        {"checkpoint_interval": timedelta(seconds=-1)},
        {"heartbeat_interval": 0},
        {"heartbeat_interval": -5},
        {"lease_ttl": 0},
        {"lease_ttl": 5, "heartbeat_interval": 5},
        {"drain_timeout": -0.1},
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"max_retries": True},
        {"max_concurrency": 0},
        {"max_concurrency": "many"},
        {"max_crashes": 0},
        {"durability": "sometimes"},
        {"durability": None},
        {"on_corruption": "panic"},
        {"auto_resume": "yes"},
        {"retention": 5},
        {"retention": None},
        {"checkpoint_dir": ""},
        {"checkpoint_dir": 5},
        {"checkpoint_dir": None},
    ],
    ids=str,
)
def test_a_config_with_a_bad_value_is_refused_when_it_is_made(options):
    with pytest.raises(ConfigError) as caught:
        ExecutorConfig(**options)
    assert next(iter(options)) in str(caught.value)


def test_a_config_takes_paths_and_timedeltas(tmp_path):
    config = ExecutorConfig(checkpoint_dir=tmp_path, checkpoint_interval=timedelta(seconds=3))
    assert (config.checkpoint_dir, config.checkpoint_interval) == (str(tmp_path), 3.0)


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"initial": -1},
        {"initial": 10**400},
        {"factor": 0.5},
        {"maximum": -1},
        {"jitter": 1},
        {"retry_on": "ValueError"},
        {"give_up_on": (ValueError, 5)},
    ],
    ids=str,
)
def test_a_retry_policy_with_a_bad_value_is_refused(options):
    with pytest.raises(ConfigError):
        RetryPolicy(**options)


@pytest.mark.parametrize("options", [{"history": 0}, {"max_age": -1}, {"interval": 0}], ids=str)
def test_a_retention_policy_with_a_bad_value_is_refused(options):
    with pytest.raises(ConfigError):
        RetentionPolicy(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"registry": None}, "registry"),
        ({"config": {"max_retries": 1}}, "config"),
        ({"store": "ftp://x"}, "ftp"),
        ({"on_event": "print"}, "on_event"),
    ],
)
def test_an_executor_of_nonsense_is_refused(registry, options, word):
    with pytest.raises(LongrunError, match=word):
        Executor(**{"registry": registry, "store": "memory:", **options})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"queue": ""}, "queue"),
        ({"queue": 5}, "queue"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 10**9}, "priority"),
        ({"delay": -1}, "delay"),
        ({"delay": "soon"}, "delay"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": {1: 2}}, "metadata"),
    ],
)
async def test_a_submission_with_a_bad_value_is_refused(registry, options, word):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        with pytest.raises(ConfigError, match=word):
            await executor.submit("work", 1, **options)
        assert await executor.list() == []


@pytest.mark.parametrize("value", [object(), {1}, (1, 2), float("nan"), b"x", {"deep": {1: 2}}])
async def test_metadata_is_json(registry, value):
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        with pytest.raises(NotStorableError, match=r"metadata\['key'\]"):
            await executor.start("work", 1, metadata={"key": value})


@pytest.mark.parametrize("path", [None, 5, b"a.db", "", "a\0b"], ids=repr)
def test_what_is_no_path_is_no_sqlite_store(path):
    with pytest.raises(StoreSettingsError, match="give the path of a file") as caught:
        SQLiteCheckpointStore(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("timeout", ["3", -1, None, True, float("nan"), float("inf")], ids=repr)
def test_sqlite_waits_for_a_number_of_seconds(tmp_path, timeout):
    with pytest.raises(ConfigError, match="timeout="):
        SQLiteCheckpointStore(tmp_path / "a.db", timeout=timeout)


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("sqlite:///q.db?timeout=3", r"takes no parameters.*timeout=.* as an argument"),
        ("sqlite:///{}/q.db?mode=ro&cache=shared", "takes no parameters"),
        ("sqlite:///:memory:", "a store in memory is memory:"),
        ("sqlite:////:memory:", "a store in memory is memory:"),
    ],
)
def test_an_sqlite_url_of_other_programs_makes_no_file(tmp_path, monkeypatch, url, word):
    """It would be a file of that literal name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreSettingsError, match=word) as caught:
        open_store(url.format(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


async def test_an_sqlite_file_may_have_a_question_mark_in_its_name(tmp_path):
    for path in (f"{tmp_path}/what?.db", tmp_path / "q.db?timeout=3"):
        async with SQLiteCheckpointStore(path):
            assert Path(path).exists()


PROGRAM = """
    import os, sys
    import anyio
    from longrun import Executor, ExecutorConfig, StepContext, StepRegistry

    registry = StepRegistry()

    @registry.step
    async def first(state: int) -> int:
        print("first", flush=True)
        return state + 1

    @registry.step
    async def deadly(ctx: StepContext, state: int) -> int:
        if sys.argv[2] == "die":
            os._exit(7)
        return state + 1

    registry.workflow("work", [first, deadly])

    async def main() -> None:
        async with Executor(registry, store=sys.argv[1], config=ExecutorConfig(max_crashes=3)) as executor:
            run = await executor.start("work", 0, id="a")
            try:
                print(await run.result(), flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
                if sys.argv[2] == "live":
                    await run.resume()
                    print(await run.result())

    anyio.run(main)
    """


@pytest.mark.parametrize("url", ["sqlite:///work.db", "file:work"])
def test_a_step_that_ends_the_process_is_resumed_and_blocked_after_max_crashes(tmp_path, url):
    """I2, I11: in real processes."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(word: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "program.py", url, word],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "LONGRUN_RUN_DIR": str(tmp_path / "run"), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    assert run("die") == (7, "first\n")
    assert run("die") == (7, "")
    assert run("die") == (7, "")
    assert run("die") == (0, "ExecutionBlockedError\n")
    assert run("live") == (0, "ExecutionBlockedError\n2\n")


@pytest.mark.parametrize("url", ["sqlite:///{}/x.db", "file:{}/x"])
async def test_two_executors_that_start_the_same_id_at_once_run_it_once(tmp_path, url):
    """I3: each with a store of its own, as two processes would have."""
    calls = []
    registry = StepRegistry()

    @registry.step
    async def work(state: int) -> int:
        calls.append(state)
        return state

    registry.workflow("work", [work])
    results = []

    async def start(n: int) -> None:
        async with Executor(registry, store=open_store(url.format(tmp_path))) as executor:
            results.append(await (await executor.start("work", n, id="same")).result())

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for n in range(4):
                tasks.start_soon(start, n)
    assert len(calls) == 1
    assert results == calls * 4


@pytest.mark.parametrize("url", ["file:store", "sqlite:///store.db"])
def test_a_working_directory_that_is_gone_is_said(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreSettingsError, match="the working directory is gone"):
        open_store(url)


async def test_absurd_numbers_and_metadata_are_refused_in_plain_words(registry: StepRegistry) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        run = await executor.start("work", 1, id="a")
        await run.result()
        for absurd in ("9" * 5000, 10**5000):
            with pytest.raises(ConfigError, match="a very long number"):
                await executor.fork("a", checkpoint=absurd)
        with pytest.raises(NotStorableError, match="metadata"):
            await executor.start("work", 1, metadata={"deep": deep})
