"""Whether nodes that report a fault are excluded: not if most nodes report one at once."""

from __future__ import annotations

from collections.abc import Iterable

from fluxtrain_operator.planner.observed import NodeView

GRACE_SECONDS = 20.0
"""How long a node may be not ready before it counts as lost, if its trainers do not report progress:
heartbeats reach a busy control plane seconds late."""
_RECENT_SECONDS = 3600.0
"""A node that has been not ready for longer does not count towards an outage."""


def control_plane_outage(nodes: Iterable[NodeView], now: float) -> str:
    """Return why nodes that are not ready do not count as lost; empty if they do.

    If more nodes became not ready lately than are ready, the control plane has lost the connection.
    """
    existing = [node for node in nodes if not node.gone]
    num_ready = sum(node.ready for node in existing)
    num_lately = sum(not node.ready and now - node.since < _RECENT_SECONDS for node in existing)
    if num_ready and num_lately <= num_ready:
        return ""
    return f"{len(existing) - num_ready} of {len(existing)} nodes are not ready"


def gpu_exporter_fault(nodes: Iterable[NodeView]) -> str:
    """Return why GPUs that are reported as unhealthy count as healthy; empty if they do not.

    If most nodes have unhealthy GPUs, the exporter is wrong, and no node would be left to move to.
    """
    gpu_nodes = [node for node in nodes if node.has_gpus or node.unhealthy]
    num_unhealthy = sum(bool(node.unhealthy) for node in gpu_nodes)
    if num_unhealthy <= len(gpu_nodes) - num_unhealthy:
        return ""
    return f"{num_unhealthy} of {len(gpu_nodes)} nodes with GPUs report unhealthy ones"
