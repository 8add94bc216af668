"""Read weights of any supported layout under BFL's tensor names: all shapes first, then single tensors.

| given                                                    | layout               |
|----------------------------------------------------------|----------------------|
| FILE.safetensors, in fp8 with scales too                 | BFL's, or diffusers' |
| a folder with *.safetensors, sharded or not              | diffusers' mostly    |
| a folder with transformer/ in it (a whole pipeline)      | diffusers'           |
| checkpoints/step_N, or the output folder of a run        | our own              |

torchtitan can write such a folder in safetensors; its native checkpoints have a pickled index, and
pickles are not read. Our own checkpoints are verified by their checksums; the other layouts have none.

A checkpoint of adapters has no weights of the model, nor of CLIP. Its run keeps a digest of them in
``base.json``: of names, shapes and the first bytes of each tensor, or of the checksums of one of our
checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import CONDITIONS, ModelConfig
from fluxtrain.encode.files import clip_digest
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.model.layers import Entry, Shape, entries
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime import safetensors
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.safetensors import (
    Span,
    identify,
    is_beside,
    read_header,
    read_tensor,
    require_scales,
    require_shape,
    require_usable,
    scales_of,
    unscaled,
)
from fluxtrain.state.run_state import DONE, kind_of_result, latest, read_config
from fluxtrain.state.verification import require_whole_weights

_GROUP_BYTES = 1 << 30  # read at once from a checkpoint, whose shards are reopened for each read


class CheckpointWeights:
    """The model's weights of one of our checkpoints, or their average if the run keeps one."""

    def __init__(self, path: Path) -> None:
        """Read the model's config; raise DataError or ConfigError if it is not valid, or of adapters."""
        self.path = path
        config = read_config(path)
        if config.get("adapter") is not None:
            base = config.get("initial_weights")
            raise DataError(
                f"{path}: it has adapters only, for {base!r}, and not the model's weights"
            )
        self._kind, values = kind_of_result(config), config.get("model")
        self.model = validate(ModelConfig, values, f"{path}/config.json: model")
        self.shapes = {entry.name: entry.shape for entry in entries(self.model)}

    def verify(self, world: World, alive: Alive) -> None:
        """Verify the parts of the files that hold the weights, each rank an equal share."""
        require_whole_weights(self.path, world, alive)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, reading a gigabyte of them at once."""
        from fluxtrain.state.checkpoint import load  # a second of imports

        for group in _groups(names, self.shapes):
            state = {f"{self._kind}.{name}": torch.empty(self.shapes[name]) for name in group}
            load(self.path, state)
            yield from zip(group, state.values(), strict=True)


def _groups(names: Sequence[str], shapes: dict[str, Shape]) -> Iterator[list[str]]:
    total = 0
    keys = {}
    for name in names:
        keys[name] = total // _GROUP_BYTES
        total += 4 * prod(shapes[name])
    for _, group in groupby(names, keys.__getitem__):
        yield list(group)


_IN_CHECKPOINT = "model.diffusion_model."
"""Before the transformer's names in ComfyUI's checkpoints, which have text encoders and autoencoder too."""
_PREFIXES = (_IN_CHECKPOINT, "diffusion_model.", "transformer.", "model.")
_MAX_CONFIG_BYTES = 1 << 20
_DIGESTED_BYTES = 4096
"""Of each tensor, for the digest of all."""
AXES_KEY = "axes_dims_rope"
"""Key of the RoPE dimensions of the axes in diffusers' config.json, and in the metadata of our files."""


