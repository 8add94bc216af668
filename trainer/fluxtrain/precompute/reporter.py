"""What the preprocess task tells while it runs: /metrics and /progress on each node, lines from rank 0."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import COMPLETE, FINISHING, RUNNING
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.precompute.target import Target
from fluxtrain.report.console import Console, duration
from fluxtrain.report.endpoint import Endpoint

_MAX_DROPPED_TOLD = 20


class PrecomputeReporter:
    """Counts shards over all ranks by what lies in the folders; a step is a shard here."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, targets: list[Target]
    ) -> None:
        """Tell of ``targets``; nothing is opened yet."""
        self._config, self._world, self._targets = config, world, targets
        self._endpoint = Endpoint(config, paths, world)
        self._metrics, self._progress = self._endpoint.metrics, self._endpoint.progress
        self._closing = ExitStack()
        self._total = sum(target.num_shards for target in targets)
        self._samples = sum(len(target.pictures) for target in targets)
        self._done = self._done_at_first = self._count()
        self._begin = time.monotonic()
        self._dropped: dict[str, int] = {}

    def __enter__(self) -> PrecomputeReporter:
        """Start the endpoint and say what there is to do."""
        if self._world.local_rank == 0:
            self._endpoint.open(self._closing)
        if self._world.is_main:
            self._console = Console(self._total, self._done)
            self._closing.callback(self._console.close)
            self._console.say(
                f"{self._samples:,} samples in {self._total:,} shards on {self._world.size} × "
                f"{self._world.device.type}; {self._done:,} shards are there"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything that was opened."""
        self._closing.close()

    def begin(self) -> None:
        """The encoders are loaded: throughput counts from here."""
        self._begin = time.monotonic()
        self._progress.update(steps=self._total)
        self._endpoint.enter(RUNNING)
        self._endpoint.stepped()

    def waiting(self) -> None:
        """This process has made its shards: the others' are waited for."""
        self._endpoint.enter(FINISHING)

    def alive(self) -> None:
        """Note that something was done: a watcher would else think that this process hangs."""
        self._endpoint.stepped()

    def dropped(self, target: Target, faults: list[str]) -> int:
        """Name the first unreadable samples on stderr; return how many of ``target`` were met so far."""
        count = self._dropped.get(target.part, 0)
        for fault in faults[: max(0, _MAX_DROPPED_TOLD - count)]:
            print(f"left out an unreadable sample: {fault}", file=sys.stderr, flush=True)
        self._metrics.bad_samples.inc(len(faults))
        self._dropped[target.part] = count + len(faults)
        return count + len(faults)

    def shard_done(self) -> None:
        """This process has written a shard: tell how far all are."""
        self.look()
        if self._world.is_main:
            rate, left = self._rate()
            text = f"shard {self._done:>6}/{self._total}  {rate:>8.1f} samples/s  {duration(left)} left"
            self._console.say(text)

    def look(self) -> None:
        """Count the shards again; more of them are a sign of life, whoever wrote them."""
        before, self._done = self._done, self._count()
        if self._done == before:
            return
        rate, left = self._rate()
        samples = min(self._done * self._config.preprocess.shard_size, self._samples)
        self._metrics.step.set(self._done)
        self._metrics.samples.set(samples)
        self._metrics.samples_per_second.set(rate)
        self._metrics.remaining.set(left)
        self._progress.update(
            step=self._done, samples=samples, samplesPerSecond=rate, remainingSeconds=left
        )
        self.alive()
        if self._world.is_main:
            self._console.advance(self._done)

    def complete(self) -> None:
        """Everything is there."""
        self._progress.update(status="success", step=self._total)
        self._endpoint.enter(COMPLETE)
        if self._world.is_main:
            for target in self._targets:
                self._console.say(f"{target.part}: {target.folder}")

    def _count(self) -> int:
        return sum(target.num_there() for target in self._targets)

    def _rate(self) -> tuple[float, float]:
        """Return samples per second over all ranks and the seconds that are left."""
        seconds = time.monotonic() - self._begin
        shards = self._done - self._done_at_first
        per_second = shards / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / per_second if per_second else 0.0
        return per_second * self._config.preprocess.shard_size, left
