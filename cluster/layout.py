"""Paths, names and addresses of the cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
STATE = FOLDER.parent / ".cluster"
"""Files of the running cluster; `down` removes them."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluxtrain-cluster"
"""Binaries and images, in folders named by a hash of their sources; shared by all clones."""

KUBECONFIG = STATE / "kubeconfig"
BIN = STATE / "bin"
CERTIFICATES = STATE / "certificates"
PROCESSES = STATE / "processes"
LOGS = STATE / "logs"

BRIDGE = "fluxtrain0"
FAMILY = os.environ.get("FAMILY", "ipv4")
"""ipv4, or ipv6 for a cluster without any IPv4 address but 127.0.0.1."""
IS_IPV6 = FAMILY == "ipv6"
EVERY_RANGE = "::/0" if IS_IPV6 else "0.0.0.0/0"
_NODES, NODE_BITS = ("fd99::", 64) if IS_IPV6 else ("10.99.0.", 24)
BRIDGE_ADDRESS = f"{_NODES}1"
"""The host's address on the bridge, of the API server and the DNS."""

POD_RANGE = "fd98::/48" if IS_IPV6 else "10.98.0.0/16"
SERVICE_RANGE = "fd97::/112" if IS_IPV6 else "10.97.0.0/16"
SERVICE_ADDRESS = "fd97::1" if IS_IPV6 else "10.97.0.1"
FAKE_POD_RANGE = "fd96::1/112" if IS_IPV6 else "10.96.0.1/16"
"""Addresses of pods on fake nodes; nothing listens there."""

API_PORT = 6443
BRIDGE_HOST = f"[{BRIDGE_ADDRESS}]" if IS_IPV6 else BRIDGE_ADDRESS
"""As URLs have it."""
API_URL = f"https://{BRIDGE_HOST}:{API_PORT}"
DOMAIN = "cluster.local"

MAX_NODES = 9
MAX_SOCKET_PATH = 107  # bytes that Linux allows in the address of a Unix socket


@dataclass(frozen=True)
class Node:
    """One node: its names, addresses and folder, from its number."""

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
        """The host's end of the veth pair of this node."""
        return f"ft-{self.name}"

    @property
    def address(self) -> str:
        """The node's own address on the bridge."""
        return f"{_NODES}{11 + self.index}"

    @property
    def pod_range(self) -> str:
        """The addresses of its pods."""
        return f"fd98:0:0:{self.index}::/64" if IS_IPV6 else f"10.98.{self.index}.0/24"

    @property
    def gateway(self) -> str:
        """The node's address on the bridge of its pods."""
        return str(next(ip_network(self.pod_range).hosts()))

    @property
    def folder(self) -> Path:
        """Images, volumes and configuration of this node."""
        return STATE / self.name

    @property
    def containerd_socket(self) -> Path:
        """The socket of containerd."""
        return self.folder / "containerd.sock"

    def process(self, program: str) -> str:
        """Return the process name of ``program`` on this node."""
        return f"{self.name}.{program}"


def nodes() -> list[Node]:
    """Return the nodes of the running cluster."""
    return sorted(
        (Node(int(path.name[5:])) for path in STATE.glob("node-[0-9]")), key=lambda n: n.index
    )
