"""Log lines on standard error, and polling."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import ClusterError


def log(text: str) -> None:
    """Print ``text`` on standard error."""
    print(f"cluster: {text}", file=sys.stderr, flush=True)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Log ``name`` and the duration of the block if it succeeds."""
    begin = time.monotonic()
    yield
    log(f"{time.monotonic() - begin:6.1f} s  {name}")


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float, every: float = 0.2
) -> None:
    """Wait until ``condition()`` is true; raise ClusterError after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)
