"""Predictions of our transformer and diffusers' on the same batch, and how far apart they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from tests.trainer.tiny_model import save_flux
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux, image_ids, text_ids
from fluxtrain.weights import open_weights, write_weights

SCHEDULERS: dict[str, dict[str, Any]] = {
    "none": {"shift": 1.0},
    "dev": {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0},
}
_ENCODERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def pipeline_of(kind: Any, flux: Flux, folder: Path, shift: str, vae: Any = None) -> Any:
    """Return diffusers' pipeline of ``kind`` with the weights of ``flux``, by way of files in ``folder``."""
    written = folder / "transformer"
    write_weights(open_weights(save_flux(flux, folder)), written, "diffusers", torch.float32)
    pipeline = kind(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULERS[shift]),
        transformer=FluxTransformer2DModel.from_pretrained(written),
        vae=vae,
        **dict.fromkeys(_ENCODERS),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def inputs(
    config: ModelConfig, rows: int = 4, columns: int = 6, text: int = 7
) -> dict[str, Tensor]:
    """Return a random batch of two images."""
    torch.manual_seed(1)
    batch = {
        "img": torch.randn(2, rows * columns, config.in_channels),
        "img_ids": image_ids(2 * rows, 2 * columns),
        "txt": torch.randn(2, text, config.context_in_dim),
        "txt_ids": text_ids(text),
        "timesteps": torch.rand(2),
        "y": torch.randn(2, config.vec_in_dim),
    }
    return batch | ({"guidance": 4 * torch.rand(2)} if config.guidance_embed else {})


def run_reference(other: FluxTransformer2DModel, batch: dict[str, Tensor]) -> Tensor:
    """Return diffusers' prediction."""
    (prediction,) = other(
        hidden_states=batch["img"],
        encoder_hidden_states=batch["txt"],
        pooled_projections=batch["y"],
        timestep=batch["timesteps"],
        img_ids=batch["img_ids"],
        txt_ids=batch["txt_ids"],
        guidance=batch.get("guidance"),
        return_dict=False,
    )
    return prediction


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference over that of ``theirs``."""
    norm = theirs.norm().item()
    difference = (ours - theirs).norm().item()
    return difference / norm if norm else difference
