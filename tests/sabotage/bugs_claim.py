"""Bugs in who owns what: claims, leases, sweeps, control, and what a start finds."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs

from longrun.errors import LongrunError
from tests.sabotage.bug import bug, edit, replace

Function = Any


@bug(
    "lost-lease-renewed",
    "tests/campaign/test_stop_and_go.py::test_a_renewal_that_came_too_late_is_not_trusted",
)
def lost_lease_renewed() -> None:
    """A renewal that comes after the lease had run out is taken for a good one."""
    edit("longrun.lease", "LeaseKeeper._renewed", " or self._clock.monotonic() > self._until", "")


@bug(
    "lost-step-runs-on",
    "tests/test_lease.py::test_a_stopped_owner_is_taken_over_and_its_step_is_cancelled_when_it_wakes",
)
def lost_step_runs_on() -> None:
    """The step of an execution that belongs to somebody else now is not cancelled."""
    edit("longrun.runner", "Runner.lose", "self.interrupt()", "pass")


@bug("the-living-taken-for-dead", "tests/test_resume_all.py::test_what_another_living_executor_runs_is_left_alone")
def the_living_taken_for_dead() -> None:
    """Every other owner counts as dead."""

    def make(gone: Function) -> Function:
        return lambda owners, *, but=None: frozenset(owner.id for owner in owners if owner.id != but)

    replace("longrun.lease", "gone", make)


@bug("death-not-seen", "tests/test_resume_all.py::test_a_living_executor_takes_up_what_a_killed_process_ran")
def death_not_seen() -> None:
    """A free lock does not prove the death of its owner: only the lease decides."""
    replace("longrun.life", "is_dead", lambda original: lambda life: False)


@bug(
    "held-pause-resumed",
    "tests/test_pause.py::test_hold_stays_through_restarts_and_a_plain_pause_ends_with_the_next_start",
    quick=True,
)
def held_pause_resumed() -> None:
    """A start resumes what is held."""
    edit("longrun.startup", "Startup._not_ours", "and head.hold", "and False")
    edit("longrun.runner", "Runner._take_up", "head.hold or not self._wakes_paused", "not self._wakes_paused")


@bug("lease-not-given-back", "tests/test_poison.py::test_a_clean_shutdown_is_no_crash")
def lease_not_given_back() -> None:
    """A drain leaves its executions in the hands of an owner that is gone."""

    def make(release: Function) -> Function:
        async def nothing(self: Any) -> None:
            return None

        return nothing

    replace("longrun.control", "Obedience.release", make)


@bug("poison-never-blocked", "tests/test_poison.py::test_after_max_crashes_it_is_blocked_and_resume_frees_it")
def poison_never_blocked() -> None:
    """No number of crashes is too many."""
    edit("longrun.runner", "Runner._take_up", "head.crashes >= self.crew.config.max_crashes", "False")
    edit("longrun.startup", "unusable", "head.crashes >= executor.config.max_crashes", "False")


@bug("concurrency-unbounded", "tests/test_start.py::test_no_more_than_max_concurrency_run_at_once")
def concurrency_unbounded() -> None:
    """`max_concurrency` is not obeyed."""
    edit("longrun.places", "Places.ask", "if self._free is None:", "if True:")


@bug("lost-claim-forgotten", "tests/test_store_failing.py::test_a_claim_whose_answer_is_lost_is_looked_for")
def lost_claim_forgotten() -> None:
    """A claim whose answer was lost is not looked for: nobody runs what it gave."""
    edit("longrun.claims", "Claims.ask", "self.unsure = True", "pass")


@bug(
    "damage-not-told",
    "tests/campaign/test_bad_bytes.py::test_an_execution_says_that_it_went_back_to_an_older_checkpoint",
)
def damage_not_told() -> None:
    """An execution that went back to an older checkpoint does not say so."""
    edit("longrun.control", "Obedience.accept", 'await self._book.commit({"reason": reason})', "pass")


@bug("retention-removes-the-living", "tests/test_history.py::test_what_is_finished_and_old_goes_and_what_lives_stays")
def retention_removes_the_living() -> None:
    """The clearing of old executions takes those that are not finished along."""
    edit("longrun.stores.memory", "MemoryBackend.delete", "self._records[id].head.state.finished and ", "")
    edit(
        "longrun.stores.store",
        "CheckpointStore.gc",
        "Query(states=FINISHED, ended_before=now - policy.max_age, limit=500)",
        "Query(limit=500)",
    )


@bug("moved-blob-accepted", "tests/test_seal.py::test_a_blob_moved_to_another_place_is_refused", quick=True)
def moved_blob_accepted() -> None:
    """What is encrypted is not bound to its execution and number."""

    def make(bound: Function) -> Function:
        return lambda flags, length, key_id, context: bound(flags, length, key_id, "")

    replace("longrun.seal", "_bound", make)


@bug("newer-format-read", "tests/test_seal.py::test_a_newer_frame_is_refused_as_newer")
def newer_format_read() -> None:
    """A frame of a later version is read as if it were of this one."""
    replace("longrun.seal", "_check_version", lambda original: lambda version, context: None)


@bug("zstd-bomb-unfolds", "tests/test_seal.py::test_a_bomb_takes_no_more_memory_than_it_states")
def zstd_bomb_unfolds() -> None:
    """What is compressed is unfolded whole, whatever its frame says."""
    edit("longrun.seal", "_decompress", "payload, max_length=length + 1", "payload")


@bug("signal-wakes-nobody", "tests/test_signals.py::test_an_acknowledged_signal_survives_a_crash")
def signal_wakes_nobody() -> None:
    """A signal to what nobody owns does not make it due."""

    def make(send: Function) -> Function:
        def asleep(self: Any, record: Any, write: Any) -> Any:
            answer = send(self, record, write)
            record.head = attrs.evolve(record.head, woken=False)
            return answer

        return asleep

    replace("longrun.stores.memory", "MemoryBackend._send", make)


@bug(
    "forgotten-owner",
    "tests/campaign/test_found.py::test_what_was_parked_under_an_owner_whom_nobody_knows_any_more_goes_on",
)
def forgotten_owner() -> None:
    """What is parked under an owner that the store has forgotten is left to it."""

    def make(holders: Function) -> Function:
        async def nobody(self: Any) -> frozenset[str]:
            return frozenset()

        return nobody

    replace("longrun.dead", "Dead.holders", make)


@bug(
    "timer-rings-once",
    "tests/test_store_failing.py::test_what_rests_here_is_woken_although_that_failed_when_its_time_came",
)
def timer_rings_once() -> None:
    """A parked execution that cannot be taken up at the moment it is due is forgotten."""

    def make(woken: Function) -> Function:
        async def done(self: Any, id: str) -> bool:
            with contextlib.suppress(LongrunError):
                await woken(self, id)
            return True

        return done

    replace("longrun.sweep", "Sweeper._woken", make)


@bug(
    "record-kept",
    "tests/test_queues.py::test_a_holder_that_could_not_write_a_record_back_keeps_nobody_out",
)
def record_kept() -> None:
    """A queue's record that could not be written back stays with whoever holds it."""
    edit("longrun.gates", "Gates.look", "if self._held:", "if False:")


