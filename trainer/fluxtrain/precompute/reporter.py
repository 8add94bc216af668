"""Reports the progress of the preprocess task: /metrics and /progress on each node, log lines from rank 0."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import FINISH, STEP
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.precompute.output import EncodedOutput
from fluxtrain.report.console import Console, duration
from fluxtrain.report.endpoint import Endpoint

_MAX_DROPPED_LOGGED = 20


class PrecomputeReporter:
    """Counts the shards of all ranks in the output folders; a step is a shard here."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, outputs: list[EncodedOutput]
    ) -> None:
        """Count the shards of ``outputs``; nothing is opened yet."""
        self._config, self._world, self._outputs = config, world, outputs
        self._endpoint = Endpoint(config, paths, world)
        self._metrics, self._progress = self._endpoint.metrics, self._endpoint.progress
        self._closing = ExitStack()
        self._total = sum(output.num_shards for output in outputs)
        self._num_samples = sum(len(output.dataset) for output in outputs)
        self._done = self._initially_done = self._count()
        self._start = time.monotonic()
        self._dropped: dict[str, int] = {}

    def __enter__(self) -> PrecomputeReporter:
        """Start the endpoint and log the amount of work."""
        if self._world.local_rank == 0:
            self._endpoint.start(self._closing)
        if self._world.is_main:
            self._console = Console(self._total, self._done)
            self._closing.callback(self._console.close)
            self._console.print_line(
                f"{self._num_samples:,} samples in {self._total:,} shards on {self._world.size} × "
                f"{self._world.device.type}; {self._done:,} shards exist"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the endpoint and the console."""
        self._closing.close()

    def start_encoding(self) -> None:
        """Start the clock of the throughput and enter the phase step."""
        self._start = time.monotonic()
        self._progress.update(steps=self._total)
        self._endpoint.set_phase(STEP)
        self._endpoint.step_done()

    def wait_for_others(self) -> None:
        """Enter the phase finish: this rank's shards are written."""
        self._endpoint.set_phase(FINISH)

    def record_activity(self) -> None:
        """Refresh the time of the last activity, by which a hang is detected."""
        self._endpoint.step_done()

    def log_dropped(self, output: EncodedOutput, faults: list[str]) -> int:
        """Print the first unreadable samples to stderr; return how many ``output`` has so far."""
        count = self._dropped.get(output.part, 0)
        for fault in faults[: max(0, _MAX_DROPPED_LOGGED - count)]:
            print(f"left out an unreadable sample: {fault}", file=sys.stderr, flush=True)
        self._metrics.bad_samples.inc(len(faults))
        self._dropped[output.part] = count + len(faults)
        return count + len(faults)

    def log_shard(self) -> None:
        """Log the progress after a shard of this rank was written."""
        self.refresh()
        if self._world.is_main:
            rate, left = self._rate()
            text = f"shard {self._done:>6}/{self._total}  {rate:>8.1f} samples/s  {duration(left)} left"
            self._console.print_line(text)

    def refresh(self) -> None:
        """Count the shards again; more of them, from any rank, are activity."""
        before, self._done = self._done, self._count()
        if self._done == before:
            return
        rate, left = self._rate()
        samples = min(self._done * self._config.preprocess.shard_size, self._num_samples)
        self._metrics.step.set(self._done)
        self._metrics.samples.set(samples)
        self._metrics.samples_per_second.set(rate)
        self._metrics.remaining.set(left)
        self._progress.update(
            step=self._done, samples=samples, samplesPerSecond=rate, remainingSeconds=left
        )
        self.record_activity()
        if self._world.is_main:
            self._console.advance(self._done)

    def complete(self) -> None:
        """Report success and log the output folders."""
        self._progress.update(status="success", step=self._total)
        if self._world.is_main:
            for output in self._outputs:
                self._console.print_line(f"{output.part}: {output.folder}")

    def _count(self) -> int:
        return sum(output.num_existing() for output in self._outputs)

    def _rate(self) -> tuple[float, float]:
        """Return samples per second over all ranks, and the remaining seconds."""
        seconds = time.monotonic() - self._start
        shards = self._done - self._initially_done
        per_second = shards / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / per_second if per_second else 0.0
        return per_second * self._config.preprocess.shard_size, left
