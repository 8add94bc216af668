"""A machine whose speed and memory follow a formula, in place of real trainings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fluxtrain.benchmark.results import NUM_PARTS, Outcome, Status, Trial

GIB = 1 << 30


@dataclass
class FakeMachine:
    """Runs trials: a step takes one second, and a fifth for each sample of a rank and pair of ranks."""

    largest: int = 21
    """Largest micro batch that fits."""
    steady: int = 21
    """Largest micro batch that fits for more than a few steps."""
    device: str = "AMD Instinct MI300X"
    trials: list[Trial] = field(default_factory=list)

    def run(self, trial: Trial) -> Outcome:
        """Return how ``trial`` ends."""
        self.trials.append(trial)
        facts = {"device": self.device, "device_memory_bytes": 192 * GIB, "compiled": True}
        limit = self.steady if trial.is_measured else self.largest
        if trial.micro_batch_size > limit:
            return Outcome(Status.OUT_OF_MEMORY, "out of memory", [], {})
        records = [self._record(trial, part) for part in range(1, NUM_PARTS + 1)]
        return Outcome(Status.DONE, "", records, facts)

    def _record(self, trial: Trial, part: int) -> dict[str, Any]:
        batch = trial.micro_batch_size
        rate = self.rate(trial) * trial.num_ranks * (1 + 0.02 * (part - 3))
        return {
            "step": 4 * part,
            "samples": 4 * part * trial.global_batch_size,
            "samples_per_second": rate,
            "seconds": 10.0 * part,
            "tflops_per_gpu": 64.5 * rate / trial.num_ranks,
            "mfu": 64.5 * rate / trial.num_ranks / 1307.4,
            "mfu_peak": "MI300X dense bfloat16 1307.4 TFLOP/s",
            "memory_allocated_bytes": (40 + 7 * batch) * GIB,
            "memory_reserved_bytes": (45 + 7 * batch) * GIB,
            "data_wait_seconds": 0.1,
        }

    def rate(self, trial: Trial) -> float:
        """Return images/s of each rank."""
        size = (trial.setting.image_size / 512) ** 2
        return (
            trial.micro_batch_size
            / (0.3 + 0.2 * size * trial.micro_batch_size)
            / (1 + 0.02 * (trial.num_ranks - 1))
        )
