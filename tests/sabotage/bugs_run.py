"""Bugs in what runs, captures and saves an execution."""

from __future__ import annotations

from typing import Any

import attrs

from longrun.errors import StoreUnavailableError
from longrun.stored import Save
from tests.sabotage.bug import bug, edit, replace

Function = Any


@bug("acknowledge-before-commit", "tests/test_store_failing.py::test_nothing_is_acknowledged_meanwhile")
def acknowledge_before_commit() -> None:
    """A save is answered as done when it is queued, before the store has it."""

    def make(add: Function) -> Function:
        def early(self: Any, job: Any) -> None:
            done, loop, *rest = job
            add(self, ((lambda answer: None) if isinstance(rest[0], Save) else done, loop, *rest))
            if isinstance(rest[0], Save):
                done(None) if loop is None else loop.call_soon(done, None)

        return early

    replace("longrun.stores.writer", "Writer.add", make)


@bug("swallow-store-error", "tests/test_store_failing.py::test_the_step_does_not_run_again_and_nothing_is_doubled")
def swallow_store_error() -> None:
    """A store that is away counts as one that has saved."""

    def make(answered: Function) -> Function:
        return lambda self, error: answered(self, None if isinstance(error, StoreUnavailableError) else error)

    replace("longrun.outbox", "Outbox.__call__", make)


@bug("event-before-the-fact", "tests/test_events.py::test_none_is_told_before_its_fact_is_durable")
def event_before_the_fact() -> None:
    """Events are told when their write is handed over, not when it is durable."""

    def make(push: Function) -> Function:
        def telling(self: Any, save: Any, told: Any, done: Any) -> None:
            self._teller.tell(save, told)
            push(self, save, (), done)

        return telling

    replace("longrun.outbox", "Outbox.push", make)


@bug("resume-a-step-too-early", "tests/test_durability.py::test_what_runs_again_after_a_crash", quick=True)
def resume_a_step_too_early() -> None:
    """What is taken up begins with the step before the one that was in flight."""
    _at_load(lambda head: attrs.evolve(head, step=max(0, head.step - 1)))


@bug("resume-a-step-too-late", "tests/test_durability.py::test_what_runs_again_after_a_crash")
def resume_a_step_too_late() -> None:
    """What is taken up leaves out the step that was in flight."""
    _at_load(lambda head: attrs.evolve(head, step=head.step + (head.seq > 1)))


@bug("attempts-not-durable", "tests/test_retry.py::test_attempt_and_next_time_survive_a_crash_during_the_back_off")
def attempts_not_durable() -> None:
    """After a crash the attempts are counted from the beginning again, without the back-off."""
    _at_load(lambda head: attrs.evolve(head, attempt=0, due=None) if head.attempt else head)


def _at_load(change: Any) -> None:
    def make(begin: Function) -> Function:
        def changed(self: Any, executor: Any, loaded: Any, *args: Any, **options: Any) -> None:
            begin(self, executor, attrs.evolve(loaded, head=change(loaded.head)), *args, **options)

        return changed

    replace("longrun.book", "Book.__init__", make)


@bug("same-object-for-every-attempt", "tests/test_retry.py::test_every_attempt_receives_a_state_decoded_anew")
def same_object_for_every_attempt() -> None:
    """The next attempt is given the object that the failed one has changed."""

    def make(state: Function) -> Function:
        def kept(self: Any, annotation: Any) -> Any:
            value = state(self, annotation)
            self._value = value
            return value

        return kept

    replace("longrun.book", "Book.state", make)


@bug("drop-the-last-capture", "tests/test_local.py::test_the_last_capture_is_flushed_by_an_interrupting_pause")
def drop_the_last_capture() -> None:
    """An attempt that ends forgets what was captured since the last save."""
    edit("longrun.ledger", "Ledger.forget_groups", "self._emit()", "pass")


@bug("cursor-off-by-one", "tests/test_each.py::test_a_resumed_loop_goes_on_behind_the_last_saved_item")
def cursor_off_by_one() -> None:
    """A stored cursor counts the item in flight as done."""
    edit("longrun.ledger", "Cursor.encode", '"n": self.captured', '"n": self.captured + 1')


@bug(
    "every-item-not-waited-for",
    "tests/test_local.py::test_what_must_be_durable_does_not_return_before_the_store_has_answered",
)
def every_item_not_waited_for() -> None:
    """`every=1` hands each item over and does not wait until it is durable."""
    edit("longrun.items", "ItemLoop.point", "await port.durable()", "port.hand_over()")


@bug("once-stored-before-the-call", "tests/test_once.py::test_a_crash_during_the_call_calls_it_again")
def once_stored_before_the_call() -> None:
    """A memo is durable before its function was called."""
    call = "memo.keep(await self._call(function, *args))"
    line = f"result = memo.read() if memo.stored is not None else {call}"
    edit("longrun.context", "StepContext.once", line, f"memo.keep(None); await self._port.durable(); result = {call}")


