"""The heads of the MLPerf log's chain that the operator has seen: a run's later code cannot change them."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.contract.resource.status import MAX_LOG_HEADS, LogHead
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.timestamps import seconds, stamp


def next_heads(before: Sequence[LogHead], progress: Progress | None, now: float) -> list[LogHead]:
    """Return ``before`` with the head in ``progress``, if its chain is longer than all that were seen.

    What was seen first stays: a chain only grows. Of too many, the one nearest to its neighbours in time
    goes, by the operator's clock: many heads that are told later do not displace those told before.
    """
    told = progress.log_head if progress is not None else None
    if told is None or (before and told[0] <= before[-1].records):
        return list(before)
    heads = [*before, LogHead(records=told[0], sha256=told[1], time=stamp(now))]
    while len(heads) > MAX_LOG_HEADS:
        between = range(1, len(heads) - 1)
        del heads[min(between, key=lambda at: _seen(heads[at + 1]) - _seen(heads[at - 1]))]
    return heads


def _seen(head: LogHead) -> float:
    return seconds(head.time) or 0.0
