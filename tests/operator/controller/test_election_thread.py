"""The election has an event loop of its own; the work ends before the election does."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.operator.controller.event_loop import synchronous

from fluxtrain_operator.controller.election_thread import Work, elect_in_thread

SECONDS = 60


@synchronous
async def test_the_election_goes_on_while_the_loop_of_the_work_is_blocked() -> None:
    blocked, renewed = threading.Event(), threading.Event()

    async def elect(work: Work) -> None:
        working = asyncio.create_task(work("a", 1))
        while not blocked.is_set():
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0.001)
        renewed.set()
        await working

    async def work(*args: object) -> None:
        assert args == ("a", 1)
        blocked.set()
        assert renewed.wait(SECONDS), "this blocks the loop, as a long computation would"

    await elect_in_thread(elect, work)
    assert renewed.is_set()


@pytest.mark.parametrize("number", range(20))
@synchronous
async def test_a_cancellation_ends_the_work_and_then_the_election(number: int) -> None:
    order, began = list[str](), asyncio.Event()

    async def elect(work: Work) -> None:
        working = asyncio.create_task(work())
        try:
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            order.append("released")

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(SECONDS)
        finally:
            await asyncio.sleep(0.001)
            order.append("ended")

    task = asyncio.create_task(elect_in_thread(elect, work))
    if number % 2:
        await began.wait()
    else:
        await asyncio.sleep(number / 10_000)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order in (["ended", "released"], ["released"], [])
    assert not began.is_set() or order == ["ended", "released"]


@synchronous
async def test_a_lost_election_cancels_the_work_and_returns() -> None:
    ended = list[str]()

    async def elect(work: Work) -> None:
        working = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    async def work() -> None:
        try:
            await asyncio.sleep(SECONDS)
        finally:
            ended.append("ended")

    await elect_in_thread(elect, work)
    assert ended == ["ended"]


@synchronous
async def test_errors_of_the_work_and_of_the_election_are_raised() -> None:
    async def elect(work: Work) -> None:
        await work()

    async def work() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await elect_in_thread(elect, work)

    async def failing(work: Work) -> None:
        raise ValueError("of the election")

    with pytest.raises(ValueError, match="of the election"):
        await elect_in_thread(failing, work)
