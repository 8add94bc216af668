"""What is measured: a combination of shapes, precision, recomputation and compilation, and a micro batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.encoders import Precision
from fluxtrain.contract.run.precision import Fp8
from fluxtrain.contract.run.resolve import merge
from fluxtrain.contract.validation import validate

NUM_PARTS = 5
"""Parts of a measurement: their median is its result, their range its spread."""
_FIT_STEPS = 3
"""Steps that show whether a batch fits: the optimizer's memory is there from the first."""
_PIXELS_PER_LATENT = 8


@dataclass(frozen=True)
class Setting:
    """What a run computes, without its batch."""

    image_size: int
    """Side of the images in pixels."""
    text_length: int
    """Text tokens."""
    compute: Precision
    fp8: Fp8
    """How the blocks' linear layers use it."""
    activation_checkpointing: float
    """Fraction of the blocks that recompute their activations."""
    compile: bool | None
    """Whether blocks are compiled; None: where that is possible."""

    def __str__(self) -> str:
        """Return the setting, for people."""
        compiled = {None: "", True: ", compiled", False: ", not compiled"}[self.compile]
        recompute = self.activation_checkpointing
        recomputed = f", {recompute:.0%} recomputed" if recompute else ""
        shapes = f"{self.image_size} px, {self.text_length} text tokens"
        fp8 = "" if self.fp8 == "none" else f", fp8 {self.fp8}"
        return f"{shapes}, {self.compute}{fp8}{recomputed}{compiled}"


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
        """Return the steps of one part of the measurement."""
        return max(1, config.benchmark.steps // NUM_PARTS) if self.is_measured else _FIT_STEPS

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
                "latent_size": setting.image_size // _PIXELS_PER_LATENT,
                "text_length": setting.text_length,
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
            "logging": {"every_steps": self.part_steps(config), "metrics_port": 0, "ledger": False},
        }
        return validate(RunConfig, merge(config.model_dump(mode="json"), changes), "spec.run")


def settings(config: RunConfig) -> Iterator[Setting]:
    """Yield every combination of the lists in ``config.benchmark``; an empty one has the run's value."""
    swept, data, parallel = config.benchmark, config.data, config.parallel
    compiled: list[bool | None] = [*swept.compile] or [parallel.compile]
    for values in product(
        swept.image_sizes or [data.image_size],
        swept.text_lengths or [data.text_length],
        swept.compute or [config.precision.compute],
        swept.fp8 or [config.precision.fp8],
        swept.activation_checkpointing or [parallel.activation_checkpointing],
        compiled,
    ):
        yield Setting(*values)
