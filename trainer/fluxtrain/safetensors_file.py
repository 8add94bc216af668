"""A safetensors file, read with suspicion: where each tensor's bytes lie, and small tensors whole."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.errors import DataError

_MAX_HEADER_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 1 << 28  # of a tensor read whole: an encoding, a list of timesteps
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}


@dataclass(frozen=True)
class Span:
    """One tensor inside a file; ``offset`` counts from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def row_bytes(self) -> int:
        """Return the bytes of one entry along the first dim."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Span]:
    """Return the tensors of ``path`` by name; DataError where the file is not whole and well formed."""
    try:
        # Without O_NONBLOCK a named pipe in the place of a shard would hold the run up for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= min(_MAX_HEADER_BYTES, status.st_size - 8):
                raise ValueError(f"its header claims {length} bytes")
            return _spans(json.loads(file.read(length)), 8 + length, status.st_size)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole safetensors file ({error})") from None


def read_tensor(path: Path, span: Span) -> Tensor:
    """Return the tensor at ``span`` of ``path``; DataError where it is huge or cut off."""
    size = math.prod(span.shape) * span.dtype.itemsize
    if size > _MAX_TENSOR_BYTES:
        raise DataError(f"{path}: a tensor of {size} bytes; at most {_MAX_TENSOR_BYTES} are read")
    try:
        with path.open("rb") as file:
            file.seek(span.offset)
            content = bytearray(file.read(size))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if len(content) != size:
        raise DataError(f"{path}: cut off")
    flat = torch.frombuffer(content, dtype=span.dtype) if size else torch.empty(0, dtype=span.dtype)
    return flat.view(span.shape)


def _spans(header: object, start: int, size: int) -> dict[str, Span]:
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    return {
        name: _span(name, entry, start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _span(name: str, entry: object, start: int, size: int) -> Span:
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in DTYPES:
        raise ValueError(f"tensor {name!r} is not of a type {'|'.join(DTYPES)}")
    dtype = DTYPES[str(entry["dtype"])]
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has offsets {list(offsets)} for shape {list(shape)}")
    if start + offsets[1] > size:
        raise ValueError(f"tensor {name!r} ends at byte {start + offsets[1]} of {size}: cut off")
    return Span(dtype, shape, start + offsets[0])


def _naturals(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 8:
        raise ValueError("a shape or offsets are no list of numbers")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError(f"{str(number)[:40]} stands where a size or an offset belongs")
    return tuple(value)
