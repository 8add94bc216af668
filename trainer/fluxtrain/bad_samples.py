"""Limits on unreadable samples: ``spec.run.data.max_bad_fraction``."""

from __future__ import annotations

import torch

from fluxtrain.contract.run.closed_division import (
    EVERY_SAMPLE,
    TO_LEAVE,
    WHOLE_EVALUATION,
    Violation,
    claims_closed,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.errors import DataError
from fluxtrain.evaluate import Evaluation

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