@bug(
    "no-second-look",
    "tests/test_fitness.py::test_a_step_that_is_not_known_here_is_taken_up_by_whoever_knows_it",
)
def no_second_look() -> None:
    """What one program has no code for stays blocked while another lives that has it."""
    edit("longrun.fitness", "SecondLook.take", "claim.limit <= 0", "True")


@bug(
    "second-look-at-everything",
    "tests/test_fitness.py::test_what_is_blocked_for_another_reason_is_not_taken_up",
)
def second_look_at_everything() -> None:
    """Whatever is blocked is tried again with every heartbeat."""
    edit("longrun.fitness", "SecondLook._fits", 'not (head.reason or "").endswith(GOES_ON) or ', "")


@bug(
    "trust-after-failover",
    "tests/test_store_failing.py::test_what_ended_here_and_runs_again_after_a_failover_is_taken_up",
)
def trust_after_failover() -> None:
    """When the store was away, nobody looks whether it still has what it had acknowledged."""
    edit("longrun.sweep", "Sweeper.once", " or self._breaks != executor.store.breaks", "")


@bug(
    "orphaned-by-retention",
    "tests/test_children.py::test_retention_leaves_a_child_that_its_parent_may_ask_for_again",
)
def orphaned_by_retention() -> None:
    """A finished child is removed while its parent may still ask for it."""
    edit(
        "longrun.stores.store",
        "CheckpointStore._let_go",
        "if stored.definition.parent_id not in unfinished",
        "if True",
    )
