"""Nodes of a run without Kubernetes: how many, where they meet, which of them this is. Without torch."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.rendezvous.http_server import host_port

_LOCALHOST = "localhost"
_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of a network interface."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as the command on each of them describes them."""

    min_nodes: int
    """Nodes without which no step is made."""
    wanted_nodes: int
    host: str
    """Name or address of the node with the rendezvous."""
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
        """Return host:port, an IPv6 address in brackets."""
        return host_port(self.host, self.port)


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a rendezvous, as this node sees them."""

    address: str
    """IP address of the rendezvous; IPv4 if its name has both."""
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
        found = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"the address of {nodes.host!r} is not found ({reason})"
        raise ConfigError("--rendezvous", nodes.endpoint, text) from None
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    kind = ip_address(address)
    if kind.is_unspecified or kind.is_multicast:  # each node would serve a rendezvous of its own
        text = (
            f"{address} is no node's address: give the one by which the others reach the rendezvous"
        )
        raise ConfigError("--rendezvous", nodes.endpoint, text)
    is_name = nodes.host not in (address, _LOCALHOST)
    if kind.is_loopback and is_name and nodes.wanted_nodes > 1:
        text = (
            f"{nodes.host} is {address} here, which other nodes do not reach: give its IP address"
        )
        raise ConfigError("--rendezvous", nodes.endpoint, text)
    return address


def _place(address: str, port: int) -> tuple[int, Any]:
    """Return the family of an IP address, and what its sockets bind or connect to."""
    [(family, _, _, _, place), *_] = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    return family, place


def own_address(address: str, port: int) -> str:
    """Return the address of this node that a connection to ``address`` comes from; nothing is sent."""
    family, place = _place(address, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)
        except OSError as error:
            raise ConfigError(
                "--rendezvous", UNSET, f"no route to {address} ({error.strerror})"
            ) from None
        return str(probe.getsockname()[0])


def _is_own(address: str) -> bool:
    """Return whether an interface of this machine has ``address``."""
    family, place = _place(address, 0)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def interface_of(address: str) -> str | None:
    """Return the network interface with ``address``; None if it is not found."""
    wanted = ip_address(address)
    if wanted.version == 6:
        rows = map(str.split, _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines())
        return next((name for digits, *_, name in rows if int(digits, 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
