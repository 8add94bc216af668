"""Temporary signal handlers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handled(handler: Handler, *signums: signal.Signals) -> Iterator[None]:
    """Handle ``signums`` with ``handler``; afterwards restore the previous handlers."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)
