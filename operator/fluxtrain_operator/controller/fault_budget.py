"""How many pods of all jobs may be replaced for faults of nodes: a part of all pods per minute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fluxtrain_operator.planner.disruption import DISRUPTION_PERCENT, NODE_FAULTS, Delete

MIN_PODS = 8
"""Pods per minute that may always be replaced: those of a rack, or of a small cluster."""
_WINDOW_SECONDS = 60.0


@dataclass
class FaultBudget:
    """Counts the pods deleted for faults of nodes, in monotonic time; a new leader starts at zero."""

    percent: int = DISRUPTION_PERCENT
    """Of all pods, per minute."""
    _deleted: dict[str, float] = field(default_factory=dict)
    """Times by uid."""

    def left(self, num_pods: int, now: float) -> int:
        """Return how many more of ``num_pods`` may be deleted now."""
        recent = {uid: time for uid, time in self._deleted.items() if now < time + _WINDOW_SECONDS}
        self._deleted = recent
        return max(0, max(MIN_PODS, num_pods * self.percent // 100) - len(recent))

    def record(self, deletions: Iterable[Delete], now: float) -> None:
        """Count those of ``deletions`` that are for faults of nodes; a pod counts once."""
        for deletion in deletions:
            if deletion.reason in NODE_FAULTS:
                self._deleted.setdefault(deletion.uid, now)
