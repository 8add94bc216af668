"""The open connections of a server: bounded in number, per address and in time."""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

REQUEST_SECONDS = 10.0
"""A connection is closed this long after its last answer: a request must arrive and be answered by then."""


class Connections:
    """The open connections of a server, the one with the oldest answer first; thread-safe.

    One without an answer counts from its start. Beyond a bound the oldest are shut down, so that a client
    that sends nothing, or sends slowly, keeps nobody else out.
    """

    def __init__(
        self, most: int, most_of_address: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most ``most`` connections, and ``most_of_address`` from one address."""
        self._most, self._most_of_address, self._clock = most, most_of_address, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[socket.socket, tuple[str, float]] = OrderedDict()
        self._by_address: dict[str, OrderedDict[socket.socket, None]] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def add(self, connection: socket.socket, address: str) -> None:
        """Add a new connection from ``address``; shut down the oldest ones that are too many now."""
        with self._lock:
            self._open[connection] = (address, self._clock())
            of_address = self._by_address.setdefault(address, OrderedDict())
            of_address[connection] = None
            if len(of_address) > self._most_of_address:
                self._shut_down(next(iter(of_address)))
            if len(self._open) > self._most:
                self._shut_down(next(iter(self._open)))

    def renew(self, connection: socket.socket) -> None:
        """Record that ``connection`` was answered now."""
        with self._lock:
            if connection in self._open:
                address, _ = self._open[connection]
                self._open[connection] = (address, self._clock())
                self._open.move_to_end(connection)
                self._by_address[address].move_to_end(connection)

    def remove(self, connection: socket.socket) -> None:
        """Forget ``connection``, which is about to be closed."""
        with self._lock:
            self._forget(connection)

    def expire(self) -> None:
        """Shut down the connections that have had no answer for too long."""
        with self._lock:
            before = self._clock() - REQUEST_SECONDS
            while self._open:
                connection, (_, answered) = next(iter(self._open.items()))
                if answered > before:
                    break
                self._shut_down(connection)

    def shut_down(self) -> None:
        """Shut down all connections."""
        with self._lock:
            while self._open:
                self._shut_down(next(iter(self._open)))

    def _shut_down(self, connection: socket.socket) -> None:
        """End all reading from and writing to ``connection``; its thread closes it."""
        self._forget(connection)
        with suppress(OSError):  # the client has disconnected
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        address, _ = self._open.pop(connection, ("", 0.0))
        of_address = self._by_address.get(address)
        if of_address is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._by_address[address]
