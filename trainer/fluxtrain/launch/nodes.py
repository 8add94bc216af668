"""Nodes of a run without Kubernetes: how many, where they meet, which of them this is. Without torch."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from fluxtrain.errors import UNSET, ConfigError

_LOCALHOST = "localhost"
_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of a network interface."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as the command on each of them describes them."""

    min_nodes: int
    """Nodes without which no step is made."""
    wanted_nodes: int
    host: str
    """Name or IPv4 address of the node with the rendezvous."""
    port: int
    rank: int | None = None
    """Rank of this node from 0; None: ranks follow host names, after the node with the rendezvous."""
    timeout_seconds: float = 600.0
    """How long to wait for the rendezvous, and for enough nodes."""

    def sizes(self) -> range:
        """Return the numbers of nodes that can train."""
        return range(self.min_nodes, self.wanted_nodes + 1)

    @property
    def endpoint(self) -> str:
        """Return host:port."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a rendezvous, as this node sees them."""

    address: str
    """IPv4 address of the rendezvous."""
    own_address: str
    """The address of this node that the other nodes reach."""


def find_endpoint(nodes: Nodes) -> Endpoint:
    """Resolve the host of the rendezvous, and find this node's address on the way to it.

    Raises ConfigError if that fails, or if node rank 0 is not the node with the rendezvous.
    """
    address = _resolve(nodes)
    endpoint = Endpoint(address, own_address(address, nodes.port))
    if nodes.rank == 0 and not _is_own(address):
        text = f"{address} must be an address of this node, which is node rank 0: it starts the rendezvous"
        raise ConfigError("--rendezvous", nodes.endpoint, text)
    return endpoint


def serves(nodes: Nodes, endpoint: Endpoint) -> bool:
    """Return whether this node starts the rendezvous: rank 0, or the node with its address."""
    return _is_own(endpoint.address) if nodes.rank is None else nodes.rank == 0


def _resolve(nodes: Nodes) -> str:
    try:
        found = socket.getaddrinfo(nodes.host, nodes.port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"the IPv4 address of {nodes.host!r} is not found ({reason})"
        raise ConfigError("--rendezvous", nodes.endpoint, text) from None
    address = str(found[0][4][0])
    kind = ip_address(address)
    if kind.is_unspecified or kind.is_multicast:  # each node would serve a rendezvous of its own
        text = (
            f"{address} is no node's address: give the one by which the others reach the rendezvous"
        )
        raise ConfigError("--rendezvous", nodes.endpoint, text)
    is_name = nodes.host not in (address, _LOCALHOST)
    if address.startswith("127.") and is_name and nodes.wanted_nodes > 1:
        text = (
            f"{nodes.host} is {address} here, which other nodes do not reach: give its IP address"
        )
        raise ConfigError("--rendezvous", nodes.endpoint, text)
    return address


def own_address(address: str, port: int) -> str:
    """Return the address of this node that a connection to ``address`` comes from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise ConfigError(
                "--rendezvous", UNSET, f"no route to {address} ({error.strerror})"
            ) from None
        return str(probe.getsockname()[0])


def _is_own(address: str) -> bool:
    """Return whether an interface of this machine has ``address``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def interface_of(address: str) -> str | None:
    """Return the network interface with ``address``; None if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
