"""The files of the adapter that a run trains: one every few steps, and one at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.adapter.file import DTYPES, architecture, write_adapter
from fluxtrain.adapter.reading import Metadata
from fluxtrain.adapter.updates import (
    Adapter,
    AnyUpdate,
    Hadamard,
    Magnitude,
    Product,
    RowBlock,
    Update,
)
from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import ADAPTERS_FOLDER, CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import DataError
from fluxtrain.model.layers import BASE_MAGNITUDE, MAGNITUDE, AdaptedLayer, adapted_layers
from fluxtrain.parallel.distributed import World
from fluxtrain.state.run_state import DONE, kind_of_result, latest, read_config
from fluxtrain.state.verification import require_whole_weights


def write_file(
    output: Path, config: RunConfig, tensors: Mapping[str, Tensor], step: int, is_last: bool
) -> None:
    """Write the adapter of ``step``, with the trained ``tensors`` by name; the last one has no number.

    The bytes depend on the adapter and the config only. Raises StorageError.
    """
    assert config.adapter is not None
    layers, file = adapted_layers(config.model, config.adapter), config.adapter_file
    name = file.name if is_last else f"{file.name}-{step:06d}"
    write_adapter(
        output / ADAPTERS_FOLDER / f"{name}.safetensors",
        trained_adapter(layers, {name: each.cpu() for name, each in tensors.items()}),
        file.layout,
        DTYPES[file.dtype],
        run_metadata(config, step),
    )


def run_metadata(config: RunConfig, step: int) -> Metadata:
    """Return kohya's and ModelSpec's entries on the training of ``config`` until ``step``."""
    adapter, schedule, side = config.adapter, config.schedule, config.data.image_size
    assert adapter is not None
    arguments = {
        "split_qkv": adapter.split_qkv,
        "train_double_block_indices": adapter.double_blocks,
        "train_single_block_indices": adapter.single_blocks,
        **{f"{kind}_dim": rank for kind, rank in adapter.ranks if rank is not None},
    }
    if adapter.kind != "lora":
        arguments |= {"algo": adapter.kind}
    if adapter.kind == "lokr":
        arguments |= adapter.lokr.model_dump()
    rates = {"ss_learning_rate": config.optim.learning_rate}
    rates["ss_unet_lr"] = config.optim.learning_rate
    if adapter.clip is not None:
        arguments |= {"clip_dim": adapter.clip.rank, "clip_alpha": adapter.clip.alpha}
        rates["ss_text_encoder_lr"] = config.optim.learning_rate * adapter.clip.rate
    if adapter.dora:
        arguments |= {"use_dora": True}
    return {
        **architecture(config.model.guidance_embed),
        "modelspec.title": config.adapter_file.name,
        "modelspec.resolution": f"{side}x{side}",
        "ss_output_name": config.adapter_file.name,
        "ss_network_dim": str(adapter.rank),
        "ss_network_alpha": str(adapter.alpha),
        "ss_network_args": json.dumps({key: str(value) for key, value in arguments.items()}),
        "ss_steps": str(step),
        "ss_max_train_steps": str(schedule.steps),
        "ss_total_batch_size": str(schedule.global_batch_size),
        **{name: str(rate) for name, rate in rates.items()},
        "ss_optimizer": config.optim.name,
        "ss_lr_scheduler": schedule.decay,
        "ss_lr_warmup_steps": str(schedule.warmup_steps),
        "ss_max_grad_norm": str(config.optim.max_grad_norm),
        "ss_mixed_precision": {"bfloat16": "bf16", "float32": "no"}[config.precision.compute],
        "ss_seed": str(config.drawn_seed),
        "ss_timestep_sampling": config.flow.timestep_sampling,
        "ss_guidance_scale": str(config.training_guidance),
        "ss_weighting_scheme": config.flow.loss_weighting,
        "ss_noise_offset": str(config.flow.noise_offset),
        "ss_sd_model_name": Path(config.initial_weights or "").name,
    }


def trained_adapter(layers: Sequence[AdaptedLayer], tensors: Mapping[str, Tensor]) -> Adapter:
    """Return the adapter of ``layers`` whose parameters are ``tensors`` by name.

    DoRA's magnitudes are known if ``tensors`` has ``base_magnitude`` of the layers too; else their changes.
    """
    return {layer.name: _update(layer, tensors) for layer in layers}


def _update(layer: AdaptedLayer, tensors: Mapping[str, Tensor]) -> AnyUpdate:
    if layer.kronecker is not None:
        own = {name: tensors[f"{layer.name}.{name}"] for name in layer.shapes}
        return Product(own, layer.scale)
    if layer.is_loha:
        return Hadamard({n: tensors[f"{layer.name}.{n}"] for n in layer.shapes}, layer.scale)
    down, up = (tensors[f"{layer.name}.{name}"] for name in ("lora_A", "lora_B"))
    norms = _magnitude(layer, tensors)
    pieces, first = [], 0
    for rows, each in zip(layer.splits, down.chunk(len(layer.splits)), strict=True):
        end = first + rows
        of_rows = None if norms is None else norms.rows(first, end)
        pieces.append(RowBlock(first, each, up[first:end], layer.scale, of_rows))
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
    from fluxtrain.state.checkpoint import load  # a second of imports

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
