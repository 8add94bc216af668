"""The host's time of an optimizer step with as many tensors as FLUX.1 has, all of them tiny.

Compared are the ways to clip and update: torch's on the DTensors of FSDP2, ours on their local parts, and
both on tensors that are not sharded. They take turns in one process, a gloo group of one rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from benchmarks.table import print_table, spread
from torch import nn
from torch.distributed.tensor import DTensor

from fluxtrain import optim
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.flux import Flux
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import shard

NARROW = {
    "hidden_size": 16,
    "num_heads": 1,
    "axes_dim": (4, 6, 6),
    "in_channels": 4,
    "vec_in_dim": 4,
    "context_in_dim": 4,
}
"""FLUX.1's 19 and 38 blocks, made as narrow as they can be."""
MAX_NORM = 1.0
Update = Callable[[], None]


def model_of(config: RunConfig, world: World, sharded: bool) -> Flux:
    """Return the narrow model with a gradient for each parameter."""
    torch.manual_seed(0)
    model = Flux(config.model)
    if sharded:
        shard(model, world.mesh(1), config.parallel, config.precision)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def torchs(config: RunConfig, model: Flux) -> Update:
    """Return torch's clipping and fused AdamW, as this project called them before."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
        vars(optimizer)["found_inf"] = (~total.isfinite()).float()
        optimizer.step()

    return update


def ours(config: RunConfig, model: Flux) -> Update:
    """Return this project's."""
    optimizer = optim.make_optimizer(model, config.optim)
    never = torch.tensor(optim.NEVER)

    def update() -> None:
        norm = optimizer.gradient_norm()
        optim.update(optimizer, norm, MAX_NORM, optim.first_bad_step(never, norm, 1))

    return update


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.training.optimizer", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=30, help="turns of each, of which 5 are dropped"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = resolve(
        {
            "preset": "mlperf-schnell",
            "seed": 1,
            "model": NARROW,
            "precision": {"compute": "float32"},
            "logging": {"mlperf": {"division": "open"}},
        }
    )
    with process_group() as world:
        updates = {
            f"{name}, {kind}": update(config, model_of(config, world, sharded))
            for kind, sharded in (("FSDP2", True), ("not sharded", False))
            for name, update in (("torch", torchs), ("fluxtrain", ours))
        }
        seconds: dict[str, list[float]] = {name: [] for name in updates}
        for _ in range(options.rounds):
            for name, update in updates.items():
                begin = perf_counter()
                update()
                seconds[name].append(perf_counter() - begin)
    count = len(list(Flux(config.model).parameters()))
    least = median(seconds["fluxtrain, FSDP2"][5:])
    rows = [
        [name, spread(values[5:], 1000, 1), f"{median(values[5:]) / least:.2f}"]
        for name, values in seconds.items()
    ]
    title = f"clipping and AdamW, {count} tensors, {options.rounds - 5} turns"
    print_table(title, ["", "ms of the host", "x ours"], rows)


if __name__ == "__main__":
    main()
