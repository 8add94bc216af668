"""Reads untrusted safetensors files: the span of every tensor, and single tensors."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fluxtrain.errors import DataError

_MAX_HEADER_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 1 << 28
_PICKLES = (b"PK\3\4", b"\x80\2", b"\x80\4")
"""First bytes of what torch.save writes: a ZIP archive, before a pickle alone."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}


class _UnreadTypeError(ValueError):
    """A tensor has a type that is not read."""


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

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path, more: Mapping[str, torch.dtype] | None = None) -> dict[str, Span]:
    """Return the tensors of ``path`` by name; DataError if the file is not whole or malformed.

    Types by their names in the file are those of DTYPES and ``more``.
    """
    dtypes = {**DTYPES, **(more or {})}
    try:
        # O_NONBLOCK: opening a named pipe would otherwise block forever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            start = file.read(8)
            if len(start) < 8:
                raise ValueError(f"it has {len(start)} bytes")
            (length,) = struct.unpack("<Q", start)
            if not 2 <= length <= min(_MAX_HEADER_BYTES, status.st_size - 8):
                if start.startswith(_PICKLES):
                    raise ValueError("it is a pickle, which is not read")
                raise ValueError(f"its header claims {length} bytes")
            return _spans(json.loads(file.read(length)), 8 + length, status.st_size, dtypes)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except IsADirectoryError:
        raise DataError(f"{path}: a folder; name the safetensors file in it") from None
    except _UnreadTypeError as error:
        raise DataError(f"{path}: {error}") from None
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole safetensors file ({error})") from None


def read_tensor(path: Path, span: Span, max_bytes: int | None = _MAX_TENSOR_BYTES) -> Tensor:
    """Return the tensor at ``span`` of ``path``; DataError if it is too large or cut off."""
    size = span.num_bytes
    if max_bytes is not None and size > max_bytes:
        raise DataError(f"{path}: a tensor of {size} bytes; at most {max_bytes} are read")
    content = bytearray(size)
    try:
        with path.open("rb") as file:
            file.seek(span.offset)
            count = file.readinto(content)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if count != size:
        raise DataError(f"{path}: cut off")
    flat = torch.frombuffer(content, dtype=span.dtype) if size else torch.empty(0, dtype=span.dtype)
    return flat.view(span.shape)


@contextmanager
def open_safetensors(path: Path, content: str) -> Iterator[Any]:
    """Yield the safetensors library's reader of ``path``; DataError if it is missing or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path}: missing; it should hold {content}") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not a whole safetensors file ({error})") from None


def read_shapes(file: Any) -> dict[str, list[int]]:
    """Return the shape of every tensor of an open safetensors file."""
    return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _spans(
    header: object, start: int, size: int, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Span]:
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    spans = {
        name: _span(name, entry, start, size, dtypes)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    total = sum(span.num_bytes for span in spans.values())
    if total > size - start:  # they would need more memory than the file has bytes
        raise ValueError(f"its tensors have {total} bytes, its data {size - start}: they overlap")
    return spans


def _span(
    name: str, entry: object, start: int, size: int, dtypes: Mapping[str, torch.dtype]
) -> Span:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} has no type, shape and offsets")
    if (given := str(entry.get("dtype"))) not in dtypes:
        kinds = ", ".join(dtypes)
        raise _UnreadTypeError(f"tensor {name!r} is of type {given[:20]!r}; read are {kinds}")
    dtype = dtypes[given]
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if math.prod(length or 1 for length in shape) >= 1 << 62:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has offsets {list(offsets)} for shape {list(shape)}")
    if start + offsets[1] > size:
        raise ValueError(f"tensor {name!r} ends at byte {start + offsets[1]} of {size}: cut off")
    return Span(dtype, shape, start + offsets[0])


def _naturals(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 8:
        raise ValueError("a shape or offsets are not a list of integers")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError(f"{str(number)[:40]} is not a size or an offset")
    return tuple(value)
