"""The training steps that are compared: the same weights and the same batch in each project's code.

A process of ``benchmarks.training.step``: for each line of stdin it takes that number of steps, and writes a
line of JSON.
Axes: b batch, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from benchmarks.adapters.peft_adapters import add_peft_adapters
from benchmarks.empty_package import empty_package
from benchmarks.reference_model import random_model, reference_of
from benchmarks.training.torchtitan_names import to_torchtitan
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)  # noqa: N812  (the usual name)

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import AdaptedLayer, adapted_layers
from fluxtrain.model.lora import add_adapters, is_adapter
from fluxtrain.model.loss import sample_latents

Step = tuple[Callable[[], Tensor], nn.Module]
"""A function that takes one optimizer step and returns the loss before it, and its model."""

FLUX_DEBUG = ModelConfig(hidden_size=1536, num_heads=12, depth=2, depth_single_blocks=2)
"""torchtitan 0.3.0's ``flux-debug``: 258,286,144 parameters."""


@dataclass(frozen=True)
class Task:
    """The input of every contender."""

    config: RunConfig
    batch: Batch
    compiled: bool
    rank: int = 0
    """Of the LoRA; 0: all weights are trained."""

    @property
    def clean(self) -> Tensor:
        """Return the sampled latents."""
        batch, encoders = self.batch, self.config.encoders
        return sample_latents(
            batch.mean,
            batch.logvar,
            batch.latent_noise,
            encoders.latent_shift,
            encoders.latent_scale,
        )


def make_batch(size: int, latent: int, text: int, seed: int = 0) -> Batch:
    """Return ``size`` random samples with latents ``latent`` wide and ``text`` text tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((size, *shape), dtype=np.float32))

    return Batch(
        mean=normal(16, latent, latent),
        logvar=normal(16, latent, latent) - 4,
        txt=normal(text, FLUX_DEBUG.context_in_dim) / 4,
        vec=normal(FLUX_DEBUG.vec_in_dim),
        latent_noise=normal(16, latent, latent),
        noise=normal(16, latent, latent),
        timesteps=torch.linspace(0.1, 0.9, size),
        weights=torch.ones(size),
        keys=torch.zeros(size, dtype=torch.int64),
        dropped=torch.zeros(size, dtype=torch.bool),
        indices=torch.arange(size),
    )


def make_task(size: int, latent: int, text: int, compiled: bool, rank: int = 0) -> Task:
    """Return the task of ``size`` samples with latents ``latent`` wide and ``text`` text tokens."""
    batch = make_batch(size, latent, text)
    run = {
        "preset": "mlperf-schnell",
        "model": FLUX_DEBUG.model_dump(),
        # the weights are random: larger rates diverge
        "optim": {"learning_rate": 1e-5},
        "precision": {"compute": "float32"},
        "logging": {"mlperf": {"division": "open"}},  # the closed division has another model
    }
    return Task(resolve(run), batch, compiled, rank)


def adapted(task: Task) -> tuple[Flux, list[AdaptedLayer]]:
    """Return our random model and the layers of its random adapters, split, if the task has some."""
    model = random_model(FLUX_DEBUG)
    if not task.rank:
        return model, []
    layers = adapted_layers(FLUX_DEBUG, AdapterConfig(rank=task.rank, split_qkv=True))
    add_adapters(model, layers, torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.02, generator=generator)
    return model, layers


def fluxtrain(task: Task) -> Step:
    """Return the step of this project's train.py."""
    from fluxtrain import optim
    from fluxtrain.model.loss import FlowLoss
    from fluxtrain.parallel.compile import compile_blocks

    model, _ = adapted(task)
    if task.compiled:
        compile_blocks(model)
    flow_loss = FlowLoss(model, task.config, torch.float32)
    optimizer = optim.make_optimizer(model, task.config.optim)

    def step() -> Tensor:
        losses = flow_loss(task.batch) * task.batch.weights
        torch.autograd.backward(losses.sum() / len(task.batch))
        norm = optimizer.gradient_norm()
        optim.update(optimizer, norm, task.config.optim.max_grad_norm, torch.tensor(optim.NEVER))
        optimizer.zero_grad(set_to_none=True)
        return losses.detach().mean()

    return step, model


def torchtitan(task: Task, recompute: bool = False) -> Step:
    """Return the step of torchtitan's flux trainer, without its encoders.

    Without ``fully_shard`` too, which would only cost time on a single rank. With ``recompute`` its blocks
    are recomputed in the backward pass, as in all its flux configs.
    """
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig
    from torchtitan.models.flux.parallelize import apply_ac, apply_compile

    model = torchtitan_model(random_model(FLUX_DEBUG).state_dict())
    if recompute:
        apply_ac(model)
    if task.compiled:
        apply_compile(model, CompileConfig(enable=True))
    hyper = task.config.optim
    optimizer = default_adamw(lr=hyper.learning_rate).build(model_parts=[model])
    update = torchtitan_update(model, optimizer, hyper.max_grad_norm, task.compiled)
    labels, noise, times = task.clean, task.batch.noise, task.batch.timesteps

    def step() -> Tensor:
        with torch.no_grad():
            sigmas = times.view(-1, 1, 1, 1)
            noisy = (1 - sigmas) * labels + sigmas * noise
        return update(task.batch, noisy, noise - labels)

    return step, model


