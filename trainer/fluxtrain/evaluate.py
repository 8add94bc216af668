"""MLPerf's evaluation: the loss over the whole validation set at eight stored timesteps, averaged over them.

If every timestep has as many samples, as in MLPerf's set, that is the mean over the samples.

Noise and latents depend on (seed, sample index), so the result depends on the weights only, for any number
of ranks.
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
    """The mean loss at each of the eight timesteps (None if no sample has it), and the mean of these."""

    loss: float
    by_timestep: list[float | None]
    num_samples: int
    faults: tuple[str, ...] = ()
    """One sentence for each unreadable sample of all ranks."""


def evaluate(
    loss_function: LossFunction,
    batches: Iterable[Batch],
    world: World,
    advance: Callable[[int], None] = lambda samples: None,
) -> Evaluation:
    """Return the evaluation of ``batches``; every rank must call this with the same number of batches.

    ``loss_function`` returns each sample's mean squared error; ``advance`` is called with the number of
    samples after each batch.
    """
    sums = torch.zeros(2, NUM_TIMESTEPS, dtype=torch.float64, device=world.device)
    faults = list[str]()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(world.device)
            losses = (loss_function(batch) * batch.weights).double()
            level = (batch.timesteps * NUM_TIMESTEPS).round().long()
            sums[0].index_add_(0, level, losses)
            sums[1].index_add_(0, level, batch.weights.double())
            faults += batch.faults
            advance(len(batch) * world.size)
    totals, counts = world.all_sum(sums).tolist()
    return _mean(totals, counts, world.all_gather(faults))


def _mean(totals: list[float], counts: list[float], faults: list[str]) -> Evaluation:
    by_timestep = [
        total / count if count else None for total, count in zip(totals, counts, strict=True)
    ]
    means = [mean for mean in by_timestep if mean is not None]
    loss = sum(means) / len(means) if means else float("nan")
    return Evaluation(loss, by_timestep, int(sum(counts)), tuple(faults))
