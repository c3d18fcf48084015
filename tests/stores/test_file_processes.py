"""Real processes on one directory: killed, stopped and racing (I1, I3, I4)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from longrun.errors import LeaseLostError
from longrun.stored import Query
from longrun.stores.file import FileBackend
from longrun.testing.samples import claim, create, owned, step
from tests.stores.file_tools import done, ids_of, loaded, opened

ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from longrun.stores.file import FileBackend
from longrun.testing.samples import boundary, owned, send, step
backend = FileBackend(sys.argv[1])
backend.open()
owner, count = sys.argv[2], int(sys.argv[3])
heads = {}
for n in range(count):
    new = owned(f"{owner}-{n}", owner)
    assert backend.commit([new]) == [True]
    heads[new.id] = new.head
    print("create", new.id, flush=True)
while True:
    saves = [
        step(id, head, put={"e": b"x" * 3000}, keep_from=max(1, head.seq - 1), clear=True) for id, head in heads.items()
    ]
    answers = backend.commit(saves)
    for save, answer in zip(saves, answers):
        if answer is not None:
            print("refused", save.id, type(answer).__name__, flush=True)
            del heads[save.id]
        else:
            heads[save.id] = save.head
            print("save", save.id, save.head.revision, flush=True)
    if not heads:
        sys.stdin.readline()
        break
    (number,) = backend.commit([send(next(iter(heads)), limit=10**6)])
    print("send", next(iter(heads)), number, flush=True)
backend.close()
"""

