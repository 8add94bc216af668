"""The queue that serves namespaces in turn."""

from __future__ import annotations

import asyncio

from tests.operator.controller.event_loop import now, run_in_virtual_time, until

from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller.work_queue import FairQueue, WorkQueue


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


def test_a_job_does_not_wait_for_ten_thousand_of_another_namespace() -> None:
    """Each of those takes a second; the neighbour's job begins at once, whenever it is queued."""
    begun: dict[Key, float] = {}

    async def work(key: Key) -> None:
        begun[key] = now()
        await asyncio.sleep(1)

    async def main() -> None:
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

    run_in_virtual_time(main())
    assert max(time for key, time in begun.items() if key[0] == "few") < 3.6
