"""Peak memory of one rank in an optimizer step with FSDP2 or HSDP."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.encode.sizes import encoder_bytes
from fluxtrain.model.offloaded_blocks import buffer_sizes, host_sizes
from fluxtrain.plan.batch import copied_bytes, samples_ahead
from fluxtrain.plan.passes import Passes
from fluxtrain.snapshot_size import moments_bytes


class Memory(BaseModel):
    """Memory of one GPU at the peak of a step, in bytes: what exists at that moment."""

    model_config = ConfigDict(frozen=True)

    weights: int
    """This rank's shard of the weights, in ``precision.weights``; a single rank has those of float32 in the
    compute dtype too."""
    gradients: int
    """This rank's shard of the gradients that are reduced already, in ``precision.weights``."""
    optimizer: int
    """This rank's shard of the optimizer's state, float32 or, of ``adamw_8bit``, mostly of 8 bits."""
    gathered: int
    """Weights of gathered blocks, in the compute dtype, and gradients that are being reduced."""
    activations: int
    """Saved activations of one micro batch, and the gradients that a block computes from them; what a step
    of weights in bfloat16 computes in float32."""
    encoders: int
    """Frozen text encoders and autoencoder, if images are encoded during training."""
    copied_ahead: int
    """The next micro batch, and the first batch of an evaluation, which a GPU copies while it computes."""
    offload_buffers: int
    """Frozen weights of blocks that are in host memory: of the one that computes, and of the next."""
    total: int
    """Sum of the above."""


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of one parameter in a checkpoint: its weight, and the optimizer's state."""
    return round(config.precision.weight_bytes + config.optim.state_bytes)


def _optimizer_values(config: RunConfig, passes: Passes) -> int:
    """Return the numbers of a parameter besides those that gradients are computed with and AdamW's weight.

    A schedule-free optimizer has a weight of its own where others have the parameter itself.
    """
    averages = config.optim.name == "schedule_free_adamw" and not passes.is_rounded
    return config.optim.state_values + averages


def memory(
    config: RunConfig,
    sharding: Sharding,
    micro_batch: int,
    accumulates: bool,
    *,
    copies_ahead: bool = True,
) -> Memory:
    """Return the peak memory of one rank at micro batches of ``micro_batch`` samples.

    With ``accumulates`` a step has several of them: all gradients exist when the later ones begin. Only GPUs
    copy batches ahead.
    """
    passes = Passes(config, sharding, micro_batch, accumulates)
    peak = max(passes.moments(), key=lambda moment: moment.total)
    parts = {
        "weights": passes.weight_bytes,
        "gradients": peak.gradients,
        "optimizer": _optimizer_values(config, passes) * passes.state_bytes
        + (moments_bytes(config, sharding.dp_shard) if config.optim.name == "adamw_8bit" else 0),
        "gathered": peak.gathered,
        "activations": peak.activations,
        "encoders": encoder_bytes(config),
        "copied_ahead": copies_ahead * samples_ahead(config, micro_batch) * copied_bytes(config),
        "offload_buffers": sum(buffer_sizes(host_sizes(config))),
    }
    return Memory(**parts, total=sum(parts.values()))
