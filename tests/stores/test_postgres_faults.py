"""PostgreSQL fails in every way it can: connections cut, backends ended, the server killed, the disk full."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import attrs
import psycopg
import pytest

from longrun.errors import StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Head
from longrun.stores._postgres import links
from longrun.stores.base import StoreBackend
from longrun.stores.postgres import PostgresBackend
from longrun.testing.conformance_base import PATIENCE, beside, created, done, head_of, loaded, opened
from longrun.testing.samples import NOW, boundary, change, claim, create, end, owned, send, step
from tests.conftest import missing
from tests.servers import NOBODY, PostgresServer, find_postgres
from tests.stores.postgres_proxy import CuttingProxy

ENDED = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
PARKED = {"state": ExecutionState.WAITING, "owner": None, "signal": "go"}


@pytest.fixture(scope="module")
def lasting_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server that no test of these stops: one for all of them, each in a schema of its own."""
    source = find_postgres(local=True)
    if source is None:
        missing(request, "PostgreSQL that can be started")
    with PostgresServer(source, fsync=True) as server:
        yield server


@pytest.fixture
def proxy(lasting_postgres: PostgresServer) -> Iterator[CuttingProxy]:
    with CuttingProxy(lasting_postgres) as proxy:
        yield proxy


@pytest.fixture
def backend(proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreBackend]:
    """What a lost connection has locked is free after a second, not after five."""
    monkeypatch.setitem(links.WRITER_SETTINGS, "idle_in_transaction_session_timeout", "1s")
    with opened(PostgresBackend(proxy.url, schema=f"cut_{uuid.uuid4().hex}")) as backend:
        yield backend


@pytest.mark.parametrize("answer_lost", [True, False])
class TestCutInTheMiddle:
    """I9: whether the server did it or not, the answer is right and it was done once."""

    def test_save(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool) -> None:
        new = owned("victim")
        created(backend, new)
        save = step("victim", new.head, put={"e": b"1"})
        proxy.cut_at(b"victim", answer_lost=answer_lost)
        assert done(backend, save) == [None]
        assert proxy.cuts == 1
        assert [one.seq for one in backend.boundaries("victim")] == [1, 2]
        assert head_of(backend, "victim") == save.head

    def test_create(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool) -> None:
        created(backend, create("taken"))
        proxy.cut_at(b"victim", answer_lost=answer_lost)
        assert backend.commit([create("victim"), create("taken"), create("victim")]) == [True, False, False]
        assert proxy.cuts == 1

    def test_end(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool) -> None:
        new = owned("victim")
        created(backend, new)
        last = end("victim", new.head)
        proxy.cut_at(b"victim", answer_lost=answer_lost)
        assert done(backend, last) == [None]
        assert proxy.cuts == 1
        assert [one.seq for one in backend.boundaries("victim")] == [1, 2]
        assert head_of(backend, "victim") == last.head

    @pytest.mark.parametrize("key", [None, "k"])
    def test_send(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool, key: str | None) -> None:
        created(backend, create("victim"))
        proxy.cut_at(b"COMMIT", answer_lost=answer_lost)
        assert done(backend, send("victim", key=key), send("victim")) == [1, 2]
        assert proxy.cuts == 1
        assert [message.id for message in backend.messages("victim")] == [1, 2]

    @pytest.mark.parametrize("marker", [b"BEGIN", b"COMMIT"])
    def test_claim(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool, marker: bytes) -> None:
        """One that was woken is due only once: were the first claim not found again, nobody would ever run it. What a
        lost one has locked is free again when the server has waited for it for a while."""
        parked = create("victim", ExecutionState.WAITING, head_fields={"signal": "go"})
        done(backend, parked, send("victim"))
        proxy.cut_at(marker, answer_lost=answer_lost)
        (given,) = backend.claim(claim())
        assert proxy.cuts == 1
        assert (given.head.fence, given.head.owner, given.head.woken) == (1, "me", False)
        assert loaded(backend, "victim") == given

    def test_release(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool) -> None:
        new = owned("victim")
        done(backend, new, send("victim"))
        proxy.cut_at(b"COMMIT", answer_lost=answer_lost)
        done(backend, change("victim", new.head, head_fields=PARKED))
        assert proxy.cuts == 1
        assert head_of(backend, "victim").woken

    def test_delete(self, backend: StoreBackend, proxy: CuttingProxy, answer_lost: bool) -> None:
        created(backend, create("victim", ExecutionState.COMPLETED))
        proxy.cut_at(b"COMMIT", answer_lost=answer_lost)
        assert backend.delete(["victim", "nowhere"]) == [True, False]
        assert proxy.cuts == 1
        assert backend.load("victim") is None