CLAIMER = """
import json, sys
from longrun.stores.file import FileBackend
from longrun.testing.samples import claim, step
backend = FileBackend(sys.argv[1])
backend.open()
print("ready", flush=True)
sys.stdin.readline()
taken = {}
while given := backend.claim(claim(sys.argv[2], limit=5, dead=frozenset({"dead"}))):
    for one in given:
        assert one.head.owner == sys.argv[2]
        taken[one.definition.id] = one.head.fence
    answers = backend.commit([step(one.definition.id, one.head) for one in given])
    assert answers == [None] * len(given), answers
print(json.dumps(taken), flush=True)
backend.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextlib.contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line(stream: IO[str] | None) -> list[str]:
    assert stream is not None
    words = stream.readline().split()
    assert words, "the process ended"
    return words


def test_what_was_acknowledged_survives_a_kill(path: Path, campaign_size: int) -> None:
    """I1, I7: a process that writes as fast as it can is killed at a random moment, again and again."""
    dice = random.Random(5)
    for turn in range(max(2, campaign_size // 5)):
        saved: dict[str, int] = {}
        sent: dict[str, int] = {}
        with process(WRITER, path, f"owner{turn}", 3) as child:
            for _ in range(dice.randrange(20, 120)):
                what, id, *number = line(child.stdout)
                assert what != "refused"
                saved.setdefault(id, 0)
                if what == "save":
                    saved[id] = int(number[0])
                elif what == "send":
                    sent[id] = int(number[0])
            child.kill()
            assert child.stdout is not None
            for text in child.stdout.read().splitlines(keepends=True):
                if text.startswith("save") and text.endswith("\n"):
                    _, id, revision = text.split()
                    saved[id] = int(revision)
        with opened(FileBackend(path)) as backend:
            for id, acknowledged in saved.items():
                found = loaded(backend, id)
                assert found.head.revision in (acknowledged, acknowledged + 1)
                assert found.boundary.seq == found.head.seq == found.head.revision + 1
                assert [row.seq for row in backend.boundaries(id, limit=10**6)] == list(range(1, found.head.seq + 1))
            for id, last in sent.items():
                assert [message.id for message in backend.messages(id)][:last] == list(range(1, last + 1))
            given = backend.claim(claim("heir", dead=frozenset({f"owner{turn}"}), limit=10))
            assert sorted(ids_of(given)) == sorted(saved)
            done(backend, *[step(one.definition.id, one.head) for one in given])


def test_processes_that_claim_at_once_never_share(path: Path) -> None:
    """I3, I4: three processes race for sixty executions, half of them of a dead owner; each is given once."""
    with opened(FileBackend(path)) as backend:
        done(backend, *[create(f"x{n}") for n in range(30)], *[owned(f"y{n}", "dead") for n in range(30)])
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(process(CLAIMER, path, f"claimer{n}")) for n in range(3)]
            for child in children:
                assert line(child.stdout) == ["ready"]
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
            taken = [json.loads(" ".join(line(child.stdout))) for child in children]
        names = [id for one in taken for id in one]
        assert sorted(names) == sorted([f"x{n}" for n in range(30)] + [f"y{n}" for n in range(30)])
        for n, one in enumerate(taken):
            for id, fence in one.items():
                head = loaded(backend, id).head
                assert (head.owner, head.fence, head.revision) == (f"claimer{n}", fence, 1)


def test_a_stopped_owner_is_refused_when_it_wakes(path: Path) -> None:
    """I3: stopped past its lease, taken over, continued: none of its writes is acknowledged any more."""
    with process(WRITER, path, "sleeper", 2) as child, opened(FileBackend(path)) as backend:
        while line(child.stdout)[0] != "send":
            pass
        os.kill(child.pid, signal.SIGSTOP)
        given = backend.claim(claim("heir", dead=frozenset({"sleeper"})))
        assert sorted(ids_of(given)) == ["sleeper-0", "sleeper-1"]
        heads = {one.definition.id: one.head for one in given}
        for _ in range(3):
            saves = [step(id, head) for id, head in heads.items()]
            done(backend, *saves)
            heads = {save.id: save.head for save in saves}
        os.kill(child.pid, signal.SIGCONT)
        refused: set[str] = set()
        acknowledged: dict[str, int] = {}
        while len(refused) < 2:
            what, id, word = line(child.stdout)
            if what == "refused":
                assert word == LeaseLostError.__name__
                refused.add(id)
            elif what == "save":
                assert id not in refused
                acknowledged[id] = int(word)
        for one in given:
            assert acknowledged.get(one.definition.id, 0) <= one.head.revision
            found = loaded(backend, one.definition.id)
            assert found.head == heads[one.definition.id]
            done(backend, step(one.definition.id, found.head))


def test_the_fence_holds_when_generations_have_come_and_gone(path: Path) -> None:
    """I3: N+1 was there and is removed already when the owner of N looks for it: it must not take that for absence."""
    with opened(FileBackend(path)) as stale, opened(FileBackend(path)) as other:
        new = owned("a", "one")
        done(stale, new)
        first = step("a", new.head)
        done(stale, first)
        owner = "one"
        for turn in range(4):
            (given,) = other.claim(claim(f"heir{turn}", dead=frozenset({owner})))
            owner = f"heir{turn}"
            save = step("a", given.head)
            done(other, save, step("a", save.head))
            other.renew("nobody", 1.0)
        other.close()
        other.open()
        assert not (path / "live" / "a.1.jsonl").exists()
        (answer,) = stale.commit([step("a", first.head)])
        assert isinstance(answer, LeaseLostError)
        assert loaded(other, "a").head.owner == "heir3"


def test_a_repeated_id_is_created_once_by_many_processes(path: Path) -> None:
    """Whatever generation it has reached, and when it has moved to done/, the id stays taken."""
    with opened(FileBackend(path)) as backend, opened(FileBackend(path)) as other:
        done(backend, create("a"))
        for turn in range(3):
            (given,) = other.claim(claim(f"o{turn}", ids=("a",), dead=frozenset({f"o{turn - 1}"})))
            save = step("a", given.head)
            done(other, save, step("a", save.head))
            other.renew("nobody", 1.0)
            assert backend.commit([create("a"), owned("a")]) == [False, False]
        assert backend.count(Query()) == {loaded(other, "a").head.state: 1}
