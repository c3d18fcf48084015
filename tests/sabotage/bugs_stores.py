"""Bugs in the stores: fences, order, durability, checksums."""

from __future__ import annotations

from typing import Any

import attrs

from tests.sabotage.bug import bug, edit, replace, swap

Function = Any
FENCE = "test_another_fence_is_refused"
TAKEOVER = "test_a_stale_owner_is_refused_after_a_takeover"


def in_store(file: str, kind: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/stores/test_{file}.py::{kind}::{test}" for test in tests)


# the fence, store by store


@bug("no-fence-memory", *in_store("memory", "TestMemoryStore", FENCE))
def no_fence_memory() -> None:
    """The memory store takes the write of a stale owner."""
    edit("longrun.stores.memory", "MemoryBackend._save", "record.head.fence != save.head.fence", "False")


@bug("no-fence-file", *in_store("file", "TestFileStore", TAKEOVER), quick=True)
def no_fence_file() -> None:
    """The file store acknowledges a write without looking for a newer generation."""
    for check in ("check_newest", "check_owned"):
        replace("longrun.stores._file.journal", f"Journal.{check}", lambda original: lambda self: None)


@bug("no-fence-sqlite", *in_store("sqlite", "TestSQLiteStore", FENCE))
def no_fence_sqlite() -> None:
    """The SQLite store takes the write of a stale owner."""
    edit("longrun.stores._sqlite.batch", "Batch._judge", "row.fence != head.fence", "False")


@bug("no-fence-postgres", *in_store("postgres", "TestPostgresStore", FENCE))
def no_fence_postgres() -> None:
    """The PostgreSQL store compares the revision alone."""
    in_postgres("save", "AND h.fence = w.fence AND", "AND")


@bug("no-fence-redis", *in_store("redis", "TestRedisStore", FENCE))
def no_fence_redis() -> None:
    """The Redis store's script does not compare fences."""
    in_redis("commit", "if old_fence ~= fence then return 'l' end", "")


@bug("no-fence-task", *in_store("task", "TestFencedTaskStore", FENCE))
def no_fence_task() -> None:
    """The task store takes the write of a stale owner."""
    edit("longrun.stores._task.document", "Document._refusal", "self.head.fence != save.head.fence", "False")


def in_postgres(name: str, old: str, new: str) -> None:
    def make(texts: Function) -> Function:
        return lambda: {**texts(), name: swap(texts()[name], old, new)}

    replace("longrun.stores._postgres.queries", "_texts", make)


def in_redis(name: str, old: str, new: str) -> None:
    import hashlib

    def make(script: Function) -> Function:
        def changed(asked: str) -> tuple[str, str]:
            text, sha = script(asked)
            if asked == name:
                text = swap(text, old, new)
                sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            return text, sha

        return changed

    replace("longrun.stores._redis.link", "script", make)


# durability


@bug(
    "no-fsync-file",
    "tests/campaign/test_power_model.py::test_what_was_acknowledged_survives_a_power_cut",
    "tests/stores/test_file_disk.py::test_a_failed_save_is_not_acknowledged_and_can_be_repeated",
    quick=True,
)
def no_fsync_file() -> None:
    """The file store acknowledges what it has written and not synced."""
    replace("longrun.stores._file.syncing", "SyncPool.sync", lambda original: lambda self, fds: [None] * len(fds))
    replace("longrun.stores._file.journal", "Journal.sync", lambda original: lambda self: None)


@bug(
    "no-directory-fsync",
    "tests/campaign/test_power_model.py::test_what_was_acknowledged_survives_a_power_cut",
    quick=True,
)
def no_directory_fsync() -> None:
    """New names are acknowledged before their directory is synced."""
    replace("longrun.stores._file.disk", "Folder.sync", lambda original: lambda self: None)


@bug("failed-sync-forgotten", "tests/stores/test_file_disk.py::test_a_failed_sync_is_never_repeated_on_the_same_file")
def failed_sync_forgotten() -> None:
    """After a failed fsync the same file is synced again as if nothing had happened."""
    edit(
        "longrun.stores._file.saves",
        "Saves._sync",
        "append.journal.bad = True",
        "self._place.disk.truncate(append.journal.fd, append.journal.size)",
    )


@bug("sqlite-not-synchronous", *("tests/stores/test_sqlite.py::test_settings_that_decide_durability_are_in_force",))
def sqlite_not_synchronous() -> None:
    """SQLite commits without waiting for the disk."""
    edit(
        "longrun.stores._sqlite.file",
        "_configure",
        '("synchronous", "FULL", lambda found: found == 2)',
        '("synchronous", "NORMAL", lambda found: True)',
    )


@bug(
    "sqlite-answers-before-commit",
    "tests/stores/test_sqlite.py::test_what_a_killed_process_had_acknowledged_is_there",
    *in_store("sqlite", "TestSQLiteStore", "test_what_was_acknowledged_is_there_after_reopening"),
)
def sqlite_answers_before_commit() -> None:
    """SQLite's transaction is left open when its writes are answered."""
    edit(
        "longrun.stores.sqlite",
        "SQLiteBackend._transaction",
        'connection.execute("COMMIT")',
        "pass",
        'connection.execute("BEGIN IMMEDIATE")',
        'connection.in_transaction or connection.execute("BEGIN IMMEDIATE")',
    )


# what is stored


@bug("torn-tail-not-cut", "tests/stores/test_file_damage.py::test_a_save_behind_a_torn_one_is_read_back")
def torn_tail_not_cut() -> None:
    """A write that a crash left half done stays in the journal, and the next one is appended to it."""
    replace("longrun.stores._file.mine", "Journals._close_end", lambda original: lambda self, fd, spot, end: end)


@bug("checksum-not-checked-file", "tests/stores/test_file_damage.py::test_every_flipped_byte_is_found")
def checksum_not_checked_file() -> None:
    """A line of a journal is believed whatever its checksum says."""
    edit("longrun.stores._file.lines", "_checked", 'line[:_BEHIND_CRC] != b\'{"crc":"%08x",\' % crc32(body)', "False")


@bug("checksum-not-checked-rows", "tests/stores/test_sqlite.py::test_a_damaged_state_gives_way_to_the_one_before")
def checksum_not_checked_rows() -> None:
    """A row of a database is believed whatever its checksum says."""
    replace("longrun.stores.assemble", "fits", lambda original: lambda crc, stored: True)


@bug("number-used-again", "tests/stores/test_sqlite.py::test_a_damaged_state_gives_way_to_the_one_before")
def number_used_again() -> None:
    """After a quarantine the numbering goes on behind the older checkpoint (I7)."""
    edit("longrun.stores.assemble", "mended", "attempt=0, seq=newest", "attempt=0, seq=boundary.seq")


@bug("repeated-write-applied-again", *in_store("memory", "TestMemoryStore", "test_a_repeated_save_is_done_already"))
def repeated_write_applied_again() -> None:
    """A save that is repeated because its answer was lost is made twice."""
    edit("longrun.stores.memory", "MemoryBackend._save", "record.head.revision >= save.head.revision", "False")


@bug("gap-in-the-writes", *in_store("sqlite", "TestSQLiteStore", "test_a_save_behind_a_missing_one_is_refused"))
def gap_in_the_writes() -> None:
    """A save is taken although the one before it is missing."""
    edit("longrun.stores._sqlite.batch", "Batch._judge", "row.revision != head.revision - 1", "False")


@bug(
    "takeover-not-told",
    *in_store("sqlite", "TestSQLiteStore", "test_what_others_do_to_an_execution_owned_here_is_noticed"),
)
def takeover_not_told() -> None:
    """Who takes an execution over does not say so to the owner, who knows its rows by heart."""
    edit("longrun.stores._sqlite.claims", "give", "if (given.rows or given.blocked) and claim.dead:", "if False:")


@bug(
    "claim-left-behind",
    "tests/stores/test_file_disk.py::test_a_claim_that_cannot_be_taken_back_is_found_by_its_owner",
)
def claim_left_behind() -> None:
    """A claim that failed and could not be taken back either is nobody's business."""
    replace("longrun.stores._file.catalog", "Catalog.doubt", lambda original: lambda self, name: None)


@bug(
    "announced-too-late",
    "tests/stores/test_sqlite.py::test_a_look_in_the_middle_of_an_announcement_hides_nobody_elses",
)
def announced_too_late() -> None:
    """A change of this process is not counted before it is stored."""
    edit(
        "longrun.stores.sqlite",
        "SQLiteBackend.commit",
        "announced = self._announced",
        "announced, late = self._announced, [0]",
        "self._announced += gathered.announce",
        "late.append(gathered.announce)",
        "self._known.keep_owned(loose)",
        "self._known.keep_owned(loose); self._announced += late[-1]",
    )


@bug(
    "silent-deletion-sqlite",
    *in_store("sqlite", "TestSQLiteStore", "test_what_others_delete_is_gone_for_its_owner_too"),
)
def silent_deletion_sqlite() -> None:
    """Whoever deletes does not say so: its owner writes into the row of another execution."""
    edit("longrun.stores.sqlite", "SQLiteBackend.delete", "if keys:", "if False:")


@bug(
    "silent-repair-sqlite",
    *in_store("sqlite", "TestSQLiteStore", "test_a_copy_put_right_by_others_is_noticed_by_its_owner"),
)
def silent_repair_sqlite() -> None:
    """An owner that a replicated store has brought over counts as one's own."""

    def planted(original: Any) -> Any:
        def register(self: Any, owner: Any, ttl: float) -> None:
            original(self, owner, ttl)
            self._known.owners.add(owner.id)

        return register

    replace("longrun.stores.sqlite", "SQLiteBackend.register_other", planted)


@bug(
    "message-overlooked-postgres",
    "tests/stores/test_postgres.py::test_a_message_that_comes_while_a_save_waits_for_the_row_is_not_overlooked",
)
def message_overlooked_postgres() -> None:
    """What ends or parks while a message comes is one statement all the same."""
    edit("longrun.stores._postgres.parts", "_statement", "if alone else", "if False else")


@bug(
    "sides-exchanged",
    "tests/stores/test_replicated_council.py::test_two_stores_are_given_in_the_order_in_which_they_were_paired",
)
def sides_exchanged() -> None:
    """A pair of stores is taken in either order."""
    edit("longrun.stores._replicated.term", "_term_of", "part != side.name", "False")


@bug("message-key-forgotten", *in_store("sqlite", "TestSQLiteStore", "test_a_key_is_accepted_once"))
def message_key_forgotten() -> None:
    """A signal that is sent again with the same key counts twice."""
    edit("longrun.stores._sqlite.batch", "Batch._send", "if seen is not None:", "if False:")


# claims


@bug(
    "claim-given-twice",
    *in_store(
        "sqlite",
        "TestSQLiteStore",
        "test_what_was_claimed_is_gone_for_others",
        "test_what_another_living_owner_has_is_not_given",
    ),
)
def claim_given_twice() -> None:
    """A claim also gives what a living owner has."""
    replace("longrun.stores._sqlite.sql", "CLAIM_READY", lambda text: swap(text, "owner IS NULL", "TRUE"))


@bug(
    "claim-given-twice-file",
    *in_store(
        "file", "TestFileStore", "test_two_claimers_of_one_id", "test_what_another_living_owner_has_is_not_given"
    ),
)
def claim_given_twice_file() -> None:
    """A claim by id also gives what a living owner has."""
    replace("longrun.stores.choice", "is_free", lambda original: lambda head, claim: True)


@bug("priority-ignored", *in_store("file", "TestFileStore", "test_the_oldest_of_the_highest_priority_comes_first"))
def priority_ignored() -> None:
    """A claim gives the oldest first, whatever its priority."""
    replace("longrun.stores._file.entries", "rank", lambda rank: lambda definition: rank(definition)[1:])


@bug("delay-ignored", *in_store("memory", "TestMemoryStore", "test_when_it_is_due"))
def delay_ignored() -> None:
    """A claim gives what is not due yet."""
    edit("longrun.stores.choice", "is_wanted", "due <= claim.now", "True")


@bug("crashes-never-raised", *in_store("file", "TestFileStore", "test_crashes_count_the_unclean_deaths_of_others"))
def crashes_never_raised() -> None:
    """A claim does not count the death of the owner before."""

    def make(claimed: Function) -> Function:
        return lambda head, owner: attrs.evolve(claimed(head, owner), crashes=head.crashes)

    replace("longrun.stores._file.contents", "claimed_head", make)


@bug("fence-not-raised", *in_store("postgres", "TestPostgresStore", TAKEOVER))
def fence_not_raised() -> None:
    """A claim in PostgreSQL gives the fence that the owner before has."""
    edit("longrun.stores._postgres.claiming", "Claiming._give_to", "head.fence += 1", "head.fence += 0")


@bug("unknown-owner-renewed", *in_store("memory", "TestMemoryStore", "test_renewing_an_unknown_owner_is_false"))
def unknown_owner_renewed() -> None:
    """The lease of an owner that the store does not know is renewed all the same."""

    def make(renew: Function) -> Function:
        def always(self: Any, owner: str, ttl: float) -> bool:
            renew(self, owner, ttl)
            return True

        return always

    replace("longrun.stores.memory", "MemoryBackend.renew", make)


@bug("release-crosses-a-message", *in_store("redis", "TestRedisStore", "test_a_message_that_crossed_the_release_wakes"))
def release_crosses_a_message() -> None:
    """A message that came just before its execution was parked does not wake it."""
    in_redis("commit", "new_woken = '1'", "new_woken = '0'")


@bug("lost-standby-write-trusted", "tests/stores/test_replicated_failover.py::test_both_have_every_acknowledged_write")
def lost_standby_write_trusted() -> None:
    """Synchronous replication answers before the standby has the write."""
    edit(
        "longrun.stores._replicated.backend",
        "ReplicatedBackend._pairwise",
        "_answers(standby, part, told)",
        "_answers(active, part, told)",
    )
    replace("longrun.stores._replicated.mirror", "alike", lambda original: lambda here, there: True)


@bug(
    "parts-exchanged-unseen",
    "tests/stores/test_replicated_async.py"
    "::test_what_another_process_has_in_its_queue_comes_over_before_the_parts_are_exchanged",
)
def parts_exchanged_unseen() -> None:
    """In asynchronous mode the two sides exchange their parts when one process's own queue is empty."""
    replace("longrun.stores._replicated.council", "Council.exchanges", lambda original: lambda self: False)


@bug("moved-takes-orders", "tests/test_copy.py::test_what_was_moved_takes_no_orders_in_its_old_home")
def moved_takes_orders() -> None:
    """A store goes on acknowledging signals and cancels for what was moved to another one."""
    replace("longrun.stored", "was_moved", lambda original: lambda head: False)
