"""The own times of all ranks: gathered at log steps, as gauges, and the straggler among them at /progress."""

from __future__ import annotations

import os
import socket
from dataclasses import astuple

from fluxtrain.contract.launch import ENV_POD_UID
from fluxtrain.contract.progress import STRAGGLER_TEXTS
from fluxtrain.distributed import World
from fluxtrain.progress import Progress
from fluxtrain.report.metrics import Metrics
from fluxtrain.report.stragglers import NUM_LOG_STEPS, Straggler, StragglerSearch
from fluxtrain.step_times import RankTimes


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
            self._metrics.rank_compute.labels(str(rank)).set(of_rank.compute)
            self._metrics.rank_data_wait.labels(str(rank)).set(of_rank.data)
            self._metrics.rank_backward.labels(str(rank)).set(of_rank.backward)
            self._metrics.rank_optimizer.labels(str(rank)).set(of_rank.optimizer)
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
