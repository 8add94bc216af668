"""The lines of a request before its body: bounded together."""

from __future__ import annotations

from http.client import LineTooLong
from io import BufferedIOBase

MAX_HEAD = 1 << 14
"""Bytes of a request before its body."""


class RequestHead:
    """The file of a connection, of which the lines before a body are bounded together."""

    def __init__(self, file: BufferedIOBase) -> None:
        """Read from ``file``; set ``left`` to `MAX_HEAD` before each request."""
        self._file, self.left = file, MAX_HEAD
        self.read, self.close = file.read, file.close

    def readline(self, size: int) -> bytes:
        """Return the next line, at most ``size`` bytes; LineTooLong if the lines have too many together."""
        line = self._file.readline(min(size, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong("request")
        return line
