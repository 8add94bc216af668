"""One slot in memory for the image of a rank: written in place, and valid only with its record."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.files import atomic_write
from fluxtrain.pinned_memory import pin, unpin
from fluxtrain.snapshots.copies import IMAGE, RECORD, Copy

CHUNK_BYTES = 1 << 26
"""Most bytes that are reserved between two looks at the free memory."""
_MADV_REMOVE = 9
_LIBC = ctypes.CDLL(None)


class Slot:
    """The file of an image and the record that makes it valid."""

    def __init__(
        self, path: Path, size: int, before_chunk: Callable[[], None] = lambda: None
    ) -> None:
        """Reserve ``size`` bytes at ``path``, without a suffix; raises OSError if they are not free.

        ``before_chunk`` is called before each `CHUNK_BYTES`; nothing is left reserved if it raises.
        """
        self._image, self._record = path.with_suffix(IMAGE), path.with_suffix(RECORD)
        try:
            self._reserve(size, before_chunk)
        except OSError:
            self._image.unlink(missing_ok=True)
            raise
        self.bytes, self._is_pinned = mapped(self._image, size), False
        self._is_dropped, self._valid = False, threading.Lock()
        self.filling = threading.Lock()
        """Is held while the image is filled from the training state: it is freed only afterwards."""

    def _reserve(self, size: int, before_chunk: Callable[[], None]) -> None:
        with self._image.open("wb") as file:
            for offset in range(0, size, CHUNK_BYTES):
                before_chunk()
                # otherwise the first write to a page that is not free would end the process
                os.posix_fallocate(file.fileno(), offset, min(CHUNK_BYTES, size - offset))

    def pin(self) -> None:
        """Pin the memory for copies from a GPU if possible; without it they are slower."""
        self._is_pinned = pin(self.bytes)

    @property
    def exists(self) -> bool:
        """Return whether the file of the image is there."""
        return self._image.exists()

    def invalidate(self) -> None:
        """Remove the record before the image is overwritten."""
        self._record.unlink(missing_ok=True)

    def commit(self, copy: Copy) -> bool:
        """Write the record: the image is whole. Return False, and write none, if the slot is not there."""
        with self._valid:
            if self._is_dropped or not self.exists:
                return False
            with atomic_write(self._record) as partial:
                partial.write_text(json.dumps(asdict(copy)))
            return True

    def drop(self) -> None:
        """Free the memory, and let the image never be valid again; a thread may still write to it.

        May be called again, to free what was written since.
        """
        with self._valid:
            if not self._is_dropped:  # later the files are those of another slot
                self.invalidate()
                self._image.unlink(missing_ok=True)
            self._is_dropped = True
        with self.filling:
            self._unpin()
            if len(self.bytes):
                address, size = ctypes.c_void_p(self.bytes.data_ptr()), len(self.bytes)
                _LIBC.madvise(address, ctypes.c_size_t(size), _MADV_REMOVE)

    def _unpin(self) -> None:
        if self._is_pinned:
            unpin(self.bytes)
            self._is_pinned = False


def mapped(image: Path, size: int) -> Tensor:
    """Return the ``size`` bytes of the file ``image``, shared with it; raises OSError if it is shorter."""
    if image.stat().st_size < size:
        raise OSError(f"{image} is shorter than {size} bytes")
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(image), shared=True, size=size, dtype=torch.uint8)


def checksum(image: Tensor) -> int:
    """Return the CRC-32 of the bytes of ``image``."""
    content: Any = image.numpy()  # numpy's types do not say that it has a buffer
    return zlib.crc32(content)