@bug(
    "once-not-waited-for",
    "tests/test_local.py::test_what_must_be_durable_does_not_return_before_the_store_has_answered",
)
def once_not_waited_for() -> None:
    """A memo is returned before it is durable."""
    edit("longrun.context", "StepContext.once", "await self._port.durable()", "self._port.hand_over()")


@bug("late-update-undoes-a-branch", "tests/test_map.py::test_a_late_update_does_not_undo_a_finished_branch")
def late_update_undoes_a_branch() -> None:
    """A context that was kept beyond the end of its branch goes on writing."""
    edit("longrun.ledger", "Group.record", "if not self.closed:", "if True:")
    edit("longrun.ledger", "Group.capture", "if self.closed:", "if False:")
    edit("longrun.ledger", "Ledger.finish", "self._groups.pop(prefix, None)", "self._groups.get(prefix)")


@bug("branch-not-durable", "tests/test_map.py::test_a_finished_branch_is_durable_before_its_worker_goes_on")
def branch_not_durable() -> None:
    """A finished branch is left to the next save."""
    edit("longrun.branches", "Branches._save", "await self._port.durable()", "pass")


@bug(
    "child-process-progress-dropped",
    "tests/test_process.py::test_progress_inside_the_step_survives_the_death_of_the_child",
)
def child_process_progress_dropped() -> None:
    """What a child process wants to save does not reach the ledger."""
    edit("longrun.process", "_record", "ledger.record(key, text.encode())", "pass")


@bug(
    "child-killed-without-last-words",
    "tests/test_process.py::test_the_last_capture_is_flushed_however_an_attempt_ends",
)
def child_killed_without_last_words() -> None:
    """A child process that is to be killed is not asked for what its step has captured."""
    edit("longrun.process", "Child.stopped", 'self._bell.send(b"!")', "pass")


@bug(
    "waiting-fails-with-the-store",
    "tests/test_store_failing.py::test_a_step_that_waits_for_its_child_does_not_fail_with_the_store",
)
def waiting_fails_with_the_store() -> None:
    """A step that waits for its child fails when the store is away."""
    edit("longrun.control_room", "ControlRoom.patiently", "if self.closed or not known:", "if True:")


@bug("signal-taken-without-its-move", "tests/test_signals.py::test_a_signal_is_taken_in_the_same_write_as_the_move")
def signal_taken_without_its_move() -> None:
    """A signal leaves the queue in one write, and the wait it ends is ended in the next."""

    def make(commit: Function) -> Function:
        async def twice(self: Any, changes: Any, *, take: Any = (), events: Any = ()) -> None:
            if take:
                await commit(self, {}, take=take)
            await commit(self, changes, events=events)

        return twice

    replace("longrun.book", "Book.commit", make)


@bug(
    "signal-read-before-it-was-taken",
    "tests/test_signals.py::test_a_signal_that_was_read_before_it_was_taken_is_not_taken_again",
)
def signal_read_before_it_was_taken() -> None:
    """A signal is given to a second wait by whoever had read the queue before the first one took it."""

    def make(consume: Function) -> Function:
        return lambda self, signal: self.pop(signal.id, None)

    replace("longrun.inbox", "Inbox.consume", make)


@bug("signal-before-a-pause", "tests/test_signals.py::test_a_pause_comes_before_a_signal_that_has_come_already")
def signal_before_a_pause() -> None:
    """A wait whose signal is here already ends, whatever else the execution was asked to do."""

    def make(here: Function) -> Function:
        return lambda self, value: self.inbox.signal(getattr(value, "signal", None))

    replace("longrun.runner", "Runner._signal_here", make)


@bug("parked-due-lost", "tests/test_flow.py::test_sleep_parks_until_its_moment")
def parked_due_lost() -> None:
    """A sleep is stored without the moment at which it ends."""

    def make(deadline: Function) -> Function:
        return lambda *args: (None, deadline(*args)[1])

    replace("longrun.course", "deadline_of", make)


@bug("crashes-never-cleared", "tests/test_poison.py::test_progress_clears_the_count")
def crashes_never_cleared() -> None:
    """Progress does not clear the count of crashes."""

    def make(following: Function) -> Function:
        def kept(self: Any, changes: Any, revision: int) -> Any:
            return following(self, {k: v for k, v in changes.items() if k != "crashes"}, revision)

        return kept

    def make_moved(moved: Function) -> Function:
        def kept(head: Any, boundary: Any, progress: float) -> Any:
            new = moved(head, boundary, progress)
            new.crashes = head.crashes
            return new

        return kept

    replace("longrun.book", "Book._next", make)
    replace("longrun.book", "moved", make_moved)


