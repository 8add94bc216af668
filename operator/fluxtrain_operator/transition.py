"""When pods and nodes changed, by the operator's clock: the clocks of two machines may differ by hours.

A kubelet tells the times by the clock of its node. Only differences of such times are used.
"""

from __future__ import annotations

from typing import NamedTuple


class Transition(NamedTuple):
    """The newest change that a node has told the time of."""

    told: float
    """Unix time by the clock of the node."""
    time: float
    """Unix time by the operator's clock."""

    @property
    def shift(self) -> float:
        """Return the seconds to add to other times by the clock of the node."""
        return self.time - self.told


def transition(
    told: float, before: Transition | None, *, is_watched: bool, earliest: float, now: float
) -> Transition:
    """Return the transition at ``told``, which is that of ``before`` if it has the same time.

    One that ``is_watched``, as the object was known without it, happens ``now``. Of any other it is only
    known that it happened between ``earliest`` and ``now``.
    """
    if before is not None and before.told == told:
        return before
    time = now if is_watched else min(max(earliest, told), now)
    return Transition(told, float(int(time)))  # whole seconds, as Kubernetes' own times