class Walker:
    """Takes one execution from step to step, repeating what was not acknowledged, as its owner would."""

    def __init__(self, backend: StoreBackend, id: str) -> None:
        self.backend, self.id = backend, id
        self.acknowledged = 1
        self.failures = 0
        self.stop = threading.Event()
        new = owned(id)
        created(backend, new)
        self.head: Head = new.head

    def walk(self) -> None:
        while not self.stop.is_set():
            save = step(self.id, self.head)
            while True:
                try:
                    assert self.backend.commit([save]) == [None]
                    break
                except StoreUnavailableError:
                    self.failures += 1
            self.head = save.head
            self.acknowledged = save.head.seq

    def reached(self, seq: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.acknowledged < seq:
            assert time.monotonic() < deadline, "it stands still"
            self.stop.wait(0.005)


def whole(backend: StoreBackend, walker: Walker) -> None:
    """Nothing acknowledged is lost, nothing is there twice, and the state is that of the last boundary (I1, I7)."""
    found = loaded(backend, walker.id)
    assert found.head == walker.head
    assert found.boundary == boundary(walker.acknowledged)
    seqs = [one.seq for one in backend.boundaries(walker.id, limit=100_000)]
    assert seqs == list(range(1, walker.acknowledged + 1))


def test_backends_that_are_ended_during_commits_lose_nothing(
    disposable_postgres: PostgresServer, campaign_size: int
) -> None:
    """I1, I9: pg_terminate_backend in the middle of the writer's work, again and again."""
    with opened(PostgresBackend(disposable_postgres.url)) as backend:
        walker = Walker(backend, "a")
        with (
            beside(walker.walk, walker.stop) as walking,
            psycopg.connect(disposable_postgres.url, autocommit=True) as admin,
        ):
            for _ in range(campaign_size):
                walker.reached(walker.acknowledged + 2)
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND application_name = 'longrun'"
                )
            walker.reached(walker.acknowledged + 2)
            walker.stop.set()
            walking.result(PATIENCE)
        whole(backend, walker)
        assert walker.failures == 0


def test_a_server_that_crashes_in_mid_run_loses_nothing(disposable_postgres: PostgresServer) -> None:
    """I1, I10: stopped in immediate mode and started again; work goes on by itself."""
    with opened(PostgresBackend(disposable_postgres.url)) as backend:
        walker = Walker(backend, "a")
        with beside(walker.walk, walker.stop) as walking:
            for _ in range(3):
                walker.reached(walker.acknowledged + 20)
                disposable_postgres.restart("immediate")
            walker.reached(walker.acknowledged + 20)
            walker.stop.set()
            walking.result(PATIENCE)
        whole(backend, walker)


def test_a_server_that_is_away_is_an_error_and_then_works_again(disposable_postgres: PostgresServer) -> None:
    """I10: never a false acknowledgement; every method says so, and none of them for ever."""
    with opened(PostgresBackend(disposable_postgres.url)) as backend:
        new = owned("a")
        created(backend, new)
        disposable_postgres.stop("immediate")
        save = step("a", new.head)
        begin = time.monotonic()
        for act in (
            lambda: backend.commit([save]),
            lambda: backend.claim(claim()),
            lambda: backend.load("a"),
            backend.ping,
        ):
            with pytest.raises(StoreUnavailableError) as caught:
                act()
            assert isinstance(caught.value.__cause__, psycopg.OperationalError)
        assert time.monotonic() - begin < PATIENCE
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                backend.wait(0.1)
        with pytest.raises(StoreUnavailableError):
            PostgresBackend(disposable_postgres.url).open()
        disposable_postgres.start()
        assert done(backend, save) == [None]
        assert head_of(backend, "a") == save.head
        assert backend.wait(0.1) is True
        assert backend.wait(0.1) is False


def test_a_listener_that_lost_its_connection_looks_and_listens_again(disposable_postgres: PostgresServer) -> None:
    """I4: what was told while nobody listened is made good by one look too many."""
    url = disposable_postgres.url
    with opened(PostgresBackend(url)) as backend, opened(PostgresBackend(url)) as other:
        created(other, create("a"))
        assert backend.wait(PATIENCE) is True
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
            )
        with pytest.raises(StoreUnavailableError):
            backend.wait(PATIENCE)
        assert backend.wait(PATIENCE) is True  # the new connection
        assert backend.wait(0.1) is False
        done(other, send("a"))
        assert backend.wait(PATIENCE) is True


