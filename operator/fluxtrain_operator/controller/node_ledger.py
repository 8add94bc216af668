"""The node ledger: the faults in all jobs' statuses by node, summed when they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxtrain_operator.distrust import (
    NO_DISTRUST,
    Distrust,
    Fault,
    Score,
    faults_of,
    ordered,
    score,
)
from fluxtrain_operator.names import Key
from fluxtrain_operator.planner.observed import NodeView

_REFRESH_SECONDS = 10.0
"""Distrust decays slowly: without new faults it is not computed more often."""


@dataclass
class NodeLedger:
    """Keeps the distrust of nodes; what does not change is not summed again."""

    nodes: Mapping[str, NodeView]
    """The existing nodes; faults of others do not count."""
    _jobs: dict[Key, tuple[object, tuple[Fault, ...]]] = field(default_factory=dict)
    """The list in the status of each job, and its valid faults."""
    _faults: dict[str, dict[Key, list[Fault]]] = field(default_factory=dict)
    """By node and job."""
    _scores: dict[str, Score] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Nodes to sum again."""
    _latest: Distrust = NO_DISTRUST

    def __len__(self) -> int:
        """Return the number of jobs with faults of nodes."""
        return len(self._jobs)

    def set_job(self, key: Key, manifest: Mapping[str, Any] | None) -> None:
        """Take the faults in the status of a job; None removes those of a deleted one."""
        status = manifest.get("status") if manifest is not None else None
        listed = status.get("nodeFaults") if isinstance(status, Mapping) else None
        before, old = self._jobs.get(key, (None, ()))
        if (listed or None) == before:
            return
        self._jobs.pop(key, None)
        new = faults_of(status)
        if listed:
            self._jobs[key] = listed, new
        for fault in old:
            if self._faults.get(fault.node, {}).pop(key, None) is not None:
                self.refresh(fault.node)
            if not self._faults.get(fault.node, True):
                del self._faults[fault.node]
        for fault in new:
            self._faults.setdefault(fault.node, {}).setdefault(key, []).append(fault)
            self.refresh(fault.node)

    def refresh(self, node: str) -> None:
        """Sum the faults of ``node`` again: one was added or removed, or the node is a new one."""
        if node in self._faults or node in self._scores:
            self._changed.add(node)

    def distrust(self, now: float) -> Distrust:
        """Return the distrust of all existing nodes."""
        is_fresh = 0.0 <= now - self._latest.now < _REFRESH_SECONDS
        if is_fresh and not self._changed:
            return self._latest
        for name in self._changed:
            self._sum(name, now)
        self._changed.clear()
        self._latest = ordered(self._scores, now)
        return self._latest

    def _sum(self, name: str, now: float) -> None:
        view, faults = self.nodes.get(name), self._faults.get(name, {})
        self._scores.pop(name, None)
        if view is not None and not view.gone and faults:
            listed = (fault for of_job in faults.values() for fault in of_job)
            self._scores[name] = score(listed, now, view.created)
