"""The work queue: a key once, never twice at a time, namespaces in turn.

With a minimum interval, and backoff after failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

from tests.operator.controller.event_loop import in_virtual_time, now, run_in_virtual_time, until

from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller.work_queue import FairQueue, WorkQueue

A, B = ("ns", "a"), ("ns", "b")


def run(
    scenario: Callable[[WorkQueue], Awaitable[None]],
    work: Callable[[Key], Awaitable[float | None]],
    num_workers: int = 4,
    min_interval_seconds: float = 0.0,
) -> list[tuple[Key, str]]:
    """Run ``scenario`` and the workers; return the reported failures."""
    failures: list[tuple[Key, str]] = []

    async def main() -> None:
        queue = WorkQueue(
            lambda key, error: failures.append((key, str(error))), min_interval_seconds
        )
        workers = asyncio.create_task(queue.run(work, num_workers))
        try:
            async with asyncio.timeout(20):
                await scenario(queue)
        finally:
            workers.cancel()
            await asyncio.gather(workers, return_exceptions=True)

    run_in_virtual_time(main())
    return failures


class Recorder:
    """Records keys and times of the work; fails the first ``num_failures`` times."""

    def __init__(self, num_failures: int = 0, *delays: float) -> None:
        self.keys: list[Key] = []
        self.times: list[float] = []
        self._num_failures, self._delays = num_failures, list(delays)

    async def work(self, key: Key) -> float | None:
        self.keys.append(key)
        self.times.append(now())
        if len(self.keys) <= self._num_failures:
            raise RuntimeError("not now")
        return self._delays.pop(0) if self._delays else None

    async def until(self, count: int) -> None:
        await until(lambda: len(self.keys) >= count)


def test_a_key_that_is_added_often_is_processed_once() -> None:
    recorder = Recorder()

    async def scenario(queue: WorkQueue) -> None:
        for _ in range(100):
            queue.add(A)
        queue.add(B)
        assert len(queue) == 2
        await asyncio.sleep(0.05)

    assert run(scenario, recorder.work) == []
    assert recorder.keys == [A, B]


def test_a_key_is_never_processed_twice_at_a_time_but_again_afterwards() -> None:
    processing, most, count = 0, 0, 0

    async def work(key: Key) -> None:
        nonlocal processing, most, count
        processing += 1
        most, count = max(most, processing), count + 1
        await asyncio.sleep(0.02)
        processing -= 1

    async def scenario(queue: WorkQueue) -> None:
        for _ in range(20):
            queue.add(A)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)

    run(scenario, work)
    assert most == 1
    assert 2 <= count <= 20


def test_different_keys_are_processed_concurrently() -> None:
    barrier = asyncio.Barrier(2)

    async def work(key: Key) -> None:
        await barrier.wait()

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        queue.add(B)
        await asyncio.sleep(0.05)
        assert not barrier.broken
        assert barrier.n_waiting == 0

    run(scenario, work)


def test_a_failed_key_is_reported_and_requeued_with_backoff() -> None:
    recorder = Recorder(2)

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        await recorder.until(3)

    assert run(scenario, recorder.work) == [(A, "not now"), (A, "not now")]
    first, second = (later - sooner for sooner, later in pairwise(recorder.times))
    assert 0.9 < first < second


def test_the_latest_work_decides_when_its_key_is_requeued() -> None:
    recorder = Recorder(0, 100.0, 0.05, 0.05)

    async def scenario(queue: WorkQueue) -> None:
        for count in (1, 4):
            queue.add(A)
            await recorder.until(count)
        await asyncio.sleep(0.2)

    run(scenario, recorder.work)
    assert recorder.keys == [A, A, A, A], "the 100 s are replaced, and the last one asked for none"


def test_a_key_is_not_processed_again_within_the_minimum_interval() -> None:
    recorder = Recorder()

    async def scenario(queue: WorkQueue) -> None:
        for _ in range(10):
            queue.add(A)
            await asyncio.sleep(0.01)
        added = now()
        await until(lambda: recorder.times[-1] >= added)

    run(scenario, recorder.work, min_interval_seconds=0.2)
    intervals = [later - sooner for sooner, later in pairwise(recorder.times)]
    assert all(interval >= 0.19 for interval in intervals), intervals


def test_the_minimum_interval_keeps_a_failed_key_requeued() -> None:
    recorder = Recorder(1)

    async def scenario(queue: WorkQueue) -> None:
        queue.add(A)
        await recorder.until(2)

    assert run(scenario, recorder.work, min_interval_seconds=0.1) == [(A, "not now")]


def test_nothing_stays_in_memory_of_keys_that_need_no_more_work() -> None:
    seen: dict[Key, int] = {}
    queues: list[WorkQueue] = []

    async def work(key: Key) -> float | None:
        """Fail at first, then ask for a requeue hours ahead, then for none."""
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1:
            raise RuntimeError("not now")
        return 10_000.0 if seen[key] == 2 else None

    async def scenario(queue: WorkQueue) -> None:
        queues.append(queue)
        keys = [("ns", str(index)) for index in range(20)]
        for count in (1, 2, 3):
            for key in keys:
                queue.add(key)
            await until(lambda count=count: all(seen.get(key, 0) >= count for key in keys))
        await asyncio.sleep(0.05)

    run(scenario, work)
    attributes = vars(queues[0]).items()
    sizes = {name: len(value) for name, value in attributes if hasattr(value, "__len__")}
    assert len(sizes) >= 5
    assert not any(sizes.values()), sizes


def test_other_tasks_run_between_the_keys() -> None:
    """Keys that need no request must not delay the renewals of the Lease until all are processed."""
    recorder, num_workers = Recorder(), 3

    async def scenario(queue: WorkQueue) -> None:
        for index in range(100):
            queue.add(("ns", str(index)))
        turns = 0
        while len(recorder.keys) < 100:
            await asyncio.sleep(0)
            turns += 1
            assert len(recorder.keys) <= num_workers * turns

    run(scenario, recorder.work, num_workers)


def test_keys_that_are_always_queued_again_keep_no_other_waiting() -> None:
    processed: dict[Key, int] = {}

    async def work(key: Key) -> float | None:
        processed[key] = processed.get(key, 0) + 1
        return 0.0 if key[0] == "busy" else None

    async def scenario(queue: WorkQueue) -> None:
        for index in range(20):
            queue.add(("busy", str(index)))
        for index in range(100):
            queue.add(("calm", str(index)))
        await until(lambda: sum(key[0] == "calm" for key in processed) == 100)

    run(scenario, work, num_workers=2, min_interval_seconds=0.01)
    assert max(processed.values()) < 50


def keys(namespace: str, count: int) -> list[Key]:
    return [(namespace, f"job-{n}") for n in range(count)]


def test_namespaces_are_served_in_turn_and_each_in_order() -> None:
    async def main() -> list[Key]:
        queue = FairQueue()
        for key in (*keys("a", 4), *keys("b", 2), *keys("c", 1)):
            queue.put(key)
        return [await queue.get() for _ in range(7)]

    served = asyncio.run(main())
    assert [namespace for namespace, _ in served] == ["a", "b", "c", "a", "b", "a", "a"]
    assert [key for key in served if key[0] == "a"] == keys("a", 4)


def test_a_namespace_gets_no_more_than_its_part_of_the_workers() -> None:
    async def main() -> None:
        queue = FairQueue()
        queue.max_per_namespace = 2
        for key in keys("a", 3):
            queue.put(key)
        taken = [await queue.get() for _ in range(2)]
        third = asyncio.create_task(queue.get())
        await asyncio.sleep(0.01)
        assert not third.done()
        queue.put(("b", "job"))
        assert await third == ("b", "job")
        third = asyncio.create_task(queue.get())
        await asyncio.sleep(0.01)
        assert not third.done()
        queue.release(taken[0])
        assert await third == ("a", "job-2")

    asyncio.run(asyncio.wait_for(main(), 10))


@in_virtual_time
async def test_a_job_does_not_wait_for_ten_thousand_of_another_namespace() -> None:
    """Each of those takes a second; the neighbour's job begins at once, whenever it is queued."""
    begun: dict[Key, float] = {}

    async def work(key: Key) -> None:
        begun[key] = now()
        await asyncio.sleep(1)

    queue = WorkQueue(lambda key, error: None)
    for key in keys("many", 10_000):
        queue.add(key)
    workers = asyncio.create_task(queue.run(work, 10))
    await asyncio.sleep(3.5)
    for key in keys("few", 2):
        queue.add(key)
    await until(lambda: ("few", "job-1") in begun)
    assert len(begun) > 30, "the others go on"
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)
    assert max(time for key, time in begun.items() if key[0] == "few") < 3.6
