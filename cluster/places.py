"""Where things lie: the state of the running cluster, the cache between runs, the addresses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
STATE = FOLDER.parent / ".cluster"
"""Everything that the running cluster writes; `down` removes it."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluxtrain-cluster"
"""Binaries and images, in folders named by what they were made from; other clones find them."""

KUBECONFIG = STATE / "kubeconfig"
BIN = STATE / "bin"
CERTIFICATES = STATE / "certificates"
PROCESSES = STATE / "processes"
LOGS = STATE / "logs"

BRIDGE = "fluxtrain0"
BRIDGE_ADDRESS = "10.99.0.1"
"""The host, as the nodes see it: the API server and the DNS listen here."""

POD_RANGE = "10.98.0.0/16"
SERVICE_RANGE = "10.97.0.0/16"
SERVICE_ADDRESS = "10.97.0.1"
FAKE_POD_RANGE = "10.96.0.1/16"
"""Pods of fake nodes get addresses from here; nobody answers there."""

API_PORT = 6443
API_URL = f"https://{BRIDGE_ADDRESS}:{API_PORT}"
DOMAIN = "cluster.local"

MAX_NODES = 9
MAX_SOCKET_PATH = 107  # bytes that Linux allows in the address of a Unix socket


@dataclass(frozen=True)
class Node:
    """One node: its names, its addresses and its folder all follow from its number."""

    index: int

    @property
    def name(self) -> str:
        """The name in Kubernetes."""
        return f"node-{self.index}"

    @property
    def namespace(self) -> str:
        """The network namespace, and the cgroup."""
        return f"fluxtrain-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of the cable to this node."""
        return f"ft-{self.name}"

    @property
    def address(self) -> str:
        """The node's own address on the bridge."""
        return f"10.99.0.{11 + self.index}"

    @property
    def pod_range(self) -> str:
        """The addresses of its pods."""
        return f"10.98.{self.index}.0/24"

    @property
    def folder(self) -> Path:
        """Images, volumes and configuration of this node."""
        return STATE / self.name

    @property
    def containerd_socket(self) -> Path:
        """Where containerd listens."""
        return self.folder / "containerd.sock"

    def process(self, program: str) -> str:
        """Return the name under which ``program`` of this node runs."""
        return f"{self.name}.{program}"


def nodes() -> list[Node]:
    """Return the nodes of the running cluster."""
    return sorted(
        (Node(int(path.name[5:])) for path in STATE.glob("node-[0-9]")), key=lambda n: n.index
    )
