"""The work queue: a key once, never twice at a time, with a rest, later and later after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

from fluxtrain_operator.controller.work_queue import WorkQueue
from fluxtrain_operator.names import Key

A, B = ("ns", "a"), ("ns", "b")


def run(
    scenario: Callable[[WorkQueue], Awaitable[None]],
    work: Callable[[Key], Awaitable[float | None]],
    num_workers: int = 4,
    rest_seconds: float = 0.0,
) -> list[tuple[Key, str]]:
    """Run ``scenario`` beside the workers; return the failures that were told of."""
    failures: list[tuple[Key, str]] = []

    async def main() -> None:
        queue = WorkQueue(lambda key, error: failures.append((key, str(error))), rest_seconds)
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


def test_the_latest_turn_says_when_to_look_again() -> None:
    turns: list[Key] = []

    async def work(key: Key) -> float | None:
        turns.append(key)
        return {1: 100.0, 2: 0.05, 3: 0.05}.get(len(turns))

    async def scenario(queue: WorkQueue) -> None:
        for turn in (1, 4):
            queue.add(A)
            while len(turns) < turn:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)

    run(scenario, work)
    assert turns == [A, A, A, A], "a long look is put forward, and the last turn asked for none"


def test_a_key_rests_after_its_turn_and_what_came_meanwhile_is_one_turn() -> None:
    times: list[float] = []

    async def work(key: Key) -> None:
        times.append(asyncio.get_running_loop().time())

    async def scenario(queue: WorkQueue) -> None:
        for _ in range(10):
            queue.add(A)
            await asyncio.sleep(0.01)
        added = asyncio.get_running_loop().time()
        while times[-1] < added:
            await asyncio.sleep(0.01)

    run(scenario, work, rest_seconds=0.2)
    assert all(later - sooner >= 0.19 for sooner, later in pairwise(times)), times


def test_a_failing_key_rests_no_longer_than_its_delay() -> None:
    turns: list[Key] = []

    async def work(key: Key) -> None:
        turns.append(key)
        if len(turns) == 1:
            raise RuntimeError("not now")

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        while len(turns) < 2:
            await asyncio.sleep(0.05)

    assert run(scenario, work, rest_seconds=0.1) == [(A, "not now")]


def test_nothing_is_remembered_of_keys_that_need_no_more_work() -> None:
    seen: dict[Key, int] = {}
    queues: list[WorkQueue] = []

    async def work(key: Key) -> float | None:
        """Fail for a start, ask for a look hours ahead, and find at last that the job is gone."""
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1:
            raise RuntimeError("not now")
        return 10_000.0 if seen[key] == 2 else None

    async def scenario(queue: WorkQueue) -> None:
        queues.append(queue)
        keys = [("ns", str(index)) for index in range(20)]
        for turn in (1, 2, 3):
            for key in keys:
                queue.add(key)
            while any(seen.get(key, 0) < turn for key in keys):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    run(scenario, work)
    sizes = {
        name: len(value) for name, value in vars(queues[0]).items() if hasattr(value, "__len__")
    }
    assert len(sizes) >= 5
    assert not any(sizes.values()), sizes


def test_keys_that_wait_can_be_put_in_another_order() -> None:
    turns: list[Key] = []
    keys = [("ns", name) for name in "abcdef"]

    async def work(key: Key) -> None:
        turns.append(key)

    async def main() -> None:
        queue = WorkQueue(lambda key, error: None)
        for key in keys:
            queue.add(key)
        queue.reorder(lambda key: 0 if key in (keys[2], keys[5]) else 1)
        queue.add(keys[0])
        assert len(queue) == 6
        workers = asyncio.create_task(queue.run(work, 1))
        await asyncio.sleep(0.05)
        workers.cancel()
        await asyncio.gather(workers, return_exceptions=True)

    asyncio.run(main())
    assert turns == [keys[2], keys[5], keys[0], keys[1], keys[3], keys[4]]
