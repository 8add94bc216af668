"""Run in pods: prints as JSON which of the arguments HOST:PORT accept a connection within a second."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor


def opens(target: str) -> bool:
    """Return whether a connection to ``target`` opens."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with ThreadPoolExecutor(len(sys.argv)) as pool:
        print(json.dumps(dict(zip(sys.argv[1:], pool.map(opens, sys.argv[1:]), strict=True))))
