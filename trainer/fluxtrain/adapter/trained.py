"""The adapter that a run trains, from its model or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.adapter.product import Product
from fluxtrain.adapter.update import Magnitude, Piece, Update
from fluxtrain.adapter.updates import Adapter, AnyUpdate
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.validation import validate
from fluxtrain.distributed import World
from fluxtrain.errors import DataError
from fluxtrain.model.adapted_layers import BASE_MAGNITUDE, MAGNITUDE, AdaptedLayer, adapted_layers
from fluxtrain.run_state import DONE, kind_of_result, latest, read_config
from fluxtrain.verification import require_whole_weights


def trained_adapter(layers: Sequence[AdaptedLayer], tensors: Mapping[str, Tensor]) -> Adapter:
    """Return the adapter of ``layers`` whose parameters are ``tensors`` by name.

    DoRA's magnitudes are known if ``tensors`` has ``base_magnitude`` of the layers too; else their changes.
    """
    return {layer.name: _update(layer, tensors) for layer in layers}


def _update(layer: AdaptedLayer, tensors: Mapping[str, Tensor]) -> AnyUpdate:
    if layer.kronecker is not None:
        own = {name: tensors[f"{layer.name}.{name}"] for name in layer.shapes}
        return Product(own, layer.scale)
    down, up = (tensors[f"{layer.name}.{name}"] for name in ("lora_A", "lora_B"))
    norms = _magnitude(layer, tensors)
    pieces, first = [], 0
    for rows, each in zip(layer.splits, down.chunk(len(layer.splits)), strict=True):
        end = first + rows
        of_rows = None if norms is None else norms.rows(first, end)
        pieces.append(Piece(first, each, up[first:end], layer.scale, of_rows))
        first = end
    return Update(layer.outputs, tuple(pieces))


def _magnitude(layer: AdaptedLayer, tensors: Mapping[str, Tensor]) -> Magnitude | None:
    if not layer.is_dora:
        return None
    change, base = (tensors.get(f"{layer.name}.{name}") for name in (MAGNITUDE, BASE_MAGNITUDE))
    assert change is not None
    return Magnitude(change, True) if base is None else Magnitude(base + change)


def read_checkpoint(path: Path) -> tuple[Adapter, RunConfig]:
    """Return the adapter and the config of a checkpoint, or the newest one of a run; they are verified.

    The adapter is the average of the trained ones if the run keeps it. Raises DataError if there is none, or
    if it is of a model's weights.
    """
    from fluxtrain.checkpoint import load  # a second of imports

    checkpoint = latest(path / CHECKPOINTS_FOLDER) or path
    if not (checkpoint / DONE).exists():
        advice = "name a LoRA file, or a run or checkpoint with adapters"
        raise DataError(f"{path}: no complete checkpoint is here; {advice}")
    values = read_config(checkpoint)
    config = validate(RunConfig, values, f"{checkpoint}/config.json")
    if config.adapter is None:
        raise DataError(f"{checkpoint}: it has a model's weights, and no adapter")
    require_whole_weights(checkpoint, World.alone(), lambda: None)
    layers = adapted_layers(config.model, config.adapter)
    prefix = f"{kind_of_result(values)}."
    state = {
        f"{prefix}{layer.name}.{name}": torch.empty(shape)
        for layer in layers
        for name, shape in layer.shapes.items()
    }
    load(checkpoint, state)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return trained_adapter(layers, tensors), config
