"""One slot in memory for the image of a rank: written in place, and valid only with its record."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.files import atomic_write
from fluxtrain.snapshots.copies import IMAGE, RECORD, Copy

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class Slot:
    """The file of an image and the record that makes it valid."""

    def __init__(self, path: Path, size: int) -> None:
        """Reserve ``size`` bytes at ``path``, without a suffix; raises OSError if they are not free."""
        self._image, self._record = path.with_suffix(IMAGE), path.with_suffix(RECORD)
        with self._image.open("wb") as file:
            if size:  # otherwise the first write to a page that is not free would end the process
                os.posix_fallocate(file.fileno(), 0, size)
        self.bytes, self._is_pinned = mapped(self._image, size), False

    def pin(self) -> None:
        """Pin the memory for copies from a GPU if possible; without it they are slower."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(self.bytes.data_ptr(), len(self.bytes), _PORTABLE)
        self._is_pinned = int(error) == 0

    def unpin(self) -> None:
        """Undo `pin`, so that the memory can be freed."""
        if self._is_pinned:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.bytes.data_ptr())
            self._is_pinned = False

    def invalidate(self) -> None:
        """Remove the record before the image is overwritten."""
        self._record.unlink(missing_ok=True)

    def commit(self, copy: Copy) -> None:
        """Write the record: the image is whole."""
        with atomic_write(self._record) as partial:
            partial.write_text(json.dumps(asdict(copy)))


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
