"""The losses of a training by torchtitan's FLUX code and by ours: equal weights, samples and draws.

    python -m benchmarks.training.trajectory [--steps 50]

The model is torchtitan's ``flux-debug`` with MLPerf's initial weights, optimizer and learning rate.
torchtitan runs as it would on one GPU: FSDP2 on a mesh of one rank, with the mixture rounded as MLPerf's
reference does. In float32 the losses may differ by 1e-5 of their value. In bfloat16 they may differ by less
than torchtitan's own differ from those in float32: by rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from benchmarks.peers import ROOT, peers_python
from benchmarks.table import print_table
from benchmarks.training.contender import (
    FLUX_DEBUG,
    make_batch,
    torchtitan_model,
    torchtitan_update,
)
from torch import Tensor, nn

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import Precision
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import interpolate, sample_latents, velocity
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import DTYPES, initial_weights

TOLERANCE = 1e-5
SIZE, LATENT, TEXT = 2, 16, 32
Step = Callable[[Batch], Tensor]
WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


class Arm(NamedTuple):
    """One training."""

    project: str
    compute: Precision
    rounded: bool
    """Whether latents, noise, t, mixture and target are rounded to ``compute``."""


ARMS = {
    "float32": Arm("fluxtrain", "float32", True),
    "float32 torchtitan": Arm("torchtitan", "float32", True),
    "bfloat16": Arm("fluxtrain", "bfloat16", True),
    "bfloat16, mixture in float32": Arm("fluxtrain", "bfloat16", False),
    "bfloat16 torchtitan": Arm("torchtitan", "bfloat16", True),
}


def config_of(arm: Arm) -> RunConfig:
    """Return MLPerf's configuration with the small model."""
    run = {
        "preset": "mlperf-schnell",
        "seed": 1,
        "model": FLUX_DEBUG.model_dump(),
        "flow": {"reference_rounding": arm.rounded},
        "precision": {"compute": arm.compute},
        "logging": {"mlperf": {"division": "open"}},  # the closed division has another model
    }
    return resolve(run)


def weights_of(config: RunConfig) -> dict[str, Tensor]:
    """Return the initial weights by name, float32."""
    with torch.device("meta"):
        model = Flux(config.model)
    return dict(initial_weights(model, config.seed, WORLD.device))


def fluxtrain(arm: Arm) -> Step:
    """Return the step of this project's train.py on one rank."""
    from fluxtrain import optim
    from fluxtrain.model.loss import FlowLoss
    from fluxtrain.parallel.parallelize import build_model

    config = config_of(arm)
    model = build_model(config, WORLD)
    compute = DTYPES[arm.compute]
    flow_loss = FlowLoss(model, config, compute)
    optimizer = optim.make_optimizer(model, config.optim, compute)
    never = torch.tensor(optim.NEVER)

    def step(batch: Batch) -> Tensor:
        losses = flow_loss(batch)
        torch.autograd.backward(losses.sum() / len(batch))
        norm = optimizer.gradient_norm()
        optim.update(optimizer, norm, config.optim.max_grad_norm, never)
        optimizer.zero_grad(set_to_none=True)
        return losses.detach().mean()

    return step


def torchtitan(arm: Arm) -> Step:
    """Return the step of torchtitan's flux trainer, with samples and draws of ``batch``."""
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.models.flux.parallelize import apply_fsdp

    config, compute = config_of(arm), DTYPES[arm.compute]
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = torchtitan_model(weights_of(config))
    _set_qk_norm_eps(model, config.model.qk_norm_eps)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, param_dtype=compute, reduce_dtype=torch.float32)
    hyper = config.optim
    adamw = default_adamw(
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.epsilon,
        weight_decay=hyper.weight_decay,
    )
    update = torchtitan_update(model, adamw.build(model_parts=[model]), hyper.max_grad_norm)
    shift, scale = config.encoders.latent_shift, config.encoders.latent_scale

    def step(batch: Batch) -> Tensor:
        rounded = {name: tensor.to(compute) for name, tensor in batch.device_tensors().items()}
        batch = replace(batch, **rounded)
        with torch.no_grad():
            clean = sample_latents(batch.mean, batch.logvar, batch.latent_noise, shift, scale)
            noisy = interpolate(clean, batch.noise, batch.timesteps)
        return update(batch, noisy, velocity(clean, batch.noise))

    return step


def _set_qk_norm_eps(model: nn.Module, eps: float) -> None:
    for name, module in model.named_modules():
        if name.endswith(("query_norm", "key_norm")):
            module.eps = eps


STEPS: dict[str, Callable[[Arm], Step]] = {"fluxtrain": fluxtrain, "torchtitan": torchtitan}


def losses_of(name: str, steps: int) -> Iterator[float]:
    """Yield the loss of each step of arm ``name``; each step has samples of its own."""
    arm = ARMS[name]
    step = STEPS[arm.project](arm)
    for index in range(steps):
        yield step(make_batch(SIZE, LATENT, TEXT, seed=index)).item()


def run(name: str, steps: int) -> list[float]:
    """Return the losses of arm ``name``, which is a process of its own."""
    python = sys.executable if ARMS[name].project == "fluxtrain" else str(peers_python())
    command = [python, "-W", "ignore", "-m", "benchmarks.training.trajectory", "--arm", name]
    command += ["--steps", str(steps)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        losses = list[float]()
        for line in process.stdout:
            losses.append(json.loads(line))
            if len(losses) % 10 == 0:
                print(f"{name}: step {len(losses)} of {steps}, {losses[-1]:.6f}", flush=True)
    if process.returncode or len(losses) != steps:
        sys.exit(f"{name} ended early; its messages are above")
    return losses


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two losses, relative to the other."""
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Print the differences; return 1 if one is larger than it may be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args(arguments)
    if options.arm:
        output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # stdout is for the losses only
        for loss in losses_of(options.arm, options.steps):
            print(json.dumps(loss), file=output, flush=True)
        return 0
    losses = {name: run(name, options.steps) for name in ARMS}
    exact = largest(losses["float32"], losses["float32 torchtitan"])
    ours = largest(losses["bfloat16"], losses["bfloat16 torchtitan"])
    unrounded = largest(losses["bfloat16, mixture in float32"], losses["bfloat16 torchtitan"])
    rounding = largest(losses["bfloat16 torchtitan"], losses["float32 torchtitan"])
    rows = [
        ["float32", f"{exact:.1e}", f"{TOLERANCE:.0e}"],
        ["bfloat16, rounded as the reference does", f"{ours:.1e}", f"{rounding:.1e}"],
        ["bfloat16, mixture in float32", f"{unrounded:.1e}", ""],
    ]
    first, *_, last = losses["float32"]
    title = f"{options.steps} steps, loss {first:.4f} to {last:.4f}: largest relative difference to"
    print_table(title, ["", "torchtitan", "may be"], rows)
    return int(exact > TOLERANCE or ours > rounding)


if __name__ == "__main__":
    sys.exit(main())
