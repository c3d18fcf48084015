"""Bugs in the short ways that most writes take: steps, starts and ends, and the turn of the loop that answers them."""

from __future__ import annotations

from typing import Any

from tests.sabotage.bug import bug, edit, replace
from tests.sabotage.bugs_stores import in_postgres, in_redis, in_store

Function = Any
ALONE = "test_a_bad_move_fails_alone"


# steps


@bug("moves-are-not-fenced-sqlite", *in_store("sqlite", "TestSQLiteStore", ALONE))
def moves_are_not_fenced_sqlite() -> None:
    """From step to step, SQLite does not look whose the execution is."""
    edit("longrun.stores._sqlite.batch", "Batch._pass", "row.fence != head.fence or ", "")


@bug("moves-may-be-missing", *in_store("sqlite", "TestSQLiteStore", ALONE))
def moves_may_be_missing() -> None:
    """From step to step, SQLite does not look whether the write before this one has come."""
    edit("longrun.stores._sqlite.batch", "Batch._pass", "row.revision != revision - 1", "row.revision > revision - 1")


@bug(
    "moves-are-not-fenced-postgres", *in_store("postgres", "TestPostgresStore", "test_who_was_taken_over_moves_nothing")
)
def moves_are_not_fenced_postgres() -> None:
    """From step to step, PostgreSQL compares the revision alone."""
    in_postgres("move", "AND h.fence = w.fence AND", "AND")


@bug("moves-are-not-fenced-redis", *in_store("redis", "TestRedisStore", ALONE))
def moves_are_not_fenced_redis() -> None:
    """From step to step, Redis looks at the end of the record alone."""
    in_redis("commit", "sub(old, 9, 8 + #before) ~= before or sub(old, -#tail) ~= tail", "sub(old, -#tail) ~= tail")


@bug("moves-are-not-fenced-file", *in_store("file", "TestFileStore", ALONE))
def moves_are_not_fenced_file() -> None:
    """From step to step, the file store does not look whose the execution is."""
    edit("longrun.stores._file.lean", "is_simple", "and stored.fence == head.fence", "")


@bug(
    "owner-asked-too-early", "tests/stores/test_file_lean.py::test_who_is_still_the_owner_is_asked_after_the_last_sync"
)
def owner_asked_too_early() -> None:
    """A journal that is taken over while it is synced is acknowledged to the one who has lost it."""
    edit("longrun.stores._file.lean", "Lean._sync", "errors = pool", "self._confirm()\n    errors = pool")
    replace("longrun.stores._file.lean", "Lean.make", _without_a_last_look)


def _without_a_last_look(original: Function) -> Function:
    def make(self: Any, batch: Any, pool: Any) -> None:
        self._write(batch)
        if self._written:
            self._sync(pool)

    return make


@bug(
    "head-before-its-row",
    "tests/stores/test_redis_batches.py::test_a_row_that_cannot_be_written_refuses_the_whole_save",
)
def head_before_its_row() -> None:
    """Redis moves the head of an execution on, and then finds that the row behind it cannot be written."""
    row = "  call('HSET', base .. 'b:' .. ARGV[at], ARGV[at + 5], ARGV[at + 6])\n"
    head = (
        "  call('HSET', base .. 'x:' .. ARGV[at], 'c', ARGV[at + 1], 'h', ARGV[at + 4], ARGV[at + 7], ARGV[at + 8])\n"
    )
    in_redis("commit", row + head, head + row)


# starts and ends


@bug("start-over-another-sqlite", "tests/stores/test_sqlite_batch.py::test_one_id_is_created_once_in_a_batch")
def start_over_another_sqlite() -> None:
    """The second of two starts with one id, in one commit, is told that it has it."""
    edit("longrun.stores._sqlite.batch", "Batch._key_for", "if id in self._known:", "if False:")


@bug("start-over-another-redis", *in_store("redis", "TestRedisStore", "test_an_id_twice_is_created_once"))
def start_over_another_redis() -> None:
    """A start with an id that is in use takes its place."""
    in_redis("commit", "call('EXISTS', x, base .. 'i:gone:facts'", "call('EXISTS', base .. 'i:gone:facts'")


@bug("end-leaves-messages-sqlite", "tests/stores/test_sqlite_batch.py::test_a_message_sent_elsewhere_goes_with_the_end")
def end_leaves_messages_sqlite() -> None:
    """What was sent to an execution waits for it after its end."""
    edit("longrun.stores._sqlite.batch", "Batch._pass", "not row.messages and ", "")


