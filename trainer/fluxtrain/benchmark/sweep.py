"""What a benchmark measures: trials, each of a setting and a micro batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.resolve import merge
from fluxtrain.contract.validation import validate
from fluxtrain.setting import Setting, sizes_of

NUM_PARTS = 5
"""Parts of a measurement: their median is its result, their range its spread."""
_FIT_STEPS = 3
"""Steps that show whether a batch fits: the optimizer's memory is there from the first."""


@dataclass(frozen=True)
class Trial:
    """A few training steps in processes of their own."""

    setting: Setting
    micro_batch_size: int
    """Samples per rank and step."""
    num_ranks: int
    global_batch_size: int
    """Samples per step of all ranks."""
    is_measured: bool
    """False: it only shows whether the batch fits."""

    def __str__(self) -> str:
        """Return the trial, for people."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        if self.has_equal_batches:
            return f"{self.setting}, {ranks}, batch {self.micro_batch_size} each"
        return f"{self.setting}, {ranks}, batch {self.global_batch_size} of all"

    @property
    def has_equal_batches(self) -> bool:
        """Return whether each rank computes one whole micro batch in a step."""
        return self.global_batch_size == self.micro_batch_size * self.num_ranks

    def part_steps(self, config: RunConfig) -> int:
        """Return the steps of one part of the measurement; with buckets each size is in it equally often."""
        if not self.is_measured:
            return _FIT_STEPS
        sizes = self.setting.num_sizes
        return math.ceil(max(1, config.benchmark.steps // NUM_PARTS) / sizes) * sizes

    def warmup_parts(self, config: RunConfig) -> int:
        """Return how many parts come before those that are measured."""
        steps = config.benchmark.warmup_steps if self.is_measured else 0
        return math.ceil(steps / self.part_steps(config))

    def num_steps(self, config: RunConfig) -> int:
        """Return the steps of the trial."""
        parts = NUM_PARTS if self.is_measured else 1
        return self.part_steps(config) * (self.warmup_parts(config) + parts)

    def config(self, config: RunConfig) -> RunConfig:
        """Return the training that this trial takes the first steps of; it saves and evaluates nothing."""
        setting, size = self.setting, self.micro_batch_size
        changes = {
            "task": "train",
            "data": {
                "image_size": setting.image_size,
                "text_length": setting.text_length,
                "order": config.data.order if config.data.buckets is None else "sequential",
            },
            "precision": {"compute": setting.compute, "fp8": setting.fp8},
            "parallel": {
                "micro_batch_size": size,
                "activation_checkpointing": setting.activation_checkpointing,
                "compile": setting.compile,
            },
            "schedule": {
                "global_batch_size": self.global_batch_size,
                "steps": self.num_steps(config) + 1,  # the last step would save a checkpoint
            },
            "evaluation": {"every_samples": 0, "at_start": False, "at_end": False},
            "checkpoint": {"every_steps": 0, "memory_every_steps": 0},
            "sampling": {"every_steps": 0, "at_end": False},
            "preflight": None,
            "logging": {
                "every_steps": self.part_steps(config),
                "metrics_port": 0,
                "ledger": False,
                "tensorboard": False,
                "wandb": None,
            },
        }
        return validate(RunConfig, merge(config.model_dump(mode="json"), changes), "spec.run")


def settings(config: RunConfig) -> Iterator[Setting]:
    """Yield every combination of the lists in ``config.benchmark``; an empty one has the run's value."""
    swept, own = config.benchmark, Setting.of(config)
    compiled: list[bool | None] = [*swept.compile] or [own.compile]
    for values in product(
        swept.image_sizes or [own.image_size],
        swept.text_lengths or [own.text_length],
        swept.compute or [own.compute],
        swept.fp8 or [own.fp8],
        swept.activation_checkpointing or [own.activation_checkpointing],
        compiled,
    ):
        setting = Setting(*values)
        data = merge(config.data.model_dump(mode="json"), {"image_size": setting.image_size})
        num_sizes, largest = sizes_of(DataConfig.model_validate(data))
        yield replace(setting, num_sizes=num_sizes, largest=largest)
