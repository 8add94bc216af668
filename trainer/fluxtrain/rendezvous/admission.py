"""Which agents may take part in a run whose nodes are started by hand or by Slurm.

A command that was typed twice, or with other options on one node, must not train: of two nodes with the same
rank only the one that came first is admitted, and only nodes that start the same trainers as the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxtrain.contract.launch import LOST_SECONDS
from fluxtrain.rendezvous.messages import Heartbeat


@dataclass
class _Holder:
    agent: str
    node: str
    last_seen: float


@dataclass
class Admission:
    """The agents that were admitted, by the ranks of their nodes; ``now`` is a monotonic clock in seconds."""

    setup: str
    """What all agents must tell as their ``setup``."""
    lost_seconds: float = LOST_SECONDS
    """A rank is free again after its agent has been silent for this long."""
    _holders: dict[int, _Holder] = field(default_factory=dict)

    def refusal(self, beat: Heartbeat, now: float) -> str:
        """Return why the agent of ``beat`` may not take part; empty if it may."""
        if beat.setup != self.setup:
            return f"this node starts {beat.setup}; the node with the rendezvous {self.setup}"
        if beat.node_rank is None:
            return ""
        holder = self._holders.get(beat.node_rank)
        if holder and holder.agent != beat.agent and now - holder.last_seen <= self.lost_seconds:
            return f"--node-rank: got {beat.node_rank}; {holder.node} has this rank already"
        if beat.leaving:
            self._holders.pop(beat.node_rank, None)
        else:
            self._holders[beat.node_rank] = _Holder(beat.agent, beat.node_name, now)
        return ""
