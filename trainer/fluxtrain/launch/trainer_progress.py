"""The progress of this node's trainers, as its agent sees it: reports it, prints the stacks of a stall.

Stacks are printed by the trainers themselves, at a signal whose handler needs neither their main thread nor
Python's lock.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fluxtrain.contract.launch import ENV_NODE_PROGRESS, STACKS_SIGNAL
from fluxtrain.contract.stacks import STACKS_SECONDS
from fluxtrain.report.node_progress import LATE, RankProgress, read_ranks

_POLL_SECONDS = 1.0
_STALLED = 0.5
"""Stacks are printed after this fraction of the time without progress after which the operator restarts."""


class TrainerProgress:
    """The progress of the ranks of this node."""

    def __init__(self, on_progress: Callable[[Sequence[RankProgress]], None]) -> None:
        """Call ``on_progress`` with the progress of the ranks at each poll."""
        self._on_progress = on_progress
        self._has_printed = False  # since the last progress
        self._lock = threading.Lock()

    def poll(self) -> None:
        """Report the progress, and print the stacks of all ranks once if none makes any."""
        ranks = read_ranks()
        self._on_progress(ranks)
        self._print_if_stalled(ranks, _STALLED)

    def print_if_stalled(self) -> None:
        """Print the stacks of all ranks if all are late; called before they are stopped."""
        self._print_if_stalled(read_ranks(), LATE)

    def _print_if_stalled(self, ranks: Sequence[RankProgress], fraction: float) -> None:
        with self._lock:
            stalled = are_stalled(ranks, time.monotonic(), fraction)
            if stalled and not self._has_printed:
                print_stacks(ranks)
            self._has_printed = stalled


def are_stalled(ranks: Sequence[RankProgress], now: float, fraction: float) -> bool:
    """Return whether no rank has made progress for ``fraction`` of its time; False without ranks."""
    return bool(ranks) and all(
        rank.seconds_since_progress(now) >= fraction * rank.stall_seconds() for rank in ranks
    )


def print_stacks(ranks: Sequence[RankProgress]) -> None:
    """Make ``ranks`` print the stacks of their threads, one after the other."""
    for rank in ranks:
        seconds = rank.seconds_since_progress(time.monotonic())
        where = f": {rank.stack}" if rank.stack else ""
        text = f"no progress for {seconds:.0f} s in phase {rank.phase}, step {rank.step}{where}"
        print(f"fluxtrain: rank {rank.rank}: {text}", file=sys.stderr, flush=True)
        with suppress(OSError):  # it has just ended
            os.kill(rank.pid, STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)


@contextmanager
def trainer_progress(
    on_progress: Callable[[Sequence[RankProgress]], None],
) -> Iterator[TrainerProgress]:
    """Make the trainers started meanwhile write their progress, and poll it once a second."""
    progress, stopped = TrainerProgress(on_progress), threading.Event()

    def poll() -> None:
        while not stopped.wait(_POLL_SECONDS):
            progress.poll()

    with tempfile.TemporaryDirectory(prefix="fluxtrain-", ignore_cleanup_errors=True) as folder:
        os.environ[ENV_NODE_PROGRESS] = folder
        thread = threading.Thread(target=poll, name="progress", daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            stopped.set()
            thread.join()
            del os.environ[ENV_NODE_PROGRESS]