class Weights(Protocol):
    """Tensors under BFL's names; values are read on demand."""

    path: Path
    model: ModelConfig
    shapes: dict[str, Shape]

    def verify(self, world: World, alive: Alive) -> None:
        """Raise DataError, with the file, if a checksum is wrong; every rank of ``world`` must call this.

        ``alive`` is called after each part that was read.
        """
        ...

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors ``names`` in this order, in the dtype of the source."""
        ...


def open_weights(path: Path) -> Weights:
    """Return the weights at ``path``; raise DataError if its layout is not in the table above."""
    if path.is_dir():
        newest = latest(path / CHECKPOINTS_FOLDER)
        if newest or (path / "DONE").exists():
            return CheckpointWeights(newest or path)
        if (path / "transformer").is_dir():
            return open_weights(path / "transformer")
        if (path / ".metadata").exists():
            text = "a native checkpoint of torch.distributed has a pickled index, which is not read"
            raise DataError(f"{path}: {text}; let torchtitan write safetensors instead")
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise DataError(f"{path}: no *.safetensors file and no complete checkpoint is here")
        return _open_files(path, files)
    if path.suffix in (".yaml", ".yml"):
        raise DataError(
            f"{path}: holds no weights; name the output folder of its run, such as runs/NAME"
        )
    if not path.is_file():
        raise DataError(f"{path}: missing")
    return _open_files(path, [path])


def initial_weights(config: RunConfig, models_root: Path) -> Weights | None:
    """Return the initial weights of ``config``, None if the initialization is random.

    Raises DataError if they are missing or of another model. Their checksums are not verified yet.
    """
    if config.initial_weights is None:
        return None
    weights = open_weights(models_root / config.initial_weights)
    require_complete(weights, config.model)
    return weights


def published_weights(
    config: RunConfig, models_root: Path, world: World, alive: Alive = lambda: None
) -> Iterator[tuple[str, Tensor]] | None:
    """Return the tensors of the initial weights of ``config``, None if the initialization is random.

    Every rank of ``world`` must call this: they verify checksums together. Raises DataError if the weights
    are missing, damaged or of another model.
    """
    weights = initial_weights(config, models_root)
    if weights is None:
        return None
    weights.verify(world, alive)
    return weights.read(list(weights.shapes))


def digest_of(weights: Weights) -> str:
    """Return a digest by which other weights of the same shapes are told; not all bytes are read."""
    if isinstance(weights, CheckpointWeights):
        return hashlib.sha256((weights.path / DONE).read_bytes()).hexdigest()
    assert isinstance(weights, _FileWeights), "initial weights are one of them"
    return weights.digest()


def require_complete(weights: Weights, model: ModelConfig) -> None:
    """Raise DataError naming the first missing, unknown or misshapen tensors of ``weights``."""
    expected = {entry.name: entry.shape for entry in entries(model)}
    shapes = weights.shapes
    _require_channels(weights, model)
    faults = [f"{name} is missing" for name in expected if name not in shapes]
    faults += [f"{name} is not a tensor of this model" for name in shapes if name not in expected]
    faults += [
        f"{name} has shape {list(shapes[name])} but the model has {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        if {name.partition(".")[0] for name in expected.keys() ^ shapes.keys()} == {"guidance_in"}:
            given, flag = ("schnell", "false") if model.guidance_embed else ("dev", "true")
            more += (
                f": these are FLUX.1 [{given}]'s: set model.guidance_embed to {flag}, as preset: "
            )
            more += f"{given}-lora does, or name other weights"
        raise DataError(f"{weights.path}: {'; '.join(faults[:3])}{more}")


def _require_channels(weights: Weights, model: ModelConfig) -> None:
    """Raise DataError if ``weights`` are, by their inputs, for another condition than that of ``model``."""
    tensors = ("img_in.weight", "final_layer.linear.weight")
    try:
        (_, inputs), (outputs, _) = (weights.shapes[name] for name in tensors)
        found = _conditions(inputs, outputs)
    except (KeyError, ValueError):
        return
    if model.condition not in found:
        names = " or ".join(found)
        text = f"tokens of {inputs} channels, as model.condition {names} has, not {model.condition}"
        step = f"set model.condition to {names} and model.in_channels to {inputs}"
        raise DataError(f"{weights.path}: {text}: {step}, or name other weights")


@dataclass(frozen=True)
class _Location:
    file: Path
    name: str
    span: Span
    scale: _Location | None = None
    """Of values in fp8."""

    def read(self) -> Tensor:
        """Return the tensor, in float32 if it is in fp8.

        Raises DataError if the file was truncated since its header was read, or the scale is of no use.
        """
        values = read_tensor(self.file, self.span, max_bytes=None)
        try:
            return unscaled(values, None if self.scale is None else self.scale.read())
        except ValueError as error:
            raise DataError(f"{self.file}: {self.name!r:.80} {error}") from None

    def first_bytes(self) -> bytes:
        """Return the first bytes of the tensor, and of its scale."""
        with self.file.open("rb") as file:
            file.seek(self.span.offset)
            content = file.read(min(_DIGESTED_BYTES, self.span.num_bytes))
        return content if self.scale is None else content + self.scale.first_bytes()

    def with_scale(self, scale: _Location) -> _Location:
        """Return it with ``scale``; DataError if that is of no use."""
        rows = self.span.shape[0] if self.span.shape else 1
        try:
            require_shape(scale.span.shape, rows)  # before it is read
            require_usable(scale.read(), rows)
        except ValueError as error:
            raise DataError(f"{self.file}: {self.name!r:.80} {error}") from None
        return replace(self, scale=scale)


class _FileWeights:
    """Weights in safetensors files; diffusers' are in parts and have the halves of a tensor swapped."""

    def __init__(self, path: Path, locations: dict[str, _Location], is_bfl: bool) -> None:
        self.path, self._locations = path, locations
        shapes = {name: location.span.shape for name, location in locations.items()}
        self.model = _infer_model(path, shapes, is_bfl)
        named = {entry.name: entry for entry in entries(self.model)}
        if is_bfl:
            named = {name: Entry(name, e.shape, ((name, e.shape[0]),)) for name, e in named.items()}
        self._entries = {
            name: entry
            for name, entry in named.items()
            if all(part in locations for part, _ in entry.parts)
        }
        used = {part for entry in self._entries.values() for part, _ in entry.parts}
        self.shapes = {name: self._shape(entry) for name, entry in self._entries.items()}
        self.shapes |= {name: shape for name, shape in shapes.items() if name not in used}

    def verify(self, world: World, alive: Alive) -> None:
        """Do nothing: published files have no checksums."""

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                raise DataError(f"{self.path}: {name!r:.80} is not a tensor of this model")
            first, *others = (self._locations[part].read() for part, _ in entry.parts)
            rows = torch.cat([first, *others]) if others else first
            yield name, torch.cat(rows.chunk(2)[::-1]) if entry.swapped else rows

    def digest(self) -> str:
        """Return a digest of names, types, shapes and the first bytes of all tensors."""
        found = hashlib.sha256()
        for name in sorted(self._locations):
            each = self._locations[name]
            described = f"{name} {each.span.dtype} {list(each.span.shape)}\n"
            found.update(described.encode() + each.first_bytes())
        return found.hexdigest()

    def _shape(self, entry: Entry) -> Shape:
        first, *others = (self._locations[part].span.shape for part, _ in entry.parts)
        for (part, _), shape in zip(entry.parts, (first, *others), strict=True):
            if others and not shape:
                raise DataError(
                    f"{self.path}: {part} has shape [], which is no part of {entry.name}"
                )
        return (sum(shape[0] for shape in (first, *others)), *first[1:]) if others else first


