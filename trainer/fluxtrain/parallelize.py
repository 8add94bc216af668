"""Everything that is done to the model from outside: recompute activations, compile, shard, fill in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from fluxtrain.contract.run.config import ParallelConfig, PrecisionConfig, RunConfig
from fluxtrain.contract.run.encoders import Precision
from fluxtrain.contract.run.replicas import replicas
from fluxtrain.distributed import World
from fluxtrain.model.flux import Flux
from fluxtrain.model.init import initial_value

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # ROCm images with torch < 2.6 have FSDP2 at its older path
    from torch.distributed._composable.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
    )

DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(
    config: RunConfig,
    world: World,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Flux:
    """Return the model with ``weights``, divided over the ranks as ``config.parallel`` says.

    ``weights`` yields every parameter in full by its name; without them the values are random. ``alive``
    is called after each of them.
    """
    with torch.device("meta"):
        model = Flux(config.model)
    recompute_activations(model, config.parallel.activation_checkpointing)
    if config.parallel.compile:
        compile_blocks(model)
    if world.size > 1 or config.precision.compute != "float32":
        mesh = world.mesh(replicas(config, world.size))
        shard(model, mesh, config.parallel, config.precision)
    load_weights(
        model, weights or initial_weights(model, config.seed, world.device), world.device, alive
    )
    return model


def blocks(model: Flux) -> list[nn.Module]:
    """Return the double-stream, then the single-stream blocks."""
    return [*model.double_blocks, *model.single_blocks]


def recompute_activations(model: Flux, fraction: float) -> None:
    """Let ``fraction`` of the blocks, spread evenly, keep only their inputs for the backward pass."""
    for index, block in enumerate(blocks(model)):
        if int((index + 1) * fraction) > int(index * fraction):
            block.forward = _recomputing(block.forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` as a function of ours, for torch.compile starts no graph inside torch's own."""

    def recompute(*inputs: Tensor) -> Any:
        # nothing random happens inside a block
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)

    return recompute


def compile_blocks(model: Flux) -> None:
    """Compile each block by itself: equal blocks share one compiled graph."""
    for block in blocks(model):
        block.compile(fullgraph=True)


def shard(
    model: Flux, mesh: DeviceMesh, parallel: ParallelConfig, precision: PrecisionConfig
) -> None:
    """Shard each block, then the rest: gathered in the compute dtype, reduced in ``precision.reduce``.

    Inputs are not cast at the borders: timestep embedding and RoPE tables stay in float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )
    for block in blocks(model):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=parallel.reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def initial_weights(
    model: nn.Module, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial value of every parameter, one at a time.

    A value depends on the seed and the parameter's name only, so any number of ranks starts alike.
    """
    for name, parameter in model.named_parameters():
        yield name, initial_value(name, parameter.shape, seed, device)


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Give every parameter, still on the meta device, this rank's part of its value in ``weights``.

    ``alive`` is called after each of them.
    """
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in weights:
            parameter = parameters[name]
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own.copy_(_local_part(whole, parameter))
            alive()


def _local_part(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return whole[tuple(slice(o, o + s) for s, o in zip(shape, offset, strict=True))]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in full on every rank; where it is sharded, every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
