"""Free ports of the loopback interface."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Return ``count`` different loopback ports that no process listens on."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def free_port() -> int:
    """Return a loopback port that no process listens on."""
    return free_ports(1)[0]