def _open_files(path: Path, files: list[Path]) -> Weights:
    locations: dict[str, _Location] = {}
    for file in files:
        for name, span in read_header(file, safetensors.SCALED_FP8_DTYPES).items():
            if name in locations:
                raise DataError(f"{file}: {name} is in another file of {path} as well")
            locations[name] = _Location(file, name, span)
    locations = _with_scales(path, _without_prefix(locations))
    if "img_in.weight" in locations:
        named = {_scale_name(name): location for name, location in locations.items()}
        return _FileWeights(path, named, is_bfl=True)
    if "x_embedder.weight" in locations:
        return _FileWeights(path, locations, is_bfl=False)
    names = ", ".join(sorted(locations)[:3])
    text = f"neither BFL's nor diffusers' FLUX transformer (it has {names} ...)"
    raise DataError(f"{path}: {text}{identify(locations)}")


def _with_scales(path: Path, locations: dict[str, _Location]) -> dict[str, _Location]:
    """Return ``locations`` without those of scales, which their weights have instead.

    Raises DataError if one is missing or of no use.
    """
    spans = {name: each.span for name, each in locations.items()}
    in_fp8 = {n: span.shape for n, span in spans.items() if span.dtype in safetensors.FP8.values()}
    try:
        require_scales(in_fp8, locations)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    scales = scales_of(locations)
    kept = {name: each for name, each in locations.items() if not is_beside(name)}
    return {
        name: each.with_scale(locations[scales[name]]) if name in scales else each
        for name, each in kept.items()
    }


