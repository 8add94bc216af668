"""Weights from outside, whatever their layout, as BFL's tensors: looked over whole, then read one by one.

| given                                                    | layout               |
|----------------------------------------------------------|----------------------|
| FILE.safetensors                                         | BFL's, or diffusers' |
| a folder with *.safetensors, sharded or not              | diffusers' mostly    |
| a folder with transformer/ in it (a whole pipeline)      | diffusers'           |
| checkpoints/step_N, or the output folder of a run        | our own              |

A torchtitan run writes such a folder with its own option for safetensors; its native checkpoints begin
with a pickled index, and no pickle is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fluxtrain import checkpoint
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.validation import validate
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.model.tensor_names import Entry, Shape, entries
from fluxtrain.safetensors_file import Span, read_header

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.")
AXES_KEY = "axes_dims_rope"
"""RoPE channels of the axes, as JSON: in diffusers' config.json, and in the metadata of files of ours."""
_GROUP_BYTES = 1 << 30  # of a checkpoint read at once: its shards are opened anew each time


class Weights(Protocol):
    """Tensors under BFL's names; shapes are known at once, the values are read on demand."""

    path: Path
    model: ModelConfig
    shapes: dict[str, Shape]

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors ``names`` in this order, in the dtype of the source."""
        ...


def open_weights(path: Path) -> Weights:
    """Return the weights at ``path``; DataError where nothing of the table above is there."""
    if path.is_dir():
        newest = checkpoint.latest(path / CHECKPOINTS_FOLDER)
        if newest or (path / "DONE").exists():
            return _CheckpointWeights(newest or path)
        if (path / "transformer").is_dir():
            return open_weights(path / "transformer")
        if (path / ".metadata").exists():
            text = (
                "a native checkpoint of torch.distributed begins with a pickle, which is not read"
            )
            raise DataError(f"{path}: {text}; let torchtitan write safetensors instead")
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise DataError(f"{path}: no *.safetensors file and no finished checkpoint is here")
        return _recognised(path, files)
    if not path.is_file():
        raise DataError(f"{path}: missing")
    return _recognised(path, [path])


def published_weights(config: RunConfig, models_root: Path) -> Iterator[tuple[str, Tensor]] | None:
    """Return the tensors that ``config`` starts from, None where it starts from random ones.

    Raises DataError where they are missing or not of the model that ``config`` describes.
    """
    if config.initial_weights is None:
        return None
    weights = open_weights(models_root / config.initial_weights)
    require_whole(weights, config.model)
    return weights.read(list(weights.shapes))


def require_whole(weights: Weights, model: ModelConfig) -> None:
    """Raise DataError naming the first tensors that ``model`` needs and ``weights`` lack, or the reverse."""
    wanted = {entry.name: entry.shape for entry in entries(model)}
    found = weights.shapes
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is not a tensor of this model" for name in found if name not in wanted]
    faults += [
        f"{name} has shape {list(found[name])} where the model has {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise DataError(f"{weights.path}: {'; '.join(faults[:3])}{more}")


@dataclass(frozen=True)
class _Place:
    file: Path
    span: Span


class _FileWeights:
    """BFL's layout in one or several safetensors files."""

    def __init__(self, path: Path, places: dict[str, _Place]) -> None:
        self.path, self._places = path, places
        self.model = _guessed(
            path, {name: place.span.shape for name, place in places.items()}, _BFL
        )
        self.shapes = {name: place.span.shape for name, place in places.items()}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors."""
        for name in names:
            yield name, _read(self._places[name])


class _DiffusersWeights:
    """diffusers' layout: rows are put together and halves swapped back while reading."""

    def __init__(self, path: Path, places: dict[str, _Place]) -> None:
        self.path, self._places = path, places
        shapes = {name: place.span.shape for name, place in places.items()}
        self.model = _guessed(path, shapes, _DIFFUSERS)
        known = {entry.name: entry for entry in entries(self.model)}
        self._entries = {
            name: entry
            for name, entry in known.items()
            if all(part in places for part, _ in entry.parts)
        }
        used = {part for entry in self._entries.values() for part, _ in entry.parts}
        self.shapes = {name: self._shape(entry) for name, entry in self._entries.items()}
        self.shapes |= {name: places[name].span.shape for name in places if name not in used}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors."""
        for name in names:
            entry = self._entries[name]
            rows = torch.cat([_read(self._places[part]) for part, _ in entry.parts])
            yield name, torch.cat(rows.chunk(2)[::-1]) if entry.swapped else rows

    def _shape(self, entry: Entry) -> Shape:
        shapes = [self._places[part].span.shape for part, _ in entry.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


class _CheckpointWeights:
    """The model's part of one of our checkpoints, in as many shards as there were ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        values = checkpoint.read_config(path).get("model")
        self.model = validate(ModelConfig, values, f"{path}/config.json: model")
        self.shapes = {entry.name: entry.shape for entry in entries(self.model)}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, a gigabyte of them read together."""
        for group in _groups(names, self.shapes):
            state = {f"model.{name}": torch.empty(self.shapes[name]) for name in group}
            checkpoint.load(self.path, state)
            yield from ((name, state[f"model.{name}"]) for name in group)


def _recognised(path: Path, files: list[Path]) -> Weights:
    places: dict[str, _Place] = {}
    for file in files:
        for name, span in read_header(file).items():
            if name in places:
                raise DataError(f"{file}: {name} is in another file of {path} as well")
            places[name] = _Place(file, span)
    places = _without_prefix(places)
    if "img_in.weight" in places:
        named = {_scale_name(name): place for name, place in places.items()}
        return _FileWeights(path, named)
    if "x_embedder.weight" in places:
        return _DiffusersWeights(path, places)
    names = ", ".join(sorted(places)[:3])
    raise DataError(f"{path}: neither BFL's nor diffusers' FLUX transformer (it has {names} ...)")


def _without_prefix(places: dict[str, _Place]) -> dict[str, _Place]:
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in places):
            return {name.removeprefix(prefix): place for name, place in places.items()}
    return places


def _scale_name(name: str) -> str:
    """Return BFL's name: some tools write ``.weight`` in place of the QK norms' ``.scale``."""
    for norm in ("query_norm", "key_norm"):
        if name.endswith(f"{norm}.weight"):
            return name.removesuffix("weight") + "scale"
    return name


@dataclass(frozen=True)
class _Landmarks:
    """Tensors of a layout whose shapes tell those of the model; the MLP's is of a double or single block."""

    img: str
    txt: str
    vec: str
    guidance: str
    head: str
    double_mlp: str
    single_mlp: str
    double_blocks: str
    single_blocks: str
    fused: int  # times hidden, the rows that stand before the MLP's in ``single_mlp``


