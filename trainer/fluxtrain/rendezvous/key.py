"""The key that signs a job's messages. If its file gets another one, agents and service take that over.

Whoever may delete secrets can delete that of a job: the operator creates another one with the next pod, and
the kubelets write it to the files of all pods within two minutes, though not to all of them at once.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fluxtrain.rendezvous.messages import is_valid, request_signature

_READ_SECONDS = 1.0
"""The file is not read more often, whoever sends messages with wrong signatures."""
_MAX_KEYS = 8


class Key:
    """The newest key, and those before it; thread-safe."""

    def __init__(self, key: bytes, file: Path | None = None) -> None:
        """Begin with ``key``; ``file`` may hold another one later."""
        self._keys, self._file, self._lock = [key], file, threading.Lock()
        self._read_after = time.monotonic()

    @property
    def newest(self) -> bytes:
        """Return the newest key that is known."""
        return self._keys[-1]

    def of_request(self, body: bytes, signature: str) -> bytes | None:
        """Return the key that the request ``body`` is signed with, also an earlier one; None if none fits."""
        if (key := self._find(body, signature)) is None and self.refresh():
            key = self._find(body, signature)
        return key

    def refresh(self) -> bool:
        """Read the file again; return whether it holds another key than before."""
        with self._lock:
            if self._file is None or time.monotonic() < self._read_after:
                return False
            self._read_after = time.monotonic() + _READ_SECONDS
            try:
                read = self._file.read_bytes()
            except OSError:  # it is being replaced
                return False
            if not read or read == self._keys[-1]:
                return False
            self._keys = [*(key for key in self._keys if key != read), read][-_MAX_KEYS:]
            return True

    def _find(self, body: bytes, signature: str) -> bytes | None:
        keys = reversed(self._keys)
        return next((k for k in keys if is_valid(signature, request_signature(k, body))), None)
