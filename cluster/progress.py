"""One line per part on standard error, with the seconds that it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import ClusterError


def say(text: str) -> None:
    """Print a line for the person who waits."""
    print(f"cluster: {text}", file=sys.stderr, flush=True)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Print ``name`` and how long the block took, where it succeeds."""
    begin = time.monotonic()
    yield
    say(f"{time.monotonic() - begin:6.1f} s  {name}")


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float, every: float = 0.2
) -> None:
    """Return as soon as ``condition()`` holds.

    Raises ClusterError where it does not within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)
