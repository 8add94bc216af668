"""How often a snapshot is taken, from what the last ones cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_COST = 0.01
"""Largest part of the training time that training may wait for snapshots."""
FIRST = 10
"""Steps until a snapshot while its cost is not known yet."""
_MAX_BUSY = 0.5
"""Largest part of the time in which a snapshot may be written in the background."""
_MAX_GROWTH = 4
"""By how much one measurement may lengthen the interval: a single slow snapshot must not end them."""


@dataclass(frozen=True)
class Cost:
    """What the snapshots since the start of the processes cost."""

    steps: int
    """Steps since the start, at least 1."""
    seconds: float
    """Training time of these steps."""
    stalled: float
    """Seconds that training waited for snapshots."""
    last_stall: float
    """Seconds that it waited for the last one."""
    background: float
    """Seconds in which the last one was written in the background."""


def next_interval(cost: Cost, before: int) -> int:
    """Return the steps between two snapshots, at least 1; it was ``before``.

    So many that the next one costs no more than it may, and neither do all of them together.
    """
    seconds = max(
        cost.last_stall / MAX_COST,
        (cost.stalled + cost.last_stall) / MAX_COST - cost.seconds,
        cost.background / _MAX_BUSY,
    )
    wanted = math.ceil(seconds * cost.steps / cost.seconds) if cost.seconds > 0 else before
    return max(1, min(wanted, _MAX_GROWTH * before))
