"""The header of a safetensors file, read with suspicion: where each tensor's bytes lie."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from fluxtrain.errors import DataError

_MAX_HEADER_BYTES = 1 << 20
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}


@dataclass(frozen=True)
class Span:
    """One tensor inside a file; ``offset`` counts from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one entry along the first dim."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Span]:
    """Return the tensors of ``path`` by name; DataError where the file is not whole and well formed."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(file.read(length))
            return _spans(header, 8 + length, size)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a whole safetensors file ({error})") from None


def _spans(header: dict[str, dict[str, object]], start: int, size: int) -> dict[str, Span]:
    spans = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES[str(entry["dtype"])]
        shape = tuple(int(n) for n in entry["shape"])  # type: ignore[attr-defined]
        begin, end = (int(n) for n in entry["data_offsets"])  # type: ignore[attr-defined]
        if min((*shape, begin), default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name!r} has offsets {begin}..{end} for shape {list(shape)}")
        if start + end > size:
            raise ValueError(f"tensor {name!r} ends at byte {start + end} of {size}: cut off")
        spans[name] = Span(dtype, shape, start + begin)
    return spans
