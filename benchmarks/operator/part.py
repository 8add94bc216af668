"""One part of a benchmark of our operator, by the operator's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from benchmarks.operator.contender import Fluxtrain, samples
from benchmarks.operator.turn import quantile


class Part:
    """Requests and reconciles of the operator at ``port`` since the part began, named by ``title``."""

    def __init__(self, port: int, title: str) -> None:
        """Begin the part; an operator that does not listen yet begins with zeros."""
        self._port, self._title = port, title
        self._began, self._before = monotonic(), samples(port)

    def reconciles(self) -> Mapping[str, float]:
        """Return the 99th percentile of the reconciles until now."""
        used, name = self._used(), Fluxtrain.reconcile_seconds
        buckets = {float(le): value for (metric, le), value in used.items() if metric == name}
        return {f"{self._title}: reconcile p99, ms": 1000 * quantile(buckets, 0.99)}

    def requests(self, num_jobs: int) -> Mapping[str, float]:
        """Return the requests per job and minute, without watches and those for the Lease."""
        minutes = (monotonic() - self._began) / 60
        count = self._used().get((Fluxtrain.requests, ""), 0.0)
        return {f"{self._title}: requests per job and minute": count / num_jobs / minutes}

    def _used(self) -> dict[tuple[str, str], float]:
        after = samples(self._port)
        return {name: value - self._before.get(name, 0.0) for name, value in after.items()}
