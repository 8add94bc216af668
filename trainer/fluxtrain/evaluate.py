"""MLPerf's evaluation: the whole validation set at eight stored timesteps, one ratio of sums.

Noise and latents are drawn from (seed, sample index), so the number is the same at every evaluation
of equal weights and for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.data.batch import Batch
from fluxtrain.distributed import World
from fluxtrain.draws import NUM_TIMESTEPS

LossFunction = Callable[[Batch], Float[Tensor, " b"]]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation loss, and its mean at each of the eight timesteps (None where no sample had it)."""

    loss: float
    by_timestep: list[float | None]
    num_samples: int
    faults: tuple[str, ...] = ()
    """One sentence per sample that could not be read, naming it, over all ranks."""


def evaluate(
    losses_of: LossFunction,
    batches: Iterable[Batch],
    world: World,
    advance: Callable[[int], None] = lambda samples: None,
) -> Evaluation:
    """Return the evaluation over ``batches``; every rank must call it with equally many of them.

    ``losses_of`` gives each sample's mean squared error; ``advance`` hears of samples done, for a bar.
    """
    sums = torch.zeros(2, NUM_TIMESTEPS, dtype=torch.float64, device=world.device)
    faults = list[str]()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(world.device)
            losses = (losses_of(batch) * batch.weights).double()
            level = (batch.timesteps * NUM_TIMESTEPS).round().long()
            sums[0].index_add_(0, level, losses)
            sums[1].index_add_(0, level, batch.weights.double())
            faults += batch.faults
            advance(len(batch) * world.size)
    totals, counts = world.all_sum(sums).tolist()
    return _mean(totals, counts, world.all_of(faults))


def _mean(totals: list[float], counts: list[float], faults: list[str]) -> Evaluation:
    by_timestep = [
        total / count if count else None for total, count in zip(totals, counts, strict=True)
    ]
    num_samples = int(sum(counts))
    loss = sum(totals) / num_samples if num_samples else float("nan")
    return Evaluation(loss, by_timestep, num_samples, tuple(faults))
