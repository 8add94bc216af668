"""Ports of loopback for the servers that tests start."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on, all different."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    return free_ports(1)[0]
