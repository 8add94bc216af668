"""Limits on unreadable samples: ``spec.run.data.max_bad_fraction``."""

from __future__ import annotations

import torch

from fluxtrain.contract.run.closed_division import claims_closed
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.errors import DataError
from fluxtrain.evaluate import Evaluation

_MAX_NAMED = 3


def require_few_bad_samples(
    config: RunConfig, world: World, num_bad: int, num_used: int, last_fault: str
) -> None:
    """Raise DataError if more training samples were unreadable than ``config`` allows; one is always allowed.

    ``num_bad`` counts this rank's samples, ``num_used`` those of all ranks. Every rank must call this.
    """
    counts = torch.tensor([float(num_bad)], device=world.device)
    bad = int(world.all_sum(counts).item())
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
            "the closed division evaluates all of them; "
            "set spec.run.logging.mlperf.division to open to continue without them"
        )
    elif bad == total or bad > max(1.0, limit * total):
        rule = f"spec.run.data.max_bad_fraction {limit} allows fewer"
    else:
        return
    more = f"; and {bad - _MAX_NAMED} more" if bad > _MAX_NAMED else ""
    named = "; ".join(result.faults[:_MAX_NAMED])
    raise DataError(f"{bad} of {total} validation samples could not be read; {rule}: {named}{more}")
