"""One training step's contenders: the same weights and the same batch, each in its own code.

Run by ``benchmarks.step`` as a process of its own: it prepares, then takes the steps that each line
on its standard input asks for, and answers with a line of JSON.
Axes: b batch, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import torch
from tests.trainer.model.test_model import random_model, reference
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name everybody gives it)

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.batch import Batch
from fluxtrain.flow import sample_latents

Step = tuple[Callable[[], Tensor], nn.Module]
"""Takes one optimizer step and returns the loss before it; and the model that it trains."""

FLUX_DEBUG = ModelConfig(hidden_size=1536, num_heads=12, depth=2, depth_single_blocks=2)
"""torchtitan 0.3.0's ``flux-debug``: 258,286,144 parameters."""


@dataclass(frozen=True)
class Task:
    """What every contender is given."""

    config: RunConfig
    batch: Batch
    compiled: bool

    @property
    def clean(self) -> Tensor:
        """Return the latents that the autoencoder's distribution and the draw amount to."""
        given, encoders = self.batch, self.config.encoders
        return sample_latents(
            given.mean,
            given.logvar,
            given.latent_noise,
            encoders.latent_shift,
            encoders.latent_scale,
        )


def task(size: int, latent: int, text: int, compiled: bool) -> Task:
    """Return the task of ``size`` samples, latents ``latent`` wide, ``text`` text tokens; always equal."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((size, *shape), dtype=np.float32))

    batch = Batch(
        mean=normal(16, latent, latent),
        logvar=normal(16, latent, latent) - 4,
        txt=normal(text, FLUX_DEBUG.context_in_dim) / 4,
        vec=normal(FLUX_DEBUG.vec_in_dim),
        latent_noise=normal(16, latent, latent),
        noise=normal(16, latent, latent),
        timesteps=torch.linspace(0.1, 0.9, size),
        weights=torch.ones(size),
        dropped=torch.zeros(size, dtype=torch.bool),
        indices=torch.arange(size),
    )
    run = {
        "preset": "mlperf-schnell",
        "model": FLUX_DEBUG.model_dump(),
        "optim": {
            "learning_rate": 1e-5
        },  # the weights are random, not trained: larger ones blow up
        "precision": {"compute": "float32"},
        "logging": {"mlperf": {"division": "open"}},  # the closed one has another model
    }
    return Task(resolve(run), batch, compiled)


def fluxtrain(given: Task) -> Step:
    """Return the step of this project's train.py, its pieces in its order."""
    from fluxtrain import optim
    from fluxtrain.loss import FlowLoss
    from fluxtrain.parallelize import compile_blocks

    model = random_model(FLUX_DEBUG)
    if given.compiled:
        compile_blocks(model)
    flow_loss = FlowLoss(model, given.config, torch.float32)
    optimizer = optim.make_optimizer(model, given.config.optim)

    def step() -> Tensor:
        losses = flow_loss(given.batch) * given.batch.weights
        torch.autograd.backward(losses.sum() / len(given.batch))
        optim.clip_gradients(model.parameters(), given.config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses.detach().mean()

    return step, model


def torchtitan(given: Task, recompute: bool = False) -> Step:
    """Return the step of torchtitan's flux trainer, without the encoders that it runs in every step.

    Without its ``fully_shard`` too, which would only cost it time on a single rank. With ``recompute``
    its blocks are recomputed in the backward pass, as all its flux configs have it.
    """
    from torchtitan.components.loss import MSELoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.flux import flux_configs
    from torchtitan.models.flux.parallelize import apply_ac, apply_compile
    from torchtitan.models.flux.utils import create_position_encoding_for_latents, pack_latents

    weights = {  # the names are BFL's, but for those of the norms
        name.removesuffix("scale") + "weight" if name.endswith("_norm.scale") else name: weight
        for name, weight in random_model(FLUX_DEBUG).state_dict().items()
    }
    with torch.device("meta"):
        model: nn.Module = flux_configs["flux-debug"]().build()
    model.load_state_dict(weights, assign=True)
    compiling = CompileConfig(enable=given.compiled)
    if recompute:
        apply_ac(model)
    if given.compiled:
        apply_compile(model, compiling)
    mse = MSELoss(MSELoss.Config(), compile_config=compiling)
    hyper = given.config.optim
    optimizer = default_adamw(lr=hyper.learning_rate).build(model_parts=[model])
    labels, noise, times = given.clean, given.batch.noise, given.batch.timesteps

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            sigmas = times.view(-1, 1, 1, 1)
            noisy = (1 - sigmas) * labels + sigmas * noise
            ids = create_position_encoding_for_latents(*noisy.shape[:1], *noisy.shape[2:])
            txt_ids = torch.zeros(len(noisy), given.batch.txt.shape[1], 3)
            packed, target = pack_latents(noisy), pack_latents(noise - labels)
        prediction = model(
            img=packed,
            img_ids=ids,
            txt=given.batch.txt,
            txt_ids=txt_ids,
            y=given.batch.vec,
            timesteps=times,
        )
        loss: Tensor = mse(prediction, target, torch.tensor(float(labels.numel())))[0]
        torch.autograd.backward(loss)
        clip_grad_norm_(list(model.parameters()), hyper.max_grad_norm, foreach=True)
        optimizer.step()
        return loss.detach()

    return step, model


def torchtitan_recomputing(given: Task) -> Step:
    """Return torchtitan's step with the full recomputation that its configs ask for."""
    return torchtitan(given, recompute=True)


def diffusers(given: Task) -> Step:
    """Return the step of a plain loop around diffusers' model, as its training scripts write it."""
    from diffusers import FluxPipeline

    model = reference(random_model(FLUX_DEBUG), FLUX_DEBUG)
    model.train()
    if given.compiled:
        model.compile_repeated_blocks(fullgraph=True)
    hyper = given.config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.epsilon,
        weight_decay=hyper.weight_decay,
    )
    clean, noise, times = given.clean, given.batch.noise, given.batch.timesteps
    size, channels, height, width = clean.shape

    def step() -> Tensor:
        sigmas = times.view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * clean + sigmas * noise
        (prediction,) = model(
            hidden_states=FluxPipeline._pack_latents(noisy, size, channels, height, width),
            encoder_hidden_states=given.batch.txt,
            pooled_projections=given.batch.vec,
            timestep=times,
            img_ids=FluxPipeline._prepare_latent_image_ids(
                size, height // 2, width // 2, noisy.device, noisy.dtype
            ),
            txt_ids=torch.zeros(given.batch.txt.shape[1], 3),
            return_dict=False,
        )
        prediction = FluxPipeline._unpack_latents(prediction, 8 * height, 8 * width, 8)
        loss = F.mse_loss(prediction, noise - clean)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), hyper.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model


CONTENDERS: dict[str, Callable[[Task], Step]] = {
    "fluxtrain": fluxtrain,
    "torchtitan": torchtitan,
    "torchtitan-as-shipped": torchtitan_recomputing,
    "diffusers": diffusers,
}


def main() -> None:
    """Take the steps that standard input asks for, one line each time, and answer each line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints must not stand between the answers
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    for name in ("batch", "latent", "text"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    given = task(options.batch, options.latent, options.text, options.compiled)
    step, _ = CONTENDERS[options.contender](given)
    for line in sys.stdin:
        answer = []
        for _ in range(int(line)):
            begin, cpu_begin = perf_counter(), process_time()
            loss = step().item()
            answer.append((perf_counter() - begin, process_time() - cpu_begin, loss))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
