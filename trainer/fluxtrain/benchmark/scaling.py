"""The scaling study: the same setting on 1, 2, 4 ... nodes, or on as many ranks of a single node.

Weak scaling keeps the batch of a rank, strong scaling the global batch. Both are judged by images/s per rank,
relative to the fewest ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fluxtrain.benchmark.results import Result
from fluxtrain.benchmark.sweep import Trial
from fluxtrain.setting import Setting


@dataclass(frozen=True)
class Scaling:
    """The measurements of one study, by rising number of ranks."""

    kind: str
    """weak or strong."""
    setting: Setting
    results: Sequence[Result]

    def rates(self) -> list[float]:
        """Return images/s per rank of each result."""
        return [r.measurement.images_per_second_per_gpu for r in self.results if r.measurement]

    def efficiencies(self) -> list[float]:
        """Return images/s per rank relative to the fewest ranks, of each result."""
        rates = self.rates()
        return [rate / rates[0] for rate in rates]


def rank_counts(num_nodes: int, local_size: int) -> list[int]:
    """Return the numbers of ranks of a study: powers of two of nodes, or of ranks of one node, and all."""
    if num_nodes > 1:
        return [nodes * local_size for nodes in (*_powers_below(num_nodes), num_nodes)]
    return [*_powers_below(local_size), local_size]


def _powers_below(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent < limit]


def weak(trial: Trial, num_ranks: int) -> Trial:
    """Return ``trial`` on ``num_ranks``, with the same batch per rank."""
    batch = trial.micro_batch_size
    return Trial(trial.setting, batch, num_ranks, batch * num_ranks, is_measured=True)


def strong(trial: Trial, num_ranks: int, global_batch_size: int) -> Trial:
    """Return a trial on ``num_ranks`` that divides ``global_batch_size``, in micro batches up to the same."""
    share = -(-global_batch_size // num_ranks)
    batch = min(trial.micro_batch_size, share)
    return Trial(trial.setting, batch, num_ranks, global_batch_size, is_measured=True)


def scalings(results: Sequence[Result]) -> Iterator[Scaling]:
    """Yield the studies in ``results``: measurements that differ in the number of ranks only."""
    groups = defaultdict[tuple[str, Setting, int], dict[int, Result]](dict)
    for result in results:
        if result.measurement is not None:
            trial = result.trial
            if trial.has_equal_batches:
                key = "weak", trial.setting, trial.micro_batch_size
                groups[key][trial.num_ranks] = result
            key = "strong", trial.setting, trial.global_batch_size
            groups[key].setdefault(trial.num_ranks, result)
    for (kind, setting, _), found in groups.items():
        if len(found) > 1:
            yield Scaling(kind, setting, [found[ranks] for ranks in sorted(found)])
