"""Free ports of the loopback interface, of which the kernel gives none to outgoing connections."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from random import SystemRandom

_PORTS = range(20_000, 29_000)
"""Below torch's usual ones, Kubernetes' node ports, and those of outgoing connections (from 32,768)."""


def free_ports(count: int) -> list[int]:
    """Return ``count`` different loopback ports that no process listens on."""
    candidates = iter(SystemRandom().sample(_PORTS, len(_PORTS)))
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = next(candidates)
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
    return found


def free_port() -> int:
    """Return a loopback port that no process listens on."""
    return free_ports(1)[0]
