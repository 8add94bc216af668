"""Reads and writes LoRA files; what is read may come from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.adapter.layouts import Layout, UnknownKeysError, from_tensors, to_tensors
from fluxtrain.adapter.metadata import (
    Metadata,
    alphas_in,
    dtype_of,
    metadata_of,
    serialised,
    with_hashes,
)
from fluxtrain.adapter.names import is_of_clip
from fluxtrain.adapter.updates import Adapter
from fluxtrain.errors import DataError, StorageError
from fluxtrain.files import atomic_write
from fluxtrain.safetensors_file import open_safetensors, read_header, read_tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_BYTES = 1 << 33
"""Of a LoRA: one of rank 512 of all layers has some 5 GB."""


@dataclass(frozen=True)
class AdapterFile:
    """The contents of a LoRA file."""

    path: Path
    adapter: Adapter
    metadata: Metadata = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    ignored: tuple[str, ...] = ()
    """Tensors of text encoders, but of no layer of CLIP-L: they are not read."""

    @property
    def left_out(self) -> str:
        """Return how many tensors are ``ignored``, and what they are of; "" if there are none."""
        unknown = sum(map(is_of_clip, self.ignored))
        counts = {
            "of other text encoders": len(self.ignored) - unknown,
            "of text encoder 1, of layers that CLIP-L does not have": unknown,
        }
        return " and ".join(f"{count} tensors {of}" for of, count in counts.items() if count)


def read_adapter(path: Path) -> AdapterFile:
    """Return the contents of ``path``, in any layout; DataError if it is no LoRA of FLUX's blocks."""
    spans = read_header(path)
    total = sum(span.num_bytes for span in spans.values())
    if total > MAX_BYTES:
        raise DataError(f"{path}: {total} bytes, at most {MAX_BYTES} are read of a LoRA")
    with open_safetensors(path, "a LoRA") as file:
        metadata = dict(file.metadata() or {})
    tensors = {name: read_tensor(path, span, max_bytes=None) for name, span in spans.items()}
    try:
        adapter, ignored = from_tensors(tensors, alphas_in(metadata, tensors))
    except UnknownKeysError as error:
        raise DataError(f"{path}: not a LoRA of FLUX's blocks; it has {error}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{path}: not a valid LoRA ({error})") from None
    if not adapter:
        raise DataError(f"{path}: it has no LoRA of the transformer or of CLIP-L")
    _require_finite(path, tensors)
    return AdapterFile(path, adapter, metadata, dtype_of(tensors), tuple(ignored))


def write_adapter(
    path: Path,
    adapter: Adapter,
    layout: Layout,
    dtype: torch.dtype,
    metadata: Mapping[str, str] | None = None,
    is_dev: bool | None = None,
) -> int:
    """Write ``adapter`` to ``path``, whole or not at all, and return its bytes; same input, same bytes.

    ``metadata`` is added to the file's own. Raises DataError if a value is not finite or too large for
    ``dtype``, StorageError if it cannot be written.
    """
    try:
        tensors = to_tensors(adapter, layout, dtype)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    _require_finite(path, tensors)
    own = metadata_of(adapter, layout, path.stem, metadata or {}, is_dev)
    content = serialised(tensors, with_hashes(tensors, own))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
    return len(content)


def _require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise DataError(
                f"{path}: {name} is not finite in {str(tensor.dtype).removeprefix('torch.')}"
            )
