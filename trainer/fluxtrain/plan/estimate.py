"""From a config and a number of GPUs to memory, FLOPs, traffic, time and disk."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.order import BatchShares
from fluxtrain.errors import ConfigError
from fluxtrain.gpus import Gpu, find_gpu
from fluxtrain.model.flops import training_flops
from fluxtrain.model.parameters import ParameterCounts, count_parameters
from fluxtrain.plan.memory import STATE_BYTES, Layout, Memory, communication_bytes, layout, memory

DEFAULT_GPU = "MI300X"
DEFAULT_MFU = 0.3
"""Assumed where nothing is given: published FLUX trainers reach 0.16 to 0.22 of the dense peak in
bfloat16, a very good one 0.38 to 0.45."""
USABLE = 0.9
"""Part of a GPU's memory that a plan may fill: contexts, collectives and fragmentation take the rest."""


class Plan(BaseModel):
    """What a job needs and takes; bytes, seconds and counts as plain numbers, None where unknown."""

    model_config = ConfigDict(frozen=True)

    gpu: str | None
    """The GPU that was assumed, None for CPUs."""
    gpu_memory_bytes: int | None
    """Memory of one GPU."""
    num_ranks: int
    """Processes, one per GPU."""
    dp_replicate: int
    """Replicas of the sharded state."""
    dp_shard: int
    """Ranks that share one replica."""
    global_batch_size: int
    """Samples of one optimizer step."""
    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    accumulation_steps: int
    """Forward passes of one rank in one optimizer step."""
    samples_per_rank: int
    """Samples of one rank in one optimizer step, those that only fill up included."""
    padded_samples: int
    """Samples of all ranks in one optimizer step that only fill up: equal work for ranks with less to do."""
    padding_percent: float
    """Their part of the work."""
    largest_micro_batch: int | None
    """The most samples whose activations fit beside the state; 0 where the state itself does not."""
    fits: bool | None
    """Whether the micro batch above fits."""
    parameters: int
    """Parameters of the model."""
    trainable_parameters: int
    """Those that the optimizer changes."""
    flops_per_sample: int
    """FLOPs of forward and backward, recomputation not counted."""
    memory_bytes_per_gpu: Memory
    """Peak memory of one rank."""
    communication_bytes_per_step: int
    """Bytes that one GPU sends in one optimizer step."""
    checkpoint_bytes: int
    """One checkpoint: weights and optimizer state in float32."""
    host_bytes_per_rank: int
    """The copy in the host's memory that a checkpoint is written from."""
    disk_bytes: int
    """The checkpoints that are kept, and the one being written."""
    data_bytes_per_sample: int
    """One encoded sample in bfloat16: text tokens, pooled vector, the latents' mean and log-variance."""
    mfu: float | None
    """The part of the dense peak that was assumed."""
    samples_per_second: float | None
    """Training throughput of all GPUs at that ``mfu``."""
    steps: int
    """Optimizer steps, if the run is not over earlier."""
    seconds: float | None
    """Time to train them; start-up, evaluation, pictures and waits for checkpoints not counted."""


def make_plan(
    config: RunConfig,
    nodes: int,
    gpus_per_node: int,
    gpu: str | None = None,
    mfu: float | None = None,
) -> Plan:
    """Return what ``config`` needs on ``nodes`` nodes; ``gpus_per_node`` 0 means one CPU process each.

    Raises ConfigError for an unknown ``gpu`` and an ``mfu`` outside (0, 1].
    """
    device = _device(gpu, gpus_per_node)
    _require_mfu(mfu)
    num_ranks = nodes * max(gpus_per_node, 1)
    shares = BatchShares.of(config, num_ranks)
    micro_batch, accumulation = shares.micro_batch_size, shares.accumulation_steps
    counts, where = count_parameters(config.model), layout(config, num_ranks)
    batch = config.schedule.global_batch_size
    computed = batch + shares.padding
    needed = memory(config, counts, where, micro_batch)
    largest = _largest_micro_batch(config, counts, where, device)
    flops = training_flops(config.model, config.image_tokens, config.data.text_length)
    rate = _rate(device, mfu, num_ranks, flops * computed / batch)
    checkpoint = STATE_BYTES * counts.total
    return Plan(
        gpu=device.name if device else None,
        gpu_memory_bytes=device.memory_bytes if device else None,
        num_ranks=num_ranks,
        dp_replicate=where.dp_replicate,
        dp_shard=where.dp_shard,
        global_batch_size=batch,
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        samples_per_rank=accumulation * micro_batch,
        padded_samples=shares.padding,
        padding_percent=100 * shares.padding / computed,
        largest_micro_batch=largest,
        fits=None if largest is None else micro_batch <= largest,
        parameters=counts.total,
        trainable_parameters=counts.total,
        flops_per_sample=flops,
        memory_bytes_per_gpu=needed,
        communication_bytes_per_step=communication_bytes(config, counts, where, accumulation),
        checkpoint_bytes=checkpoint,
        host_bytes_per_rank=checkpoint // where.dp_shard,
        disk_bytes=checkpoint * (config.checkpoint.keep + 1),
        data_bytes_per_sample=_sample_bytes(config),
        mfu=(mfu or DEFAULT_MFU) if device else None,
        samples_per_second=rate,
        steps=config.schedule.steps,
        seconds=config.schedule.steps * batch / rate if rate else None,
    )


def _device(gpu: str | None, gpus_per_node: int) -> Gpu | None:
    if gpu is None and gpus_per_node == 0:
        return None
    return find_gpu(gpu or DEFAULT_GPU)


def _require_mfu(mfu: float | None) -> None:
    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError("--mfu", mfu, "must be above 0 and at most 1")


def _rate(device: Gpu | None, mfu: float | None, num_ranks: int, flops: float) -> float | None:
    """Return samples per second of all ranks, None where nothing is known of the device."""
    if device is None:
        return None
    return num_ranks * device.peak_flops * (mfu or DEFAULT_MFU) / flops


def _largest_micro_batch(
    config: RunConfig, counts: ParameterCounts, where: Layout, device: Gpu | None
) -> int | None:
    if device is None:
        return None
    state = memory(config, counts, where, 0).total
    per_sample = memory(config, counts, where, 1).total - state
    return max(0, int(USABLE * device.memory_bytes - state) // per_sample)


def _sample_bytes(config: RunConfig) -> int:
    text = config.data.text_length * config.model.context_in_dim + config.model.vec_in_dim
    return 2 * (text + 2 * config.latent_channels * config.data.latent_size**2)