def _without_prefix(locations: dict[str, _Location]) -> dict[str, _Location]:
    """Return ``locations`` without the prefix of their names; of a checkpoint the transformer's alone."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in locations):
            return {
                name.removeprefix(prefix): location
                for name, location in locations.items()
                if prefix != _IN_CHECKPOINT or name.startswith(prefix)
            }
    return locations


def _scale_name(name: str) -> str:
    """Return BFL's name: some tools write ``.weight`` instead of the QK norms' ``.scale``."""
    for norm in ("query_norm", "key_norm"):
        if name.endswith(f"{norm}.weight"):
            return name.removesuffix("weight") + "scale"
    return name


_KEYS = {
    "img": ("img_in.weight", "x_embedder.weight"),
    "last": ("final_layer.linear.weight", "proj_out.weight"),
    "txt": ("txt_in.weight", "context_embedder.weight"),
    "vec": ("vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight"),
    "guidance": (
        "guidance_in.in_layer.weight",
        "time_text_embed.guidance_embedder.linear_1.weight",
    ),
    "head": ("query_norm.scale", "attn.norm_q.weight"),
    "double_mlp": ("img_mlp.0.weight", "ff.net.0.proj.weight"),
    "single_mlp": ("linear1.weight", "proj_mlp.weight"),
    "double_blocks": ("double_blocks", "transformer_blocks"),
    "single_blocks": ("single_blocks", "single_transformer_blocks"),
}
"""BFL's and diffusers' names of the tensors from whose shapes the model is inferred."""


def _infer_model(path: Path, shapes: dict[str, Shape], is_bfl: bool) -> ModelConfig:
    """Return the model with tensors of these shapes; raise DataError if they are not a FLUX transformer's."""

    keys = {name: bfl if is_bfl else diffusers for name, (bfl, diffusers) in _KEYS.items()}

    def ending(name: str) -> Shape | None:
        return next((shape for key, shape in shapes.items() if key.endswith(keys[name])), None)

    try:
        hidden, in_channels = shapes[keys["img"]]
        head = (ending("head") or (0,))[0]
        double, single = ending("double_mlp"), ending("single_mlp")
        before = (
            3 * hidden if is_bfl else 0
        )  # rows of q, k and v, in the same tensor as those of the MLP
        mlp = double[0] if double else (single or (0,))[0] - before
        values = {
            "condition": _conditions(in_channels, shapes.get(keys["last"], (in_channels,))[0])[0],
            "in_channels": in_channels,
            "vec_in_dim": shapes[keys["vec"]][1],
            "context_in_dim": shapes[keys["txt"]][1],
            "hidden_size": hidden,
            "num_heads": hidden // head,
            "mlp_ratio": mlp / hidden,
            "depth": _count(shapes, keys["double_blocks"]),
            "depth_single_blocks": _count(shapes, keys["single_blocks"]),
            "axes_dim": _axes(path, head),
            "guidance_embed": keys["guidance"] in shapes,
        }
        return validate(ModelConfig, values, "model")
    except KeyError as error:
        text = f"it lacks {error.args[0]}"
        raise DataError(f"{path}: not the weights of a FLUX transformer ({text})") from None
    except (ValueError, IndexError, ArithmeticError, ConfigError) as error:
        raise DataError(f"{path}: not the weights of a FLUX transformer ({error})") from None