@bug("end-leaves-messages-postgres", "tests/stores/test_postgres_ends.py::test_messages_of_what_has_ended_are_swept")
def end_leaves_messages_postgres() -> None:
    """What was sent to an execution waits for it after its end."""
    edit("longrun.stores._postgres.moves", "_statement", 'queries.text("unless_sent_to")', '""')


@bug("end-leaves-messages-file", "tests/stores/test_file_lean.py::test_an_end_with_messages_takes_them_along")
def end_leaves_messages_file() -> None:
    """What was sent to an execution waits for it after its end."""
    edit("longrun.stores._file.lean", "is_simple", " and not journal.has_inbox()", "")


@bug(
    "indexes-left-behind",
    "tests/stores/test_redis_batches.py::test_an_error_of_the_server_leaves_starts_and_ends_in_their_indexes",
)
def indexes_left_behind() -> None:
    """After an error in the middle of a commit, what was written before it is in no list, and nobody finds it."""
    in_redis("commit", "    write_quick()\n    write_indexes()\n    error", "    error")


# the claim that goes out in one


@bug("claim-left-open", "tests/stores/test_postgres_asking.py::test_what_fails_in_the_middle_leaves_nothing_behind")
def claim_left_open() -> None:
    """A claim that failed half-way keeps its connection, with a transaction in it and answers that nobody reads."""
    edit("longrun.stores._postgres.asking", "_Together.__exit__", "self._connection.close()", "pass")


# the turn of the loop


@bug("held-up-for-ever", "tests/stores/test_writer.py::test_who_is_held_up_by_another_is_written_all_the_same")
def held_up_for_ever() -> None:
    """A batch gathers for as long as one task keeps the loop to itself."""
    edit("longrun.stores.writer", "Writer._sleep", "timeout=patience", "")


@bug(
    "elsewhere-waits-too",
    "tests/stores/test_writer.py::test_what_came_during_a_commit_does_not_wait_for_those_whom_it_answers",
)
def elsewhere_waits_too() -> None:
    """What came from another thread during a commit waits for everybody whom the commit answers."""
    edit("longrun.stores.writer", "Writer._patience", "if alone else 0.0", "if loop else 0.0")


@bug("one-loop-waits-for-another", "tests/stores/test_writer.py::test_one_loop_does_not_wait_for_another")
def one_loop_waits_for_another() -> None:
    """While one loop goes on, what is written in another one wakes nobody."""
    old = "self._going_on is None or job[1] is not self._going_on"
    edit("longrun.stores.writer", "Writer.add", old, "self._going_on is None")
    edit("longrun.stores.writer", "Writer._sleep", "timeout=patience", "")


@bug("ctrl-c-forgets-the-others", "tests/test_loops.py::test_ctrl_c_in_one_task_keeps_nobody_else_from_going_on")
def ctrl_c_forgets_the_others() -> None:
    """Who was answered in the same call as one who was interrupted never hears of it."""
    edit("longrun.loops", "_AsyncioLoop._wake", "if len(left) > 1:", "if False:")


@bug("ctrl-c-ends-the-answers", "tests/test_loops.py::test_ctrl_c_in_one_task_keeps_nobody_else_from_going_on")
def ctrl_c_ends_the_answers() -> None:
    """Whose answer came in the same batch as that of one who was interrupted never gets it."""
    edit("longrun.loops", "_AsyncioLoop._tell", "if len(left) > 1:", "if False:")


@bug("answers-out-of-turn", "tests/test_loops.py::TestAsyncio::test_who_is_answered_later_is_told_later")
def answers_out_of_turn() -> None:
    """Who is answered last is told first."""
    edit("longrun.loops", "_AsyncioLoop._tell", "left.popleft()", "left.pop()")


@bug("another-ones-context", "tests/test_loops.py::TestAsyncio::test_a_task_goes_on_in_its_own_context")
def another_ones_context() -> None:
    """Who is answered goes on with the context variables of nobody."""
    edit("longrun.loops", "_AsyncioLoop._wake", "waiter.context.run(wake, waiter)", "wake(waiter)")


@bug("answered-twice", "tests/test_loops.py::test_an_answer_reaches_who_waits_and_only_the_first_counts")
def answered_twice() -> None:
    """A second answer takes the place of the first."""
    edit("longrun.loops", "_AsyncioWaiter.__call__", "if self._answer is not WAITING:", "if False:")
