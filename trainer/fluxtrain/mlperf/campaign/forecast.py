"""How many samples a run will need to its target, from its evaluations so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

Evaluation = tuple[int, float]
"""Training samples and evaluation loss."""
_LAST = 6
_LEAST = 3
_MOST = 10.0
"""A target that is further away than this multiple of the samples so far is not forecast."""
_MOST_SAMPLES = 10**15
"""Logs of others may state any number."""


def samples_to_target(
    evaluations: Sequence[Evaluation], target: float | None, every: int
) -> int | None:
    """Return the samples, a multiple of ``every``, at which the loss reaches ``target``; None if unknown.

    The loss of the last evaluations is continued as a straight line over the logarithm of the samples, by
    least squares. Unknown with fewer than three evaluations at different samples, without a target, or if
    the loss does not fall.
    """
    points = [(samples, loss) for samples, loss in evaluations if 0 < samples < _MOST_SAMPLES]
    if target is None or not math.isfinite(target) or every < 1:
        return None
    if reached := next((samples for samples, loss in points if loss <= target), None):
        return reached
    points = points[-_LAST:]
    num_different = len({samples for samples, _ in points})
    if num_different < _LEAST or not all(math.isfinite(loss) for _, loss in points):
        return None
    logs = [math.log(samples) for samples, _ in points]
    mean_log = sum(logs) / len(logs)
    mean_loss = sum(loss for _, loss in points) / len(points)
    spread = sum((x - mean_log) ** 2 for x in logs)
    slope = sum((x - mean_log) * loss for x, (_, loss) in zip(logs, points, strict=True)) / spread
    now = points[-1][0]
    if not -math.inf < slope < 0 or (target - mean_loss) / slope + mean_log > math.log(_MOST * now):
        return None
    reached_at = math.exp(mean_log + (target - mean_loss) / slope)
    return max(math.ceil(reached_at / every) * every, now + every)
