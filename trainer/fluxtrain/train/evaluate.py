"""MLPerf's evaluation: the loss over the whole validation set at eight stored timesteps, averaged over them.

If every timestep has as many samples, as in MLPerf's set, that is the mean over the samples.

Noise and latents depend on (seed, sample index), so the result depends on the weights only, for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.contract.run.closed_division import (
    EVERY_SAMPLE,
    TO_LEAVE,
    WHOLE_EVALUATION,
    Violation,
    claims_closed,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import Batch
from fluxtrain.errors import DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.report.records import Evaluation
from fluxtrain.runtime.draws import NUM_TIMESTEPS

LossFunction = Callable[[Batch], Float[Tensor, " b"]]


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


_MAX_NAMED = 3


def count_bad_samples(world: World, num_bad: int) -> int:
    """Return the sum of ``num_bad``, each rank's unreadable samples; every rank must call this."""
    counts = torch.tensor([float(num_bad)], device=world.device)
    return int(world.all_sum(counts).item())


def unread_samples(bad: int, num_used: int, last_fault: str) -> Violation:
    """Return the rule of the closed division that unreadable training samples break."""
    text = f"{bad} of {num_used} training samples could not be read"
    return Violation(EVERY_SAMPLE, f"{text}; the last: {last_fault}" if last_fault else text)


def unread_validation(result: Evaluation) -> Violation:
    """Return the rule of the closed division that unreadable validation samples break."""
    total = len(result.faults) + result.num_samples
    text = f"{len(result.faults)} of {total} validation samples could not be read"
    return Violation(WHOLE_EVALUATION, f"{text}; the first: {result.faults[0]}")


def require_few_bad_samples(config: RunConfig, bad: int, num_used: int, last_fault: str) -> None:
    """Raise DataError if more training samples were unreadable than ``config`` allows.

    One is always allowed, but none in the closed division of MLPerf.
    """
    if bad and claims_closed(config):
        raise DataError(f"{unread_samples(bad, num_used, last_fault)}; {TO_LEAVE}")
    limit = config.data.max_bad_fraction
    if bad > max(1.0, limit * num_used):
        raise DataError(
            f"{bad} of {num_used} samples could not be read, more than "
            f"spec.run.data.max_bad_fraction {limit} allows; the last: {last_fault}"
        )


def require_readable(result: Evaluation, config: RunConfig) -> None:
    """Raise DataError if more validation samples were unreadable than allowed; the same on all ranks.

    In the closed division of MLPerf none may be.
    """
    bad, total = len(result.faults), len(result.faults) + result.num_samples
    if not bad:
        return
    limit = config.data.max_bad_fraction
    if claims_closed(config):
        rule = (
            f"the closed division evaluates all of them (training rules {WHOLE_EVALUATION}); "
            "set spec.run.logging.mlperf.division to open to continue without them"
        )
    elif bad == total or bad > max(1.0, limit * total):
        rule = f"spec.run.data.max_bad_fraction {limit} allows fewer"
    else:
        return
    more = f"; and {bad - _MAX_NAMED} more" if bad > _MAX_NAMED else ""
    named = "; ".join(result.faults[:_MAX_NAMED])
    raise DataError(f"{bad} of {total} validation samples could not be read; {rule}: {named}{more}")
