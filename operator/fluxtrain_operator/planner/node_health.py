"""Which nodes are lost, and which only seem so because the control plane does not hear of them."""

from __future__ import annotations

from collections.abc import Iterable

from fluxtrain_operator.planner.observed import NodeView

GRACE_SECONDS = 20.0
"""How long a node may be not ready before it counts as lost where its trainers say nothing either way:
heartbeats of a busy control plane come late for seconds."""
_OUT_AT_ONCE_SECONDS = 3600.0
"""A node that is out for longer tells nothing of the control plane."""


def cannot_see(nodes: Iterable[NodeView], now: float) -> str:
    """Return why not-ready nodes are not believed to be lost; empty where they are.

    Where more of them are out at once than are ready, it is the control plane that does not hear of them.
    """
    there = [node for node in nodes if not node.gone]
    ready = sum(node.ready for node in there)
    out = sum(not node.ready and now - node.since < _OUT_AT_ONCE_SECONDS for node in there)
    if ready and out <= ready:
        return ""
    return f"{len(there) - ready} of {len(there)} nodes are not ready"


def cannot_tell_gpus(nodes: Iterable[NodeView]) -> str:
    """Return why unhealthy GPUs are not believed to be so; empty where they are.

    Where more nodes have them than have not, it is the exporter that is wrong, and there is nowhere to go.
    """
    with_gpus = [node for node in nodes if node.has_gpus or node.unhealthy]
    bad = sum(bool(node.unhealthy) for node in with_gpus)
    if bad <= len(with_gpus) - bad:
        return ""
    return f"{bad} of {len(with_gpus)} nodes with GPUs say that theirs are unhealthy"