_BFL = _Landmarks(
    "img_in.weight",
    "txt_in.weight",
    "vector_in.in_layer.weight",
    "guidance_in.in_layer.weight",
    "query_norm.scale",
    "img_mlp.0.weight",
    "linear1.weight",
    "double_blocks",
    "single_blocks",
    fused=3,
)
_DIFFUSERS = _Landmarks(
    "x_embedder.weight",
    "context_embedder.weight",
    "time_text_embed.text_embedder.linear_1.weight",
    "time_text_embed.guidance_embedder.linear_1.weight",
    "attn.norm_q.weight",
    "ff.net.0.proj.weight",
    "proj_mlp.weight",
    "transformer_blocks",
    "single_transformer_blocks",
    fused=0,
)


def _guessed(path: Path, shapes: dict[str, Shape], marks: _Landmarks) -> ModelConfig:
    """Return the model that tensors of these shapes make; DataError where that is no FLUX transformer."""

    def ending(name: str) -> Shape | None:
        return next((shape for known, shape in shapes.items() if known.endswith(name)), None)

    try:
        hidden, in_channels = shapes[marks.img]
        head = (ending(marks.head) or (0,))[0]
        double, single = ending(marks.double_mlp), ending(marks.single_mlp)
        mlp = double[0] if double else (single or (0,))[0] - marks.fused * hidden
        values = {
            "in_channels": in_channels,
            "vec_in_dim": shapes[marks.vec][1],
            "context_in_dim": shapes[marks.txt][1],
            "hidden_size": hidden,
            "num_heads": hidden // head,
            "mlp_ratio": mlp / hidden,
            "depth": _count(shapes, marks.double_blocks),
            "depth_single_blocks": _count(shapes, marks.single_blocks),
            "axes_dim": _axes(path, head),
            "guidance_embed": marks.guidance in shapes,
        }
        return validate(ModelConfig, values, "model")
    except (KeyError, ValueError, IndexError, ArithmeticError, ConfigError) as error:
        raise DataError(f"{path}: not the weights of a FLUX transformer ({error})") from None


def _count(shapes: dict[str, Shape], blocks: str) -> int:
    return len({name.split(".")[1] for name in shapes if name.startswith(f"{blocks}.")})


def _axes(path: Path, head: int) -> tuple[int, int, int]:
    """Return the RoPE channels of the axes: as the file or a config.json beside says, else FLUX's."""
    try:
        if path.is_dir():
            stated = json.loads((path / "config.json").read_text())["axes_dims_rope"]
        else:
            with safe_open(path, framework="pt") as file:
                stated = json.loads((file.metadata() or {})[AXES_KEY])
        first, second, third = map(int, stated)
        return first, second, third
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return head // 8, head // 16 * 7, head // 16 * 7


def _read(place: _Place) -> Tensor:
    """Return one tensor; DataError where the file was cut off since it was looked over."""
    span = place.span
    size = prod(span.shape) * span.dtype.itemsize
    try:
        with place.file.open("rb") as file:
            file.seek(span.offset)
            content = bytearray(size)
            if file.readinto(content) != size:
                raise DataError(f"{place.file}: cut off")
    except OSError as error:
        raise DataError(f"{place.file}: {error.strerror}") from None
    flat = torch.frombuffer(content, dtype=span.dtype) if size else torch.empty(0, dtype=span.dtype)
    return flat.view(span.shape)


def _groups(names: Sequence[str], shapes: dict[str, Shape]) -> Iterator[list[str]]:
    total = 0
    keys = {}
    for name in names:
        keys[name] = total // _GROUP_BYTES
        total += 4 * prod(shapes[name])
    for _, group in groupby(names, keys.__getitem__):
        yield list(group)
