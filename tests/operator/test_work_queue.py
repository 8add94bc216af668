"""The work queue: a key once, never twice at a time, later and later after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fluxtrain_operator.work_queue import Key, WorkQueue

A, B = ("ns", "a"), ("ns", "b")


def run(
    scenario: Callable[[WorkQueue], Awaitable[None]],
    work: Callable[[Key], Awaitable[float | None]],
    num_workers: int = 4,
) -> list[tuple[Key, str]]:
    """Run ``scenario`` beside the workers; return the failures that were told of."""
    failures: list[tuple[Key, str]] = []

    async def main() -> None:
        queue = WorkQueue(lambda key, error: failures.append((key, str(error))))
        workers = asyncio.create_task(queue.run(work, num_workers))
        try:
            async with asyncio.timeout(20):
                await scenario(queue)
        finally:
            workers.cancel()
            await asyncio.gather(workers, return_exceptions=True)

    asyncio.run(main())
    return failures


def test_a_key_that_is_added_often_has_one_turn() -> None:
    turns: list[Key] = []

    async def work(key: Key) -> None:
        turns.append(key)

    async def scenario(queue: WorkQueue) -> None:
        for _ in range(100):
            queue.add(A)
        queue.add(B)
        assert len(queue) == 2
        await asyncio.sleep(0.05)

    assert run(scenario, work) == []
    assert turns == [A, B]


def test_a_key_is_never_worked_on_twice_at_a_time_and_comes_again() -> None:
    busy, most, turns = 0, 0, 0

    async def work(key: Key) -> None:
        nonlocal busy, most, turns
        busy += 1
        most, turns = max(most, busy), turns + 1
        await asyncio.sleep(0.02)
        busy -= 1

    async def scenario(queue: WorkQueue) -> None:
        for _ in range(20):
            queue.add(A)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)

    run(scenario, work)
    assert most == 1
    assert 2 <= turns <= 20


def test_different_keys_are_worked_on_side_by_side() -> None:
    meeting = asyncio.Barrier(2)

    async def work(key: Key) -> None:
        await meeting.wait()

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        queue.add(B)
        await asyncio.sleep(0.05)
        assert not meeting.broken
        assert meeting.n_waiting == 0

    run(scenario, work)


def test_a_failure_is_told_and_the_key_comes_back_later_and_later() -> None:
    times: list[float] = []

    async def work(key: Key) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 3:
            raise RuntimeError("not now")

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        while len(times) < 3:
            await asyncio.sleep(0.05)

    assert run(scenario, work) == [(A, "not now"), (A, "not now")]
    assert 0.9 < times[1] - times[0] < times[2] - times[1]


def test_a_sooner_look_wins_over_a_later_one() -> None:
    turns: list[Key] = []

    async def work(key: Key) -> None:
        turns.append(key)

    async def scenario(queue: WorkQueue) -> None:
        queue.add_after(A, 0.05)
        queue.add_after(A, 100)
        queue.add_after(B, 100)
        queue.add_after(B, 0.05)
        await asyncio.sleep(0.3)

    run(scenario, work)
    assert sorted(turns) == [A, B]


def test_work_says_when_to_look_again_and_a_forgotten_key_is_not_looked_at() -> None:
    turns: list[Key] = []

    async def work(key: Key) -> float | None:
        turns.append(key)
        return 0.05 if key == A and len(turns) < 3 else None

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        queue.add_after(B, 0.1)
        queue.forget(B)
        await asyncio.sleep(0.4)

    run(scenario, work)
    assert turns == [A, A, A]
