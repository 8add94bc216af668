"""The files of the adapter that a run trains: one every few steps, and one at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.adapter.file import DTYPES, write_adapter
from fluxtrain.adapter.metadata import Metadata, architecture
from fluxtrain.adapter.trained import trained_adapter
from fluxtrain.contract.launch import ADAPTERS_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.model.adapted_layers import BASE_MAGNITUDE, adapted_layers
from fluxtrain.model.flux import Flux
from fluxtrain.model.lora import magnitudes
from fluxtrain.optimizers.optimizer import Optimizer
from fluxtrain.parallelize import free_gathered
from fluxtrain.sharded_tensor import whole


@dataclass(frozen=True)
class AdapterFiles:
    """Writes the files of one run; nothing without adapters."""

    config: RunConfig
    output: Path
    world: World
    model: Flux
    optimizer: Optimizer

    def is_due(self, step: int) -> bool:
        """Return whether a file is written after ``step``, which is not the last one."""
        every = self.config.adapter_file.every_steps
        return self.config.adapter is not None and every > 0 and step % every == 0

    def write(self, step: int, is_last: bool) -> None:
        """Write the file of ``step``, without its number at the end; every rank must call this.

        The bytes depend on the adapter and the config only. Raises StorageError on rank 0.
        """
        config = self.config
        if config.adapter is None:
            return
        free_gathered(self.model)  # after an evaluation the model may have them as parameters
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tensors = {
            name: whole(self.optimizer.judged(parameter)) for name, parameter in named.items()
        }
        if not self.world.is_main:
            return
        for layer, norms in magnitudes(self.model).items():
            tensors[f"{layer}.{BASE_MAGNITUDE}"] = norms
        layers = adapted_layers(config.model, config.adapter)
        adapter = trained_adapter(layers, {name: each.cpu() for name, each in tensors.items()})
        file = config.adapter_file
        name = file.name if is_last else f"{file.name}-{step:06d}"
        write_adapter(
            self.output / ADAPTERS_FOLDER / f"{name}.safetensors",
            adapter,
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
    if adapter.kind == "lokr":
        arguments |= {"algo": "lokr", **adapter.lokr.model_dump()}
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
