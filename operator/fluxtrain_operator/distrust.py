"""Distrust of nodes: the sum of the faults attributed to each, which halves every four hours. Pure.

The faults are those in the statuses of all jobs. They were written by the operator, but others may edit
them: invalid ones are left out, and no number of them excludes more than a part of the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fluxtrain.contract.resource.status import MAX_NODE_FAULTS
from fluxtrain_operator.timestamps import seconds

HALF_LIFE_SECONDS = 4 * 3600.0
EXCLUDED_FROM = 2.5
"""Three faults within an hour, never two."""
FORGOTTEN_BELOW = 1 / 16
"""A single fault is forgotten after 16 hours."""
SAME_FAULT_SECONDS = 60.0
"""Faults of a node within this time, such as those of all its pods, count as one."""
EXCLUDED_PERCENT = 20
"""Part of the nodes that may be excluded."""
MAX_EXCLUDED, MAX_AVOIDED = 64, 32
"""Limits of the lists in a pod's affinity."""
_AHEAD_SECONDS = 300.0
"""A fault that is further in the future is not believed: the clocks of two leaders differ by less."""
_MAX_NAME, _MAX_REASON = 253, 64

UNCERTAIN = 0.5
"""Weight of a fault that another program may have caused; the node is distrusted if it is repeated."""
WEIGHTS: Mapping[str, float] = {
    "NodeLost": 1.0,
    "AgentLost": 1.0,
    "KubeletUnresponsive": 1.0,
    "UnhealthyGPU": 1.0,
    "UnhealthyNode": 1.0,
    "HardwareError": 1.0,
    "UnfitNode": 1.0,
    "NoProgress": 1.0,
}
"""Weights of the reasons; UNCERTAIN for any other."""


class Fault(NamedTuple):
    """A fault attributed to a node."""

    node: str
    reason: str
    time: float
    """Unix time."""


class Score(NamedTuple):
    """The distrust of one node at a time."""

    value: float = 0.0
    time: float = 0.0
    """Unix time at which it had this value."""
    latest: float = float("-inf")
    """Unix time of its newest fault."""

    def at(self, now: float) -> float:
        """Return the value at ``now``; it does not grow if the clock goes back."""
        return self.value * _decay(now - self.time)


def faults_of(status: object) -> tuple[Fault, ...]:
    """Return the valid faults in a job's ``status`` as it was read, at most MAX_NODE_FAULTS."""
    listed = status.get("nodeFaults") if isinstance(status, Mapping) else None
    newest = listed[-MAX_NODE_FAULTS:] if isinstance(listed, list) else []
    faults = (_fault(values) for values in newest)
    return tuple(fault for fault in faults if fault is not None)


def score(faults: Iterable[Fault], now: float, created: float = 0.0) -> Score:
    """Return the distrust of the node of ``faults``, which was ``created`` then, at ``now``.

    Of faults within SAME_FAULT_SECONDS of the first of them, the heaviest counts.
    """
    counted = sorted(f for f in faults if created <= f.time <= now + _AHEAD_SECONDS)
    events: list[tuple[float, float]] = []
    for fault in sorted(counted, key=lambda fault: fault.time):
        weight = WEIGHTS.get(fault.reason, UNCERTAIN)
        if events and fault.time < events[-1][0] + SAME_FAULT_SECONDS:
            first, heaviest = events.pop()
            events.append((first, max(heaviest, weight)))
        else:
            events.append((fault.time, weight))
    value = sum(weight * _decay(now - time) for time, weight in events)
    return Score(value, now, max((f.time for f in counted), default=float("-inf")))


@dataclass(frozen=True)
class Distrust:
    """The distrust of all nodes at one time."""

    scores: Mapping[str, Score] = field(default_factory=dict)
    """By name, the most distrusted first; nodes whose faults are forgotten are left out."""
    now: float = 0.0

    def of(self, node: str) -> float:
        """Return the distrust of ``node``, 0 if it has had no fault lately."""
        known = self.scores.get(node)
        return known.at(self.now) if known is not None else 0.0

    def excluded(self, candidates: Collection[str]) -> tuple[str, ...]:
        """Return those of ``candidates`` that new pods exclude: at most EXCLUDED_PERCENT, the worst first."""
        most = min(MAX_EXCLUDED, len(candidates) * EXCLUDED_PERCENT // 100)
        distrusted = [n for n in self.scores if n in candidates and self.of(n) >= EXCLUDED_FROM]
        return tuple(distrusted[:most])

    def avoided(self) -> tuple[str, ...]:
        """Return the nodes that new pods avoid if there are others: at most MAX_AVOIDED, the worst first."""
        return tuple(self.scores)[:MAX_AVOIDED]

    def would_exclude(self, fault: Fault) -> bool:
        """Return whether a node reaches EXCLUDED_FROM by one more ``fault``."""
        known, before = self.scores.get(fault.node, Score()), self.of(fault.node)
        if fault.time < known.latest + SAME_FAULT_SECONDS:
            return False
        return before < EXCLUDED_FROM <= before + WEIGHTS.get(fault.reason, UNCERTAIN)


NO_DISTRUST = Distrust()


def ordered(scores: Mapping[str, Score], now: float) -> Distrust:
    """Return the distrust with ``scores``, the most distrusted first, at ``now``."""
    known = [(name, score) for name, score in scores.items() if score.at(now) >= FORGOTTEN_BELOW]
    known.sort(key=lambda item: (-item[1].at(now), item[0]))
    return Distrust(dict(known), now)


def _decay(age: float) -> float:
    return math.exp2(-max(0.0, age) / HALF_LIFE_SECONDS)


def _fault(values: object) -> Fault | None:
    if not isinstance(values, Mapping):
        return None
    node, reason, time = values.get("node"), values.get("reason"), seconds(values.get("time"))
    if not isinstance(node, str) or not isinstance(reason, str) or time is None:
        return None
    is_short = 0 < len(node) <= _MAX_NAME and len(reason) <= _MAX_REASON
    return Fault(node, reason, time) if is_short else None
