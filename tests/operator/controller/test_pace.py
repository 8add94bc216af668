"""The first caller goes on at once, the others one after the other, also after a pause."""

from __future__ import annotations

import asyncio

from tests.operator.controller.event_loop import now, run_in_virtual_time

from fluxtrain_operator.controller.work_queue import Pace


def test_callers_go_on_at_the_rate() -> None:
    times: list[float] = []

    async def call(pace: Pace) -> None:
        await pace.wait()
        times.append(round(now(), 3))

    async def main() -> None:
        pace = Pace(per_second=10)
        await asyncio.gather(*(call(pace) for _ in range(3)))
        await asyncio.sleep(100)
        await asyncio.gather(*(call(pace) for _ in range(2)))

    run_in_virtual_time(main())
    first = times[3]
    assert times == [0.0, 0.1, 0.2, first, round(first + 0.1, 3)]
    assert 100 <= first < 101