def torchtitan_model(weights: Mapping[str, Tensor]) -> nn.Module:
    """Return torchtitan's ``flux-debug`` with our ``weights``."""
    from torchtitan.models.flux import flux_configs

    with torch.device("meta"):
        model: nn.Module = flux_configs["flux-debug"]().build()
    model.load_state_dict(to_torchtitan(weights), assign=True)
    return model


def torchtitan_update(
    model: nn.Module, optimizer: Any, max_norm: float, compiled: bool = False
) -> Callable[[Batch, Tensor, Tensor], Tensor]:
    """Return what torchtitan's flux trainer does with a batch, noisy latents and their target: its loss."""
    from torchtitan.components.loss import MSELoss
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.flux.utils import create_position_encoding_for_latents, pack_latents

    mse = MSELoss(MSELoss.Config(), compile_config=CompileConfig(enable=compiled))

    def update(batch: Batch, noisy: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            ids = create_position_encoding_for_latents(*noisy.shape[:1], *noisy.shape[2:])
            txt_ids = torch.zeros(len(noisy), batch.txt.shape[1], 3)
            packed, target = pack_latents(noisy), pack_latents(target)
        prediction = model(
            img=packed,
            img_ids=ids,
            txt=batch.txt,
            txt_ids=txt_ids,
            y=batch.vec,
            timesteps=batch.timesteps,
        )
        loss: Tensor = mse(prediction, target, torch.tensor(float(target.numel())))[0]
        torch.autograd.backward(loss)
        clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)
        optimizer.step()
        return loss.detach()

    return update


def torchtitan_recomputing(task: Task) -> Step:
    """Return torchtitan's step with full recomputation, as in its configs."""
    return torchtitan(task, recompute=True)


def diffusers(task: Task) -> Step:
    """Return the step with diffusers' model."""
    return plain_loop(task, FluxTransformer2DModel)


def simpletuner(task: Task) -> Step:
    """Return the step with SimpleTuner's model, imported without the rest of its trainer."""
    folder = Path(sysconfig.get_path("purelib"))
    for name in ("simpletuner", "simpletuner.helpers.models", "simpletuner.helpers.models.flux"):
        sys.modules[name] = empty_package(name, folder)
    module = import_module("simpletuner.helpers.models.flux.transformer")
    return plain_loop(task, module.FluxTransformer2DModel)


def plain_loop(task: Task, kind: Callable[..., FluxTransformer2DModel]) -> Step:
    """Return the step of diffusers' training scripts with a model of this ``kind``, and peft's adapters."""
    from diffusers import FluxPipeline

    ours, layers = adapted(task)
    base = {name: value for name, value in ours.state_dict().items() if not is_adapter(name)}
    model = reference_of(base, FLUX_DEBUG, kind)
    if layers:
        add_peft_adapters(model, ours, layers)
    model.train()
    if task.compiled:
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.compile(fullgraph=kind is FluxTransformer2DModel)
    hyper = task.config.optim
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.epsilon,
        weight_decay=hyper.weight_decay,
    )
    clean, noise, times = task.clean, task.batch.noise, task.batch.timesteps
    size, channels, height, width = clean.shape

    def step() -> Tensor:
        sigmas = times.view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * clean + sigmas * noise
        (prediction,) = model(
            hidden_states=FluxPipeline._pack_latents(noisy, size, channels, height, width),
            encoder_hidden_states=task.batch.txt,
            pooled_projections=task.batch.vec,
            timestep=times,
            img_ids=FluxPipeline._prepare_latent_image_ids(
                size, height // 2, width // 2, noisy.device, noisy.dtype
            ),
            txt_ids=torch.zeros(task.batch.txt.shape[1], 3),
            return_dict=False,
        )
        prediction = FluxPipeline._unpack_latents(prediction, 8 * height, 8 * width, 8)
        loss = F.mse_loss(prediction, noise - clean)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trained, hyper.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model


CONTENDERS: dict[str, Callable[[Task], Step]] = {
    "fluxtrain": fluxtrain,
    "torchtitan": torchtitan,
    "torchtitan-as-shipped": torchtitan_recomputing,
    "diffusers": diffusers,
    "simpletuner": simpletuner,
}


def main() -> None:
    """Take as many steps as each line of stdin says; write their times and losses."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for the results only
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    for name in ("batch", "latent", "text"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    task = make_task(options.batch, options.latent, options.text, options.compiled, options.rank)
    step, _ = CONTENDERS[options.contender](task)
    for line in sys.stdin:
        results = []
        for _ in range(int(line)):
            begin, cpu_begin = perf_counter(), process_time()
            loss = step().item()
            results.append((perf_counter() - begin, process_time() - cpu_begin, loss))
        print(json.dumps(results), file=output, flush=True)


if __name__ == "__main__":
    main()
