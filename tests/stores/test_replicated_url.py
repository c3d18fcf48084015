"""A pair of stores has a URL too, and no piece of it is ever shown."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from longrun import ConfigError, Executor, MissingExtraError, StepRegistry, StoreSettingsError, open_store
from longrun.stores import FileCheckpointStore, ReplicatedCheckpointStore, SQLiteCheckpointStore
from longrun.stores._replicated.address import FORM

registry = StepRegistry()


@registry.step
async def add(state: int) -> int:
    return state + 1


registry.workflow("work", [add])


def pair(url: str, **options: object) -> ReplicatedCheckpointStore:
    store = open_store(url, **options)
    assert isinstance(store, ReplicatedCheckpointStore)
    return store


async def test_two_stores_in_step_by_url(tmp_path: Path) -> None:
    """Encoded or not, as long as nothing in them is mistaken for the pair's own."""
    a, b = f"file:{tmp_path / 'a & b'}", f"sqlite:///{tmp_path / 'b.db'}"
    url = f"replicated:?primary={quote(a, safe='')}&secondary={b}&witness=file:{tmp_path / 'w'}"
    async with Executor(registry, store=url) as executor:
        assert await (await executor.start("work", 1, id="x")).result() == 2
        status = executor.store.status()  # type: ignore[attr-defined]  # a pair's
        assert (status.mode, status.automatic, status.active, status.standby) == ("sync", True, "primary", "level")
    for single in (FileCheckpointStore(tmp_path / "a & b"), SQLiteCheckpointStore(tmp_path / "b.db")):
        async with Executor(registry, store=single) as executor:
            assert await (await executor.handle("x")).result() == 2
    assert list((tmp_path / "w").iterdir()), "the witness was asked"


def test_options_stand_behind_the_stores(tmp_path: Path) -> None:
    stores = f"replicated:?primary=file:{tmp_path / 'a'}&secondary=file:{tmp_path / 'b'}"
    store = pair(f"{stores}&mode=async&failback_after=2.5&queue_limit=7")
    assert (store.status().mode, store.backend._times.failback_after, store.backend._lag._limit) == ("async", 2.5, 7)
    assert pair(f"{stores}&mode=async", mode="sync").status().mode == "sync", "what a program says counts first"
    assert repr(pair(f"{stores}&witness=sqlite:///{tmp_path / 'w.db'}&witness_name=x").backend._witness) == (
        "<StoreWitness sqlite>"
    )


PAIR = "replicated:?primary=file:a&secondary=file:b"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("replicated:", "names no stores"),
        ("replicated://host", "names no stores"),
        ("replicated:?", "names no stores"),
        ("replicated:?primary=file:a", "names no secondary"),
        ("replicated:?primary=&secondary=file:a", "names no primary"),
        ("replicated:?secondary=file:a", "names no primary"),
        (f"{PAIR}&primary=file:c", "more than one primary"),
        (f"{PAIR}&mod=async", "part 3 of it, most like mode, is none of primary, secondary, witness, .*mode"),
        ("replicated:?primry=file:a&secondary=file:b", "part 1 of it, most like primary, is none of"),
        (f"{PAIR}&s3cret", "part 3 of it is none of"),
        (f"{PAIR}&single_process=true", "is none of"),
        ("replicated:?primary=postgresql://me:s3c&ret@h/db&secondary=file:b", "an & inside .* is written %26"),
        ("replicated:?primary=postgresql://h/db?user=me&s3cret=1&secondary=file:b", "an & inside .* is written %26"),
        (f"{PAIR}&health_interval=s3cret", "health_interval is not a number"),
        (f"{PAIR}&queue_limit=1.5", "queue_limit is not a number"),
        (f"{PAIR}&witness=memory:", "witness in memory"),
        (f"{PAIR}&witness_name=x", "witness_name is for a witness in a database"),
        (f"{PAIR}&witness=file:b", "two of its stores are the same"),
        ("replicated:?primary=file:a&secondary=file:a", "two of its stores are the same"),
        (f"replicated:?primary={quote(PAIR, safe='')}&secondary=file:b", "its primary is a pair itself"),
    ],
)
def test_a_form_that_will_not_do_is_told_with_the_one_that_will(url: str, says: str) -> None:
    with pytest.raises(StoreSettingsError, match=says) as caught:
        open_store(url)
    assert FORM in str(caught.value)
    assert "s3c" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("replicated:?primary=a&secondary=file:b", "its primary: a URL is needed, one of memory:"),
        ("replicated:?primary=file:a&secondary=sqlite:b", "its secondary: write sqlite:///PATH"),
        (
            "replicated:?primary=file:a&secondary=postgresql://me:s3cret@host/db?nonsense=1",
            "its secondary: the parameter 'nonsense'",
        ),
        ("replicated:?primary=file:a&secondary=redis://me:s3cret@host:x/0", "its secondary: .*"),
        (f"{PAIR}&witness=nowhere://me:s3cret@host", "its witness: 'nowhere' is no kind of store"),
    ],
)
def test_a_mistake_in_one_of_them_says_in_which(url: str, says: str) -> None:
    with pytest.raises(StoreSettingsError, match=says) as caught:
        open_store(url)
    assert "s3c" not in f"{caught.value}{caught.value.__cause__}"


def test_values_that_make_no_sense_are_refused_by_the_class() -> None:
    with pytest.raises(ConfigError, match="mode='slow' will not do"):
        open_store(f"{PAIR}&mode=slow")
    with pytest.raises(ConfigError, match="strikes=0"):
        open_store(f"{PAIR}&strikes=0")


def test_a_missing_extra_of_one_of_them_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> None:
        raise MissingExtraError("the redis store", "redis")

    monkeypatch.setattr("longrun.stores.redis.RedisCheckpointStore", missing)
    with pytest.raises(MissingExtraError, match=r"longrun\[redis\]"):
        open_store("replicated:?primary=file:a&secondary=redis://host")
