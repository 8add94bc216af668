"""Writes safetensors files: a header, then the bytes of each tensor, from where they are.

The safetensors library's `save` copies all tensors into one string and holds the interpreter meanwhile, so
that a thread that writes stops the whole process. Here only the system's calls take long, and they do not.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from fluxtrain.errors import DataError
from fluxtrain.safetensors_file import DTYPES

_CODES = {
    **{dtype: code for code, dtype in DTYPES.items()},
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 64
"""Bytes: where the data begins; copying from elsewhere in a mapped file takes half as long again."""


class Target(Protocol):
    """A file that is written."""

    def write(self, content: Any, /) -> object:
        """Write all bytes of ``content``, a buffer."""


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the first bytes of a file with tensors of these types and shapes, in this order.

    Raises DataError if the format has no name for a type.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise DataError(f"{name} is of type {dtype}, which safetensors files cannot hold")
        end = offset + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write(file: Target, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors``, which are on the host, to ``file``."""
    # tensors of larger types first, so that each begins at a multiple of its type
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    file.write(header({name: (t.dtype, t.shape) for name, t in ordered.items()}, metadata))
    for tensor in ordered.values():
        if tensor.numel():
            file.write(content_of(tensor))


def content_of(tensor: Tensor) -> memoryview:
    """Return the bytes of ``tensor``, which is on the host: not copied if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    content: Any = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()  # one has any stride
    return memoryview(content)
