"""The store where the agents of a job meet: a process that holds nothing but torch's TCPStore.

It runs in a pod of its own, so that losing any training pod never takes the store along (design D4).
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore

from fluxtrain.errors import StorageError

_RETRY_SECONDS = 1.0


def hold_store(port: int, address: str = "0.0.0.0") -> None:
    """Hold the store at ``address:port`` until SIGTERM or SIGINT; StorageError where it cannot be had."""
    with stopping() as over:
        store = _open_store(port, address)
        over.wait()
        del store


def _open_store(port: int, address: str) -> TCPStore:
    try:
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StorageError(
            f"the rendezvous store cannot listen on {address}:{port} ({reason})"
        ) from None


def wait_for_store(endpoint: str, over: threading.Event) -> bool:
    """Wait until something listens at ``endpoint`` (host:port); return False where ``over`` came first."""
    host, _, port = endpoint.rpartition(":")
    while not over.is_set():
        try:
            with socket.create_connection((host, int(port)), timeout=_RETRY_SECONDS):
                return True
        except OSError:  # no name, no route or nobody there yet: all of them pass
            time.sleep(_RETRY_SECONDS)
    return False


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; the handlers before come back afterwards."""
    over = threading.Event()
    before = {s: signal.signal(s, lambda *_: over.set()) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield over
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
