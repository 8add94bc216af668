"""Runs the election in a thread: while the reconciles keep their event loop busy, the Lease is renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

Work = Callable[..., Coroutine[Any, Any, None]]
_Place = tuple[asyncio.AbstractEventLoop, "asyncio.Task[Any] | None"]


async def elect_in_thread(elect: Callable[[Work], Coroutine[Any, Any, None]], work: Work) -> None:
    """Run ``elect`` in a thread with an event loop of its own, until it ends.

    ``elect`` is passed a function that runs ``work`` on the present loop, and that ends when ``work`` has,
    also if cancelled. A cancellation, and errors of either, are passed on.
    """
    here, place = asyncio.get_running_loop(), Future[_Place]()

    async def elect_there() -> None:
        place.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await elect(lambda *args: _run_on(here, lambda: work(*args)))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(elect_there())

    thread = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        loop, task = await asyncio.wrap_future(place)
        if task is not None and not thread.done():
            loop.call_soon_threadsafe(task.cancel)
        await thread
        raise


async def _run_on(loop: asyncio.AbstractEventLoop, work: Work) -> None:
    """Run ``work`` on another thread's ``loop``; if cancelled, cancel it there and wait for its end."""
    here, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    def begin() -> None:
        tasks.append(loop.create_task(work()))
        tasks[0].add_done_callback(lambda task: here.call_soon_threadsafe(ended.set))

    loop.call_soon_threadsafe(begin)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())
        await ended.wait()
        raise
    tasks[0].result()
