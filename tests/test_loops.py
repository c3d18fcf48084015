"""The event for which mostly nobody waits."""

from __future__ import annotations

import anyio

from longrun.loops import Bell


async def test_a_bell_wakes_all_who_wait_and_stays_rung() -> None:
    bell, woken = Bell(), []

    async def wait(number: int) -> None:
        await bell.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        assert not bell.is_set()
        bell.set()
    assert sorted(woken) == [0, 1, 2]
    assert bell.is_set()
    await bell.wait()


async def test_who_waits_no_longer_leaves_nothing_behind() -> None:
    """A result that is polled with a time-out for hours must not gather those who gave up."""
    bell = Bell()
    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bell.wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert not bell._waiters
    bell.set()
    await bell.wait()


async def test_a_rung_bell_lets_others_run() -> None:
    """Else a loop around one would keep everybody from running."""
    bell = Bell()
    ran: list[bool] = []
    bell.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_note, ran)
        while not ran:
            await bell.wait()


async def _note(ran: list[bool]) -> None:
    ran.append(True)
