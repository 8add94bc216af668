"""NumPy's .npy files in the MLCommons sets: bfloat16 stored as uint16, never pickle."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_CELL_BYTES = 1 << 28
"""Maximum size of one encoding; the benchmark's T5 encodings have 2 MiB."""
_MAX_HEADER_BYTES = 4096
_DTYPES = {"<u2": torch.bfloat16, "<f2": torch.float16, "<f4": torch.float32}


@dataclass(frozen=True)
class NpyHeader:
    """The parsed header of one file; ``content`` is its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes

    @property
    def file_bytes(self) -> int:
        """Return the size of the whole file."""
        return len(self.content) + math.prod(self.shape) * self.dtype.itemsize


def read_header(content: bytes) -> NpyHeader:
    """Return the header at the start of ``content``; ValueError, with the reason, if it is not supported.

    uint16 means bfloat16, which NumPy lacks.
    """
    stream = io.BytesIO(content[:_MAX_HEADER_BYTES])
    shape, fortran_order, dtype = _parse(stream)
    if dtype.str not in _DTYPES:
        raise ValueError(
            f"its numbers are of type {dtype.str[:40]}, not uint16, float16 or float32"
        )
    if fortran_order and len(shape) > 1:
        raise ValueError("its numbers are in Fortran order")
    header = NpyHeader(shape, _DTYPES[dtype.str], content[: stream.tell()])
    if min(shape, default=1) < 0 or header.file_bytes > MAX_CELL_BYTES:
        raise ValueError(f"its shape {list(shape)} is larger than {MAX_CELL_BYTES} bytes")
    return header


def _parse(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return NumPy's parse of the header; its parser accepts literals only and runs no code."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy only warns of Python 2's headers
            return readers[version](stream, max_header_size=_MAX_HEADER_BYTES)
    except Exception as error:  # the parser of literals may raise anything on malformed bytes
        raise ValueError(f"not a .npy file ({type(error).__name__})") from None


def to_tensor(content: bytes) -> Tensor:
    """Return the numbers of a whole file; ValueError, with the reason, if it is not supported."""
    header = read_header(content)
    if len(content) != header.file_bytes:
        raise ValueError(f"{len(content)} bytes, its header gives {header.file_bytes}")
    numbers = bytearray(content[len(header.content) :])
    flat = torch.frombuffer(numbers, dtype=header.dtype) if numbers else torch.empty(0)
    return flat.to(header.dtype).view(header.shape)


def to_bytes(values: Tensor) -> bytes:
    """Return ``values`` as a .npy file; bfloat16 is written as uint16, as in the reference."""
    plain = values.contiguous()
    array = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()
