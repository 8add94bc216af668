"""Opens a model with the adapters that are added to it: LoRA files, or runs and checkpoints of adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.adapter.file import AdapterFile, read_adapter
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.adapter.reading import PEFT_FILE
from fluxtrain.adapter.training_files import read_checkpoint, run_metadata
from fluxtrain.adapter.updates import AnyUpdate, Hadamard, Product, RowBlock, Update, kind_of
from fluxtrain.contract.process import CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import CONDITIONS, ModelConfig
from fluxtrain.errors import DataError
from fluxtrain.model.layers import MAGNITUDE, WHOLE_MAGNITUDE, AdaptedLayer, adapted_layers, is_clip
from fluxtrain.model.parameters import initial_value
from fluxtrain.runtime.progress import first_of
from fluxtrain.state.run_state import DONE, latest, read_config, read_state
from fluxtrain.weights.reader import Weights, open_weights, require_complete

_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"


def open_adapter(source: Path, skip_unknown: bool = False) -> AdapterFile:
    """Return the adapter in ``source``: a LoRA file of any dialect or a folder of diffusers or peft with one,
    a run or a checkpoint of adapters.

    Raises DataError if it is none of these, or has keys that are not known, unless ``skip_unknown`` is set.
    """
    files = (source / name for name in (_DIFFUSERS_FILE, PEFT_FILE))
    file = next(filter(Path.is_file, files), source)
    if not file.is_dir():
        return read_adapter(file, skip_unknown)
    adapter, config = read_checkpoint(source)
    step = read_state(latest(source / CHECKPOINTS_FOLDER) or source).step
    return AdapterFile(source, adapter, run_metadata(config, step))


def open_model(path: Path, models_root: Path) -> Weights:
    """Return the weights at ``path``; of a run or a checkpoint of adapters, those of its model with them.

    The model of adapters is where the run had it, below ``models_root`` if that is relative. Raises DataError
    if a file is missing or the layout is unknown.
    """
    checkpoint = checkpoint_of(path)
    config = read_config(checkpoint) if checkpoint else {}
    if config.get("adapter") is None:
        return open_weights(path)
    base = models_root / str(config.get("initial_weights"))
    if not base.exists():
        raise DataError(f"{path}: its adapters are for {base}, which is missing; see --models")
    return MergedWeights(open_weights(base), [(open_adapter(path), 1.0)])


def checkpoint_of(path: Path) -> Path | None:
    """Return the newest checkpoint of the run at ``path``, or ``path`` if it is one; else None."""
    return latest(path / CHECKPOINTS_FOLDER) or (path if (path / DONE).exists() else None)


def model_of(config: RunConfig, models_root: Path) -> Weights | None:
    """Return ``initial_weights`` with ``added_adapters``; None if the initialization is random.

    Raises DataError if a file is missing, damaged or of another model. Checksums of weights are not verified
    yet.
    """
    if config.initial_weights is None:
        return None
    for given in (config.initial_weights, *(each.path for each in config.added_adapters)):
        _require_condition(models_root / given, config.model)
    weights = open_model(models_root / config.initial_weights, models_root)
    added = [
        (open_adapter(models_root / each.path, each.skip_unknown), each.strength)
        for each in config.added_adapters
    ]
    if added:
        weights = MergedWeights(weights, added)
    require_complete(weights, config.model)
    return weights


def _require_condition(path: Path, model: ModelConfig) -> None:
    """Raise DataError if ``path`` is a run whose model takes a condition that ``model`` does not."""
    checkpoint = checkpoint_of(path)
    trained = read_config(checkpoint)["model"] if checkpoint else {}
    name, here = trained.get("condition", "none"), model.takes
    own = CONDITIONS.get(name)  # depth's inputs are canny's
    if own and (here is None or own.token_channels(1) != here.token_channels(1)):
        text = f"trained with model.condition {name}; it is {model.condition} here"
        raise DataError(f"{path}: {text}")


def initial_parameters(
    config: RunConfig, models_root: Path, tell: Callable[[str], object] = lambda text: None
) -> dict[str, Tensor]:
    """Return the parameters, by name, of the layers in ``adapter.initial`` of ``config``; none without it.

    Their updates are those of the file. ``tell`` is called with a sentence on what is left out. Raises
    DataError if it is missing, or does not fit.
    """
    if config.adapter is None or config.adapter.initial is None:
        return {}
    path = models_root / config.adapter.initial
    skip = config.adapter.skip_unknown
    file = open_adapter(path, skip)
    found = file.adapter
    if text := file.skipped:
        tell(text)
    if config.adapter.clip is None and (clip := list(filter(is_clip, found))):
        tell(f"{path}: {len(clip)} layers of CLIP-L are left out; adapter.clip trains them on")
        found = {name: update for name, update in found.items() if not is_clip(name)}
    layers = {layer.name: layer for layer in adapted_layers(config.model, config.adapter)}
    others = [name for name in found if name not in layers]
    if others and not skip:
        raise DataError(
            f"{path}: it adapts {first_of(others, 1)}, to which spec.run.adapter gives no adapter; "
            "adapter.skip_unknown leaves such layers out"
        )
    if others:
        tell(f"{path}: {len(others)} layers are left out: {first_of(others)}")
        found = {name: update for name, update in found.items() if name in layers}
    if not found:
        text = f"spec.run.adapter adapts none of its layers: {first_of(list(file.adapter))}"
        raise DataError(f"{path}: {text}; adapter.layers and adapter.clip choose them")
    parameters = dict[str, Tensor]()
    for name, update in found.items():
        if not layers[name].is_low_rank or not isinstance(update, Update):
            parameters |= _same_product(layers[name], update, path)
            continue
        down, up = _fitted(layers[name], update, path, config.drawn_seed)
        parameters |= {f"{name}.lora_A": down, f"{name}.lora_B": up}
        parameters |= _magnitudes(layers[name], update, path)
    return parameters


def _magnitudes(layer: AdaptedLayer, update: Update, path: Path) -> dict[str, Tensor]:
    """Return the magnitudes of ``layer`` in ``update``, or their changes; none if it is no DoRA."""
    norms = [piece.magnitude for piece in update.pieces if piece.magnitude is not None]
    count = sum(len(each.values) for each in norms)
    if count != (layer.outputs if layer.is_dora else 0):
        has = f"magnitudes (DoRA) of {count} of its {update.outputs} rows"
        needs = "them of all" if layer.is_dora else "none, as adapter.dora is false"
        raise DataError(f"{path}: {layer.name} has {has}; spec.run.adapter has {needs}")
    if not norms:
        return {}
    kind = MAGNITUDE if norms[0].is_change else WHOLE_MAGNITUDE
    return {f"{layer.name}.{kind}": torch.cat([each.values for each in norms]).float()}


def _same_product(layer: AdaptedLayer, update: AnyUpdate, path: Path) -> dict[str, Tensor]:
    has = "a low-rank update" if isinstance(update, Update) else kind_of(update)
    if isinstance(update, Product | Hadamard):
        shapes = {name: tuple(tensor.shape) for name, tensor in update.tensors.items()}
        if shapes == layer.shapes:
            tensors = {name: tensor.float().clone() for name, tensor in update.tensors.items()}
            last = next(n for n in ("lokr_w2", "lokr_w2_b", "hada_w2_a") if n in tensors)
            tensors[last] *= update.scale / layer.scale
            return {f"{layer.name}.{name}": tensor for name, tensor in tensors.items()}
        has += f" of {shapes}"
    needs = "a low-rank update" if layer.is_low_rank else f"{layer.shapes}"
    advice = "fluxtrain adapter info names the uses of the file"
    raise DataError(f"{path}: {layer.name} is {has}; spec.run.adapter has {needs} there; {advice}")


_SPLIT = "adapter.split_qkv: true keeps its parts apart"
_RESIZE = "fluxtrain adapter resize writes it with another"


def _fitted(layer: AdaptedLayer, update: Update, path: Path, seed: int) -> tuple[Tensor, Tensor]:
    has, needs = (update.outputs, update.inputs), (layer.outputs, layer.inputs)
    if has != needs:
        raise DataError(f"{path}: {layer.name} has shape {has}, should have {needs}")
    name = f"{layer.name}.lora_A"
    fresh = initial_value(name, torch.Size(layer.shapes["lora_A"]), seed)
    down, up = fresh.chunk(len(layer.splits)), torch.zeros(layer.shapes["lora_B"])
    for own, rows, piece in zip(
        down, torch.split(up, list(layer.splits)), _pieces(layer, update), strict=True
    ):
        if piece.rank > layer.rank:
            is_split = max(each.rank for each in update.pieces) <= layer.rank
            raise DataError(
                f"{path}: {layer.name} has rank {piece.rank}, more than the {layer.rank} of "
                f"spec.run.adapter; {_SPLIT if is_split else _RESIZE}"
            )
        own[: piece.rank] = piece.down
        rows[:, : piece.rank] = piece.up.float() * (piece.scale / layer.scale)
    return fresh, up


def _pieces(layer: AdaptedLayer, update: Update) -> Iterator[RowBlock]:
    """Yield the piece of ``update`` for each of the layer's splits, without columns that are zero."""
    first = 0
    for rows in layer.splits:
        end = first + rows
        source = next((p for p in update.pieces if p.first <= first and end <= p.end), None)
        piece = (source or update.whole()).rows(first, end)
        used = piece.up.count_nonzero(dim=0) > 0
        if piece.rank > layer.rank:
            piece = replace(piece, down=piece.down[used], up=piece.up[:, used])
        yield piece
        first = end