def _conditions(in_channels: int, out_channels: int) -> list[str]:
    """Return the conditions of models with so many channels; ValueError if there are none."""
    plain = ["none"] * (in_channels == out_channels)
    found = [
        n for n, each in CONDITIONS.items() if each.token_channels(out_channels) == in_channels
    ]
    if not plain + found:
        raise ValueError(f"tokens of {in_channels} channels become {out_channels}")
    return plain + found


def _count(shapes: dict[str, Shape], blocks: str) -> int:
    return len({name.split(".")[1] for name in shapes if name.startswith(f"{blocks}.")})


def _axes(path: Path, head: int) -> tuple[int, int, int]:
    """Return the RoPE dimensions of the axes from the file or the folder's config.json, by default FLUX's."""
    try:
        if path.is_dir():
            axes = json.loads(_config_text(path / "config.json"))[AXES_KEY]
        else:
            with safe_open(path, framework="pt") as file:
                axes = json.loads((file.metadata() or {})[AXES_KEY])
        first, second, third = map(int, axes)
        return first, second, third
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError):
        return head // 8, head // 16 * 7, head // 16 * 7


def _config_text(path: Path) -> str:
    if (size := path.stat().st_size) > _MAX_CONFIG_BYTES:
        raise DataError(f"{path}: {size} bytes, at most {_MAX_CONFIG_BYTES} are read")
    return path.read_text(encoding="utf-8")


FILE = "base.json"
_DIGEST, _CLIP = "sha256", "clip_sha256"
_OTHERS = "has other weights than when the run began; restore them, or use another --output for another run"


def settle_base(config: RunConfig, paths: RunPaths, world: World, is_new: bool) -> None:
    """Keep which weights the adapters of a run change; ConfigError if one that goes on has others."""
    if not is_new:
        return require_same_base(config, paths.models, paths.output)
    weights = initial_weights(config, paths.models) if config.adapter else None
    if weights is not None and world.is_main:
        content = {"weights": config.initial_weights, _DIGEST: digest_of(weights)}
        if config.trains_clip:
            content[_CLIP] = clip_digest(config.encoders, paths.models)
        with atomic_write(paths.output / FILE) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return None


def require_same_base(config: RunConfig, models_root: Path, output: Path) -> None:
    """Raise ConfigError if the run in ``output`` began with other weights, of the model or of CLIP.

    DataError if what it keeps of them is damaged.
    """
    path = output / FILE
    if config.adapter is None or not path.exists():
        return
    weights = initial_weights(config, models_root)
    before, clip = _read(path)
    if weights is not None and digest_of(weights) != before:
        raise ConfigError("spec.run.initial_weights", config.initial_weights, _OTHERS)
    if config.trains_clip and clip not in (None, clip_digest(config.encoders, models_root)):
        raise ConfigError("spec.run.encoders.clip", config.encoders.clip, _OTHERS)


def require_same_clip(config: RunConfig, models_root: Path, adapters: Iterable[Path]) -> None:
    """Raise ConfigError if the CLIP of ``config`` is another one than that of a run among ``adapters``.

    These are runs, checkpoints and LoRA files, which keep nothing of CLIP. DataError if what a run keeps is
    damaged.
    """
    for path in filter(Path.is_dir, adapters):
        run = path if (path / FILE).exists() else path.parent.parent  # of a checkpoint
        clip = _read(run / FILE)[1] if (run / FILE).exists() else None
        if clip not in (None, clip_digest(config.encoders, models_root)):
            text = f"has other weights than the one whose adapters the run {run} trained"
            raise ConfigError("spec.run.encoders.clip", config.encoders.clip, text)


def _read(path: Path) -> tuple[str, str | None]:
    """Return the digests of the model and of CLIP in ``path``; DataError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content[_DIGEST], content.get(_CLIP)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        text = "is damaged; remove it if initial_weights are those that the run began with"
        raise DataError(f"{path}: {text}") from None