@bug("gathered-boundaries-dropped", "tests/test_durability.py::test_every_boundary_leaves_its_row_in_the_end")
def gathered_boundaries_dropped() -> None:
    """Of boundaries that were coalesced only the newest is written."""

    def make(gathered: Function) -> Function:
        def newest(boundaries: Any, blobs: Any) -> Any:
            boundaries, blobs = gathered(boundaries, blobs)
            return boundaries[-1:], blobs

        return newest

    replace("longrun.book", "_gathered", make)


@bug("shared-blob-removed", "tests/test_durability.py::test_large_values_that_do_not_change_are_written_once")
def shared_blob_removed() -> None:
    """Retention removes a large value that a newer checkpoint still refers to."""
    edit("longrun.snapshot", "Snapshots.let_go", "gone.difference_update(*blobs_of.values())", "pass")


@bug(
    "cancel-not-obeyed-after-the-step",
    "tests/test_cancel.py::test_a_step_that_swallows_its_cancellation_is_cancelled_all_the_same",
)
def cancel_not_obeyed_after_the_step() -> None:
    """A step that swallows its cancellation is not cancelled."""
    replace("longrun.control", "cancelling", lambda original: lambda messages: False)


@bug("key-changes-with-the-attempt", "tests/test_retry.py::test_an_attempt_that_fails_is_repeated_after_the_back_off")
def key_changes_with_the_attempt() -> None:
    """Every attempt has an idempotency key of its own."""

    def make(original: Function) -> Function:
        return property(lambda self: f"{original.fget(self)}.{self.attempt}")

    replace("longrun.port", "StepInfo.idempotency_key", make)


@bug(
    "told-and-stored-are-two",
    "tests/test_pause.py::test_a_pause_that_is_taken_back_while_it_is_being_stored_does_not_come_back",
)
def told_and_stored_are_two() -> None:
    """An order that was told and taken back is obeyed when it has been stored."""
    replace("longrun.runner", "Runner.told_and_stored", lambda original: lambda self, number, order: None)


@bug("short-way-past-an-order", "tests/test_pause.py", "tests/test_cancel.py")
def short_way_past_an_order() -> None:
    """From step to step, nobody looks whether something is to be obeyed."""
    edit(
        "longrun.stride",
        "stride",
        "if runner.attention or index > last",
        "if index > last",
        " or inbox or outbox.lost or",
        " or outbox.lost or",
    )


@bug("short-way-keeps-progress", "tests/test_stride.py::test_the_short_way_leaves_what_the_long_way_leaves")
def short_way_keeps_progress() -> None:
    """What a step has noted of its progress is not cleared by the short write behind it."""
    edit("longrun.book", "Book.pass_on", " or (ledger and ledger.stored)", "")


@bug("short-way-keeps-quiet", "tests/test_stride.py::test_a_listener_that_comes_later_hears_of_the_steps_from_then_on")
def short_way_keeps_quiet() -> None:
    """Who begins to listen while a step runs is not told how it ended."""
    edit("longrun.book", "Book.pass_on", " or self._bus.active", "")


@bug("short-way-forgets-blobs", "tests/test_stride.py::test_the_short_way_leaves_what_the_long_way_leaves")
def short_way_forgets_blobs() -> None:
    """A small state behind a large one leaves its blobs where they are."""
    edit("longrun.snapshot", "Snapshots.take_flat", "self._parts or self._blobs_of or ", "")


@bug(
    "end-drops-what-a-step-returned",
    "tests/test_drain.py::test_one_that_swallows_it_longer_than_anybody_waits_keeps_it_too",
)
def end_drops_what_a_step_returned() -> None:
    """A task that is told to end leaves without what its step returned in the meantime."""
    edit("longrun.runner", "Runner._stretch", "if self._told_to_end and self._cut is None:", "if self._told_to_end:")


@bug(
    "end-comes-too-early",
    "tests/test_shelter.py::test_an_execution_that_is_told_to_end_before_it_has_begun_is_given_back",
)
def end_comes_too_early() -> None:
    """A task that is told to end before it has begun begins all the same."""
    replace("longrun.runner", "Runner.cancel", lambda original: lambda self: original(self) if self._taken_up else None)


@bug(
    "step-begins-without-a-lease",
    "tests/test_lease.py::test_no_step_begins_once_the_lease_has_run_out",
    "tests/test_lease.py::test_behind_a_step_that_outlasted_the_lease_it_is_first_seen_whose_the_execution_is",
)
def step_begins_without_a_lease() -> None:
    """A process that was stopped or cut off begins the next step of what somebody else may have ended."""
    edit("longrun.stride", "stride", "if monotonic() >= keeper.held_until:", "if False:")
    edit("longrun.runner", "Runner._make_way", "if not self.crew.holds_lease:", "if False:")
