"""Training speed between two log lines: samples and model FLOPs per second, MFU, and the memory it takes."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.gpus import Peak, find_peak
from fluxtrain.model.adapter_flops import run_flops
from fluxtrain.run_state import RunState

_TERA = 1e12


@dataclass(frozen=True)
class Memory:
    """The most memory so far of one rank, in bytes."""

    allocated: int
    """In tensors on its GPU; without a GPU, resident in its process."""
    reserved: int | None
    """Taken from the GPU by torch's allocator, which keeps what tensors have freed."""

    @staticmethod
    def of(device: torch.device) -> Memory:
        """Return what this process has used of ``device``."""
        if device.type == "cuda":
            return Memory(
                torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            )
        return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None)


@dataclass(frozen=True)
class Speed:
    """Training speed since the last log line."""

    samples_per_second: float
    """Of all ranks."""
    step_seconds: float
    remaining_seconds: float
    """Estimated time to the last step; 0 if nothing was measured."""
    tflops_per_gpu: float
    """Model TFLOP/s of each rank; recomputation is not counted."""
    mfu: float | None
    """Model FLOP/s over the dense peak of the GPUs; None if that is unknown."""
    memory: Memory
    """Of rank 0, or of the rank that asks."""


class Speedometer:
    """Measures the speed between log lines."""

    def __init__(self, config: RunConfig, world: World) -> None:
        """Measure a run of ``config`` on all ranks of ``world``."""
        self._config, self._world = config, world
        self._last = (0, 0.0)
        self._flops = dict[int, int]()  # of a sample, by its image tokens
        self._counted = list[tuple[int, int]]()  # samples and image tokens of each step
        self.total_samples = config.schedule.steps * config.schedule.global_batch_size
        """Of the whole run."""
        self.peak: Peak | None = None
        """What MFU is a fraction of; None if it is unknown."""
        if world.device.type == "cuda":
            name = torch.cuda.get_device_name(world.device)
            precision = config.precision
            self.peak = find_peak(name, precision.compute if precision.fp8 == "none" else "fp8")

    def start(self, run: RunState) -> None:
        """Measure from ``run`` on."""
        self._last = (run.samples, run.train_seconds)

    def count(self, samples: int, image_tokens: int) -> None:
        """Count a step on ``samples`` of one size; of steps that are not counted, all have the largest."""
        self._counted.append((samples, image_tokens))

    def measure(self, samples: int, seconds: float) -> Speed:
        """Return the speed since the last call; in all, ``samples`` took ``seconds`` of training.

        The device must have finished them by then.
        """
        used, spent = samples - self._last[0], seconds - self._last[1]
        self._last = (samples, seconds)
        rate = used / spent if spent > 0 else 0.0
        batch = self.total_samples / self._config.schedule.steps
        left = self.total_samples - samples
        tflops = rate * self._mean_flops() / _TERA / self._world.size
        return Speed(
            samples_per_second=rate,
            step_seconds=spent * batch / max(used, 1),
            remaining_seconds=left / rate if rate else 0.0,
            tflops_per_gpu=tflops,
            mfu=tflops * _TERA / self.peak.flops if self.peak else None,
            memory=Memory.of(self._world.device),
        )

    def _mean_flops(self) -> float:
        """Return the FLOPs of a sample, the mean of those counted since the last call."""
        counted = self._counted or [(1, self._config.image_tokens)]
        self._counted = []
        return sum(n * self._flops_of(tokens) for n, tokens in counted) / sum(n for n, _ in counted)

    def _flops_of(self, image_tokens: int) -> int:
        if image_tokens not in self._flops:
            self._flops[image_tokens] = run_flops(self._config, image_tokens)
        return self._flops[image_tokens]
