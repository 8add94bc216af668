"""The rendezvous of a node without Kubernetes: no operator acts, so a wait has an end."""

from __future__ import annotations

import sys
import time

from torch.distributed.elastic.rendezvous import RendezvousInfo

from fluxtrain.contract.launch import LOST_SECONDS
from fluxtrain.errors import EXIT_ERROR, NodesError, RefusedError
from fluxtrain.launch.nodes import Nodes
from fluxtrain.launch.rendezvous import MembershipRendezvous
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.messages import Reply

_REFUSED_SECONDS = 2 * LOST_SECONDS
"""The rank of a node that was killed is free again before."""


class NodeRendezvous(MembershipRendezvous):
    """Joins generations like an agent in a pod, but not for ever."""

    def __init__(self, client: Client, agent: str, local_address: str, nodes: Nodes) -> None:
        """Wait for as many ``nodes``, and as long, as they say."""
        super().__init__(client, agent, local_address)
        self.local_address, self._nodes = local_address, nodes
        self._since = time.monotonic()
        self._told = ""

    def closed_code(self) -> int:
        """Return the exit code of all nodes, once the run has ended."""
        reply = self.client.reply
        return EXIT_ERROR if reply is None else reply.exit_code

    def end_for_all(self, code: int) -> None:
        """End the run on all nodes with the exit ``code``."""
        self.client.update(closing=True, exit_code=code)

    def _join(self) -> tuple[str, ...]:
        self._since, self._told = time.monotonic(), ""
        return super()._join()

    def _while_waiting(self, reply: Reply | None) -> None:
        """Print what is waited for; RefusedError or NodesError if it does not come."""
        now = time.monotonic()
        if reply is not None and self._agent in reply.world:
            return  # of a generation that has just formed
        if reply is not None and reply.refused and now - self._since > _REFUSED_SECONDS:
            raise RefusedError(reply.refused)
        if reply is not None and _is_spare(reply):
            self._since = now
        missing = self._missing(reply)
        if now - self._since > self._nodes.timeout_seconds:
            raise NodesError(f"{missing}, for {self._nodes.timeout_seconds:g} s")
        if missing != self._told:
            print(f"fluxtrain: {missing}", file=sys.stderr, flush=True)
            self._told = missing

    def _missing(self, reply: Reply | None) -> str:
        if reply is None or self.client.problem:
            return f"no answer of the rendezvous at {self._nodes.endpoint} ({self.client.problem})"
        if reply.refused:
            return reply.refused
        wanted = self._nodes.wanted_nodes
        fewest = "" if wanted == self._nodes.min_nodes else f"; {self._nodes.min_nodes} are enough"
        return f"{reply.waiting} of {wanted} nodes have come to the rendezvous{fewest}"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation with this node, and print its size."""
        info = super().next_rendezvous()
        text = f"world of {info.world_size} nodes; this is node {info.rank}"
        print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
        return info


def _is_spare(reply: Reply) -> bool:
    """Return whether others train, and need no further node at present."""
    return reply.generation > 0 and not reply.broken
