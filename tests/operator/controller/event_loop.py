"""Event loops of tests. In virtual time, which passes while nothing can run, no test waits or is late."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("nothing will ever happen")
        self.now += 0.0 if events else timeout or 0.0
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self) -> float:
        return float(self._passing.now)


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main``, which uses neither threads nor a network."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main)


def synchronous(
    test: Callable[..., Coroutine[Any, Any, None]],
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> Callable[..., None]:
    """Return ``test`` as pytest can call it."""

    @wraps(test)
    def call(*args: Any, **fixtures: Any) -> None:
        run(test(*args, **fixtures))

    return call


in_virtual_time = partial(synchronous, run=run_in_virtual_time)


def now() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until ``holds`` returns true."""
    while not holds():
        await asyncio.sleep(0.01)
