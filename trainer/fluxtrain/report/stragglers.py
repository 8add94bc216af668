"""Stragglers: ranks that are slower than the median over several log steps, and why. Pure.

Own times of ranks differ by chance, above all on CPUs that others use too. So a rank is named for its
computing only if it is slow in every one of these log steps; waits for data come in bursts, so most of them
are enough. A rank that is named stays so while it is slow in most of them.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median, median_low

from fluxtrain.contract.process import (
    BACKWARD,
    COMPUTE,
    DATA,
    ENV_POD_UID,
    OPTIMIZER,
    STRAGGLER_TEXTS,
    Cause,
)
from fluxtrain.parallel.distributed import World
from fluxtrain.report.metrics import Metrics
from fluxtrain.runtime.progress import Progress
from fluxtrain.runtime.step_times import RankTimes

NUM_LOG_STEPS = 8
_MAX_SLOWDOWN = 1000.0


@dataclass(frozen=True)
class Straggler:
    """A rank, and how slow it is for one cause, in one log step or in several."""

    rank: int
    cause: Cause
    slowdown: float
    """Its time over the median; of ``data`` and ``optimizer`` the time of a step over that without what is
    longer than the median."""
    own: float
    """Its seconds per step, for this cause."""
    others: float
    """The median of all ranks, of an even number the lower one."""


class StragglerSearch:
    """Finds the straggler of a run whose ranks stay the same."""

    def __init__(self, factor: float) -> None:
        """Name a rank that is slower than the median by more than ``factor``."""
        self._factor = factor
        self._window = deque[list[Straggler]](maxlen=NUM_LOG_STEPS)
        self._present: Straggler | None = None

    def add(self, times: Sequence[RankTimes], step_seconds: float) -> Straggler | None:
        """Add a log step, in which a step took ``step_seconds``; return the present straggler."""
        self._window.append(
            [
                *_by_pass(COMPUTE, [own.compute for own in times]),
                *_by_pass(BACKWARD, [own.backward for own in times]),
                *_by_step(OPTIMIZER, [own.optimizer for own in times], step_seconds),
                *_by_step(DATA, [own.data for own in times], step_seconds),
            ]
        )
        if len(self._window) < NUM_LOG_STEPS:
            return None
        slow = [
            Straggler(
                entries[0].rank,
                entries[0].cause,
                median(entry.slowdown for entry in entries),
                median(entry.own for entry in entries),
                median(entry.others for entry in entries),
            )
            for entries in zip(*self._window, strict=True)
            if self._is_slow(entries)
        ]
        self._present = max(slow, key=lambda straggler: straggler.slowdown, default=None)
        return self._present

    def _is_slow(self, entries: Sequence[Straggler]) -> bool:
        """Return whether a rank, by its entries of all log steps, is slow for one cause."""
        first, present = entries[0], self._present
        is_present = present and (present.rank, present.cause) == (first.rank, first.cause)
        statistic = median_low if is_present or first.cause == DATA else min
        return statistic([entry.slowdown for entry in entries]) > self._factor


def _by_pass(cause: Cause, seconds: Sequence[float]) -> list[Straggler]:
    """Return by how much the passes of each rank, of these ``seconds``, are longer than the median's."""
    others = median_low(seconds)
    return [
        Straggler(rank, cause, _ratio(own, others), own, others) for rank, own in enumerate(seconds)
    ]


def _by_step(cause: Cause, seconds: Sequence[float], step_seconds: float) -> list[Straggler]:
    """Return by how much a step is longer because of each rank's ``seconds``: the others wait for it."""
    others = median_low(seconds)
    return [
        Straggler(rank, cause, _ratio(step_seconds, step_seconds - excess), own, others)
        for rank, own in enumerate(seconds)
        for excess in (max(0.0, own - others),)
    ]


def _ratio(value: float, to: float) -> float:
    """Return ``value / to``, at most _MAX_SLOWDOWN; 1 if nothing was measured."""
    if value <= 0.0:
        return 1.0
    return min(_MAX_SLOWDOWN, value / max(to, value / _MAX_SLOWDOWN))


class RankTimesReport:
    """Reports the times of the ranks of one world, and its straggler; every rank must have one."""

    def __init__(
        self, world: World, metrics: Metrics, progress: Progress, factor: float | None
    ) -> None:
        """Gather where each rank runs. A straggler is slower by ``factor``; None: it is not looked for."""
        self._world, self._metrics, self._progress = world, metrics, progress
        self._search = StragglerSearch(factor) if factor is not None and world.size > 1 else None
        self._straggler: Straggler | None = None
        places = world.all_gather([socket.gethostname(), os.environ.get(ENV_POD_UID, "")])
        self._hosts, self._pods = places[0::2], places[1::2]

    def log(self, own: RankTimes, step_seconds: float) -> list[str]:
        """Gather the times of all ranks; return lines to print if there is another straggler.

        Every rank must call it. Steps took ``step_seconds`` since the last call.
        """
        gathered = self._world.gather_numbers(list(astuple(own)))
        times = [RankTimes(*numbers) for numbers in gathered]
        first = self._world.rank - self._world.local_rank
        for rank, of_rank in enumerate(times[first : first + self._world.local_size], first):
            for name, gauge in self._metrics.of_rank.items():
                gauge.labels(str(rank)).set(getattr(of_rank, name))
        if self._search is None:
            return []
        return self._update(self._search.add(times, step_seconds))

    def _update(self, found: Straggler | None) -> list[str]:
        before, self._straggler = self._straggler, found
        self._progress.update(straggler=None if found is None else self._report(found))
        if found is None:
            return ["no rank is a straggler any more"] if before is not None else []
        if before is not None and (before.rank, before.cause) == (found.rank, found.cause):
            return []
        return [self._line(found)]

    def _report(self, found: Straggler) -> dict[str, object]:
        return {
            "rank": found.rank,
            "host": self._hosts[found.rank],
            "pod": self._pods[found.rank],
            "cause": found.cause,
            "slowdown": round(found.slowdown, 3),
        }

    def _line(self, found: Straggler) -> str:
        place = f"straggler: rank {found.rank} on {self._hosts[found.rank]}"
        figures = f"{found.own:.3g} s a step, median of all ranks {found.others:.3g} s"
        over = f"over {NUM_LOG_STEPS} log steps"
        text = STRAGGLER_TEXTS[found.cause].format(f"{found.slowdown:.2f} times as long")
        return f"{place} {text} {over} ({figures})"