def test_a_session_that_was_ended_because_it_was_idle_costs_nothing(disposable_postgres: PostgresServer) -> None:
    """A lost connection is survived, whatever the server gives as its reason."""
    url = disposable_postgres.url
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET idle_session_timeout = '200ms'")
        admin.execute("SELECT pg_reload_conf()")
    patient = psycopg.connect(url, autocommit=True, options="-c idle_session_timeout=0")
    with patient as admin, opened(PostgresBackend(url)) as backend:
        created(backend, create("a"))
        for number in range(1, 4):
            deadline = time.monotonic() + PATIENCE
            while admin.execute(_SESSIONS).fetchone() != (0,):
                assert time.monotonic() < deadline
            assert done(backend, send("a")) == [number]


_SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'longrun'"


def test_a_server_that_can_queue_no_more_notices_refuses_no_value(disposable_postgres: PostgresServer) -> None:
    """Somebody listens and does not read. It passes, and what was to be written is not to blame."""
    url = disposable_postgres.url
    full = "RAISE EXCEPTION USING errcode = '54000', message = 'too many notifications in the NOTIFY queue'"
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA news")
        user = admin.execute("SELECT current_user").fetchone()
        assert user is not None
        admin.execute(f'ALTER ROLE "{user[0]}" SET search_path = news, pg_catalog')
        replace = "CREATE OR REPLACE FUNCTION news.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN"
        admin.execute(f"{replace} PERFORM pg_catalog.pg_notify($1, $2); END $$")
        with opened(PostgresBackend(url)) as backend:
            created(backend, create("a"))
            admin.execute(f"{replace} {full}; END $$")
            for write in (send("a"), create("b")):
                with pytest.raises(StoreUnavailableError, match="NOTIFY"):
                    backend.commit([write, create("c")])
            admin.execute(f"{replace} PERFORM pg_catalog.pg_notify($1, $2); END $$")
            assert done(backend, send("a"), create("b")) == [1, True]


def test_a_standby_can_be_looked_at_and_is_heard_when_it_is_the_primary(disposable_postgres: PostgresServer) -> None:
    server, url = disposable_postgres, disposable_postgres.url
    with opened(PostgresBackend(url)) as backend:
        created(backend, create("a"))
    server.stop()
    (server.directory / "data" / "standby.signal").touch()
    server.start()
    with opened(PostgresBackend(url)) as backend, psycopg.connect(url, autocommit=True) as admin:
        assert backend.describe()["read_only"] is True
        assert loaded(backend, "a").damage == ()
        with pytest.raises(StoreUnavailableError, match="read-only"):
            backend.commit([create("b")])
        assert backend.wait(0.1) is False
        admin.execute("SELECT pg_promote()")
        assert backend.wait(0.1) is False
        with opened(PostgresBackend(url)) as other:
            created(other, create("b"))
        assert backend.wait(PATIENCE) is True


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of a few megabytes that the server may write to."""
    directory = Path(tempfile.mkdtemp(prefix="lrd"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700,uid=65534,gid=65534", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        directory.rmdir()
        pytest.skip("no right to mount a small file system here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
    directory.rmdir()


def test_a_full_disk_is_an_error_and_work_goes_on_when_there_is_room(
    small_disk: Path, disposable_postgres: PostgresServer
) -> None:
    """I10."""
    assert disposable_postgres.owner == NOBODY
    with opened(PostgresBackend(disposable_postgres.url)) as backend:
        with psycopg.connect(disposable_postgres.url, autocommit=True) as admin:
            admin.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'".encode())
            admin.execute("ALTER TABLE longrun.blobs SET TABLESPACE small")
        new = owned("a")
        created(backend, new)
        head, before = new.head, None
        save = step("a", head)
        with pytest.raises(StoreUnavailableError) as caught:
            for n in range(20):
                save = step("a", head, blobs={f"b{n}": os.urandom(500_000)})
                done(backend, save)
                head, before = save.head, loaded(backend, "a")
        assert isinstance(caught.value.__cause__, psycopg.errors.DiskFull)
        assert before is not None
        assert loaded(backend, "a") == before
        subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
        assert done(backend, save) == [None]
        assert head_of(backend, "a") == attrs.evolve(save.head)
        disposable_postgres.stop("fast")
