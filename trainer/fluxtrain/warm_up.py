"""One pass of each shape before training, on synthetic data, so that no step waits for a compiler.

MLPerf's clock has not started then: its rules allow passes on synthetic data. Nothing is left of them: no
gradient, no changed weight, no random number drawn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from fluxtrain.compilation import compiles, missing_compiler
from fluxtrain.compile_cache import CompileCache
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch
from fluxtrain.distributed import World
from fluxtrain.loss import FlowLoss
from fluxtrain.model.clip import CLIP_LENGTH
from fluxtrain.progress import Alive


def is_needed(config: RunConfig, world: World) -> bool:
    """Return whether training waits for something at first: a compiler, or a GPU's libraries."""
    return world.device.type == "cuda" or compiles(config.parallel, world.device)


def prepare(
    flow_loss: FlowLoss,
    sizes: tuple[int, int | None],
    world: World,
    output: Path,
    alive: Alive = lambda: None,
) -> None:
    """Take the passes of `warm_up` with ``sizes``; use what the job in ``output`` has compiled before.

    Every rank must call it. Rank 0 prints why a model on GPUs is not compiled.
    """
    parallel, cache = flow_loss.config.parallel, None
    if compiles(parallel, world.device):
        cache = CompileCache.of(output, world.device, os.environ)
    elif parallel.compile is None and world.is_main:
        reason = missing_compiler(world.device)
        print(f"fluxtrain: blocks are not compiled: {reason}", file=sys.stderr, flush=True)
    is_cached = cache is not None and cache.load()
    warm_up(flow_loss, *sizes, world.device, alive)
    if cache is not None and not is_cached and world.node == 0:
        cache.save()


def warm_up(
    flow_loss: FlowLoss,
    training_size: int,
    evaluation_size: int | None,
    device: torch.device,
    alive: Alive = lambda: None,
) -> None:
    """Pass a training batch forward and backward, and an evaluation batch forward; every rank must call it.

    The sizes are samples of one batch; without an evaluation the second is None. ``alive`` is called after
    each pass.
    """
    model = flow_loss.model
    losses = flow_loss(synthetic_batch(flow_loss.config, training_size, device))
    alive()
    torch.autograd.backward(losses.sum())
    model.zero_grad(set_to_none=True)
    alive()
    if evaluation_size is not None:
        model.eval()
        with torch.no_grad():
            flow_loss(synthetic_batch(flow_loss.config, evaluation_size, device))
        model.train()
        alive()


def synthetic_batch(config: RunConfig, size: int, device: torch.device) -> Batch:
    """Return a batch of ``size`` samples of the run's shapes, all zero."""
    latents = torch.zeros(size, *config.latent_shape, device=device)
    per_sample = torch.zeros(size, device=device)
    model = config.model
    vec = torch.zeros(size, model.vec_in_dim, device=device)
    if config.trains_clip:
        vec = torch.zeros(size, CLIP_LENGTH, dtype=torch.int32, device=device)
    return Batch(
        mean=latents,
        logvar=latents,
        txt=torch.zeros(size, config.data.text_length, model.context_in_dim, device=device),
        vec=vec,
        latent_noise=latents,
        noise=latents,
        timesteps=per_sample,
        weights=per_sample,
        keys=per_sample.long(),
        dropped=per_sample.bool(),
        indices=per_sample.long(),
    )
