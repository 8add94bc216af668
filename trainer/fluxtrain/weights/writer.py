"""Write weights as BFL's single file or diffusers' folder, and verify them by checksum.

At most one tensor of the model is in memory. The output is written completely or not at all.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.model.layers import Entry, Shape, entries
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.files import Block
from fluxtrain.runtime.safetensors import content_of, header, read_header
from fluxtrain.weights.reader import AXES_KEY, Weights, require_complete

Layout = Literal["bfl", "diffusers"]
LAYOUTS: tuple[Layout, ...] = ("bfl", "diffusers")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_STEM = "diffusion_pytorch_model"
_SHARD_BYTES = 10 * 10**9  # diffusers' default


@dataclass
class _File:
    """A safetensors file: its tensors in order, and their checksums."""

    path: Path
    dtype: torch.dtype
    model: ModelConfig
    shapes: dict[str, Shape] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize

    def write_header(self, file: BinaryIO) -> None:
        metadata = {"format": "pt", AXES_KEY: json.dumps(self.model.axes_dim)}
        tensors = {name: (self.dtype, shape) for name, shape in self.shapes.items()}
        file.write(header(tensors, metadata))

    def write(self, file: BinaryIO, name: str, tensor: Tensor) -> None:
        content = content_of(tensor.to(self.dtype))
        self.checksums[name] = zlib.crc32(content)
        file.write(content)

    def verify(self) -> None:
        """Raise StorageError if the file on the disk differs from what was written."""
        spans = read_header(self.path)
        if {name: span.shape for name, span in spans.items()} != self.shapes:
            raise StorageError(
                f"{self.path}: the tensors on the disk are not those that were written"
            )
        for name, span in spans.items():
            block = Block(self.path.name, span.offset, span.num_bytes, self.checksums[name])
            if not block.is_whole_in(self.path.parent):
                raise StorageError(f"{self.path}: {name} on the disk differs from what was written")


def write_weights(
    weights: Weights,
    output: Path,
    layout: Layout,
    dtype: torch.dtype,
    shard_bytes: int = _SHARD_BYTES,
    report_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> int:
    """Write ``weights`` to ``output`` (a file for bfl, a folder for diffusers); return the bytes written.

    ``report_bytes`` is called with the number of bytes of each write. Raises DataError if tensors are
    missing, damaged or not finite, ConfigError if the layout does not support the model or ``output`` exists,
    StorageError if it cannot be written.
    """
    model = weights.model
    require_complete(weights, model)
    if output.exists():
        raise ConfigError("--output", str(output), "exists already; remove it or name another")
    weights.verify(World.alone(), lambda: None)
    partial = output.with_name(f".{output.name}.partial")
    try:
        _remove(partial)
        partial.parent.mkdir(parents=True, exist_ok=True)
        if layout == "bfl":
            shapes = {entry.name: entry.shape for entry in entries(model)}
            files = [_File(partial, dtype, model, shapes)]
        else:
            config = _diffusers_config(model)
            partial.mkdir()
            files = _shards(partial, model, dtype, shard_bytes)
            _write_config_and_index(partial, config, files)
        _stream(weights, files, layout, dtype, report_bytes)
        for file in files:
            file.verify()
        partial.replace(output)
    except OSError as error:
        raise StorageError(f"{output}: cannot be written ({error.strerror})") from None
    finally:
        with suppress(OSError):  # what made the write fail is told
            _remove(partial)
    return sum(file.num_bytes for file in files)


def _stream(
    weights: Weights,
    files: Sequence[_File],
    layout: Layout,
    dtype: torch.dtype,
    report_bytes: Callable[[int], object],
) -> None:
    """Write each tensor when it is read; ``files`` have them in the same order."""
    parts = _read(weights, layout, dtype)
    for file in files:
        with file.path.open("wb") as handle:
            file.write_header(handle)
            for name, rows in islice(parts, len(file.shapes)):
                file.write(handle, name, rows)
                report_bytes(rows.numel() * dtype.itemsize)


def _read(weights: Weights, layout: Layout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by their names in ``layout``; raise DataError if ``dtype`` cannot have a value."""
    by_name = {entry.name: entry for entry in entries(weights.model)}
    is_narrow = dtype == torch.float16
    for name, tensor in weights.read(list(by_name)):
        if not torch.isfinite(tensor.half() if is_narrow else tensor).all():
            text = " in float16; bfloat16 has a wider range" if is_narrow else ""
            raise DataError(f"{weights.path}: {name} is not finite{text}")
        yield from _parts(by_name[name], tensor, layout)


def _parts(entry: Entry, tensor: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    if layout == "bfl":
        yield entry.name, tensor
        return
    rows = torch.cat(tensor.chunk(2)[::-1]) if entry.swapped else tensor
    split = torch.split(rows, [count for _, count in entry.parts])
    yield from zip((name for name, _ in entry.parts), split, strict=True)


def _shards(folder: Path, model: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> list[_File]:
    groups: list[dict[str, Shape]] = [{}]
    used = 0
    for entry in entries(model):
        for name, count in entry.parts:
            shape = (count, *entry.shape[1:])
            size = prod(shape) * dtype.itemsize
            if groups[-1] and used + size > shard_bytes:
                groups.append({})
                used = 0
            groups[-1][name] = shape
            used += size
    if len(groups) == 1:
        return [_File(folder / f"{_STEM}.safetensors", dtype, model, groups[0])]
    return [
        _File(folder / f"{_STEM}-{i:05d}-of-{len(groups):05d}.safetensors", dtype, model, shapes)
        for i, shapes in enumerate(groups, 1)
    ]


def _write_config_and_index(
    folder: Path, config: dict[str, object], files: Sequence[_File]
) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.num_bytes for file in files)},
            "weight_map": {name: file.path.name for file in files for name in file.shapes},
        }
        path = folder / f"{_STEM}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _diffusers_config(model: ModelConfig) -> dict[str, object]:
    """Return diffusers' config of the model; raise ConfigError if diffusers does not support the model."""
    if (model.mlp_ratio, model.theta) != (4.0, 10_000):
        text = "diffusers supports mlp_ratio 4 and theta 10000 only; export to bfl"
        raise ConfigError("--to", "diffusers", text)
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": model.in_channels,
        "out_channels": None if model.out_channels == model.in_channels else model.out_channels,
        "num_layers": model.depth,
        "num_single_layers": model.depth_single_blocks,
        "attention_head_dim": model.hidden_size // model.num_heads,
        "num_attention_heads": model.num_heads,
        "joint_attention_dim": model.context_in_dim,
        "pooled_projection_dim": model.vec_in_dim,
        "guidance_embeds": model.guidance_embed,
        "axes_dims_rope": list(model.axes_dim),
    }


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
