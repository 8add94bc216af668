"""Estimate memory, FLOPs, communication, time and disk space from a config and a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.data import PIXELS_PER_LATENT
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.precision import Precision
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.order import BatchShares
from fluxtrain.errors import ConfigError
from fluxtrain.model.cost import copied_bytes, host_sizes
from fluxtrain.model.parameters import count_parameters, count_trained, run_flops
from fluxtrain.parallel.node_memory import loader_bytes, snapshot_bytes
from fluxtrain.parallel.traffic import exposed_seconds, sent_by_node, sent_by_rank, sent_within_node
from fluxtrain.plan.pictures import PicturesPlan
from fluxtrain.plan.speed import (
    MeasuredSpeeds,
    assumed_speed,
    gpu_of,
    peak_of,
    predicted_seconds,
)
from fluxtrain.runtime.devices import Gpu, find_gpu
from fluxtrain.train.memory import Memory, settle_resharding, state_bytes, sum_error
from fluxtrain.train.micro_batch import Room, largest_micro_batch, settle_micro_batch, step_memory

DEFAULT_GPU = "MI300X"
MOST_EXPOSED = 0.1
"""The part of a step that GPUs may wait for collectives before plan names a sharding with less."""
HOST_LINK = 25e9
"""Assumed bytes per second from host memory to a GPU: what PCIe 4.0 with 16 lanes reaches, half of 5.0's."""


class Plan(BaseModel):
    """Estimates for a job, in bytes, seconds and counts; None if unknown."""

    model_config = ConfigDict(frozen=True)

    gpu: str | None
    """Assumed GPU model, None for CPUs."""
    gpu_memory_bytes: int | None
    """Memory of one GPU."""
    num_nodes: int
    """Nodes of equally many ranks."""
    num_ranks: int
    """Processes, one per GPU."""
    requested_replicas: int | str
    """``parallel.dp_replicate`` of the config."""
    dp_replicate: int
    """Replicas of the sharded state."""
    dp_shard: int
    """Ranks that share one replica."""
    shards_cross_nodes: bool
    """Whether the ranks of one replica are on several nodes, which gather its weights from each other."""
    global_batch_size: int
    """Samples of one optimizer step."""
    requested_micro_batch: int | str
    """``parallel.micro_batch_size`` of the config."""
    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    accumulation_steps: int
    """Forward passes of one rank in one optimizer step."""
    gradient_sum_error: float
    """Error of the sum of their gradients in bfloat16, over its L2 norm; 0 if the sum is in float32."""
    samples_per_rank: int
    """Samples of one rank in one optimizer step, including padding."""
    padded_samples: int
    """Padding samples of all ranks in one optimizer step, so that all ranks have equal work."""
    padding_percent: float
    """Percentage of padding samples."""
    largest_micro_batch: int | None
    """Largest micro batch whose activations fit; 0 if the state alone does not fit."""
    fits: bool | None
    """Whether ``micro_batch_size`` fits."""
    parameters: int
    """Parameters of the model."""
    trainable_parameters: int
    """Parameters that are trained."""
    flops_per_sample: int
    """FLOPs of forward and backward, without recomputation; of the largest image."""
    image_width: int
    """Width of the largest image in pixels: memory, FLOPs and time are those of its size."""
    image_height: int
    """Its height."""
    num_image_sizes: int
    """Sizes of buckets, 1 without; those that are cut smaller are not counted."""
    reshards_after_forward: bool
    """Whether gathered weights are freed after the forward pass."""
    weight_dtype: Precision
    """Data type of the trained weights, and of their reduced gradients."""
    memory_bytes_per_gpu: Memory
    """Peak memory of one rank."""
    offloaded_bytes_per_node: int
    """Frozen weights of ``parallel.offload_blocks`` in page-locked memory of one node; each rank has all."""
    offload_copied_bytes_per_step: int
    """Bytes that one rank copies of them to its GPU in one optimizer step."""
    offload_seconds_per_step: float
    """Time of these copies at 25 GB/s, while the GPU computes."""
    communication_bytes_per_step: int
    """Bytes that one GPU sends in one optimizer step."""
    node_communication_bytes_per_step: int
    """Bytes that one node sends to other nodes in one optimizer step."""
    communication_bytes_within_node_per_step: int
    """Bytes that the ranks of one node send each other in one optimizer step."""
    compute_seconds_per_step: float | None
    """Time of one optimizer step by the throughput of one GPU; None if it is unknown."""
    exposed_seconds_per_step: float | None
    """Time of collectives that computing does not hide, by assumed links; None on one node."""
    checkpoint_bytes: int
    """Size of a checkpoint: weights and optimizer state."""
    host_bytes_per_rank: int
    """Copy of one rank's checkpoint in host memory, from which it is written."""
    snapshot_bytes_per_node: int
    """Memory of the snapshots in one node, on the fewest nodes of the job; 0 if none are taken."""
    loader_bytes_per_node: int
    """Batches that the data loaders of one node keep in /dev/shm, on the fewest nodes of the job."""
    memory_limit_bytes: int | None
    """``spec.resources.limits.memory``."""
    disk_bytes: int
    """Size of the kept checkpoints and of the one being written."""
    data_bytes_per_sample: int
    """Encoded sample in bfloat16: text tokens, pooled vector, mean and log-variance of the latents."""
    mfu: float | None
    """Assumed or measured fraction of the dense peak (model FLOPs utilization)."""
    mfu_dtype: Literal["bfloat16", "float32", "fp8"]
    """Whose peak that is: fp8 if the linear layers compute in it, else ``precision.compute``."""
    measured: str | None
    """What was measured, if the throughput is."""
    is_predicted: bool
    """Whether the throughput follows from FLOPs and bytes, and includes the waiting for collectives."""
    samples_per_second: float | None
    """Training throughput of all GPUs."""
    steps: int | None
    """Maximum number of optimizer steps; None if epochs of data that are not read give it."""
    pictures: PicturesPlan | None
    """What is encoded before training; None if the data are encoded already."""
    seconds: float | None
    """Time of these steps, without start-up, evaluation, sampling and waiting for checkpoints."""
    cost: float | None
    """Of these steps, at ``gpu_hour``."""
    gpu_hour: float | None
    """Price of a GPU for an hour."""
    target_samples: float | None
    """Samples after which the reference reaches MLPerf's target."""
    target_source: str | None
    """Where they are from, or why they are unknown; None if the run has another target, or none."""
    target_seconds: float | None
    """Time of these samples, without the evaluations."""
    target_cost: float | None
    """Of these samples, at ``gpu_hour``."""

    @property
    def exposed_fraction(self) -> float:
        """Return the part of a step in which GPUs wait for collectives; 0 if it is unknown."""
        compute, exposed = self.compute_seconds_per_step, self.exposed_seconds_per_step
        return exposed / (compute + exposed) if compute and exposed else 0.0


def make_plan(
    config: RunConfig,
    nodes: int,
    gpus_per_node: int,
    gpu: str | None = None,
    mfu: float | None = None,
    *,
    fewest_nodes: int | None = None,
    memory_limit: int | None = None,
    measured: MeasuredSpeeds | None = None,
    pictures: PicturesPlan | None = None,
    target: tuple[float | None, str] | None = None,
    gpu_hour: float | None = None,
) -> Plan:
    """Return the plan of ``config`` on ``nodes`` nodes; ``gpus_per_node`` 0 means one CPU process each.

    A pod may use ``memory_limit`` bytes; the job may shrink to ``fewest_nodes``. Steps are those of its
    ``pictures``, if it has some. The throughput is that of ``measured``, converted by its MFU if ``gpu`` is
    another one. ``target`` is the samples to MLPerf's target, and where they are from. Raises ConfigError if
    ``gpu`` is unknown, ``mfu`` is outside (0, 1], ``gpu_hour`` is no price, or ``measured`` has nothing of
    this run.
    """
    if gpu_hour is not None and not (gpus_per_node and 0 < gpu_hour < math.inf):
        text = "must be above 0" if gpus_per_node else "must be left out: the job has no GPUs"
        raise ConfigError("--gpu-hour", gpu_hour, text)
    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError("--mfu", mfu, "must be above 0 and at most 1")
    ranks_per_node = max(gpus_per_node, 1)
    num_ranks = nodes * ranks_per_node
    given = config
    # all its micro batches are of one GPU
    found = None if measured is None else measured.of(given, num_ranks, 1)
    if found and gpu and gpu_of(found) is None:
        text = f"a measurement on {found.device}, whose peak is unknown"
        raise ConfigError("--gpu", gpu, f"{text}, says nothing of another GPU")
    device = assumed_gpu(gpu or (gpu_of(found) if found else None), gpus_per_node)
    if device is None:
        config = _on_cpus(config)
    gpu_memory = device.memory_bytes if device else None
    room = Room.of(gpu_memory, ranks_per_node, memory_limit)
    requested = config.parallel.micro_batch_size
    config = settle_micro_batch(config, num_ranks, ranks_per_node, room)
    shares = BatchShares.of(config, num_ranks)
    if measured is not None:
        found = measured.of(given, num_ranks, shares.micro_batch_size)
    micro_batch, accumulation = shares.micro_batch_size, shares.accumulation_steps
    settled = settle_resharding(config, num_ranks, ranks_per_node, gpu_memory)
    counts = count_parameters(config.model)
    sharding = Sharding.of(config, num_ranks, ranks_per_node)
    batch = config.schedule.global_batch_size
    steps = None if config.schedule.epochs is not None else config.schedule.steps
    steps = pictures.steps if pictures is not None else steps
    computed = batch + shares.padding
    largest = None if device is None else largest_micro_batch(config, sharding, room)
    flops = run_flops(config)
    predicted = None
    if device and not (mfu or found):
        predicted = predicted_seconds(settled, device, sharding, micro_batch, accumulation)
    speed, mfu = assumed_speed(device, mfu, flops, found, config)
    compute = predicted or (accumulation * micro_batch / speed if speed else None)
    exposed = None
    if compute and device and nodes > 1:
        exposed = exposed_seconds(settled, sharding, accumulation, compute)
    if device and predicted:
        speed = accumulation * micro_batch / (predicted + (exposed or 0.0))
        mfu = speed * flops / peak_of(device, config)
    rate = speed and speed * num_ranks * batch / computed
    trained = count_trained(config.model, config.adapter).total
    checkpoint = state_bytes(config) * trained
    offloaded = host_sizes(config)
    copied = accumulation * copied_bytes(offloaded)
    seconds = steps * batch / rate if rate and steps else None
    samples, source = target or (None, None)
    to_target = samples / rate if rate and samples else None
    price = gpu_hour and num_ranks * gpu_hour / 3600
    rank_counts = range((fewest_nodes or nodes) * ranks_per_node, num_ranks + 1, ranks_per_node)
    return Plan(
        gpu=device.name if device else None,
        gpu_memory_bytes=gpu_memory,
        num_nodes=nodes,
        num_ranks=num_ranks,
        requested_replicas=config.parallel.dp_replicate,
        dp_replicate=sharding.dp_replicate,
        dp_shard=sharding.dp_shard,
        shards_cross_nodes=sharding.crosses_nodes,
        global_batch_size=batch,
        requested_micro_batch=requested,
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        gradient_sum_error=sum_error(config, sharding, accumulation),
        samples_per_rank=accumulation * micro_batch,
        padded_samples=shares.padding,
        padding_percent=100 * shares.padding / computed,
        largest_micro_batch=largest,
        fits=None if device is None else room.has(config, sharding, micro_batch),
        parameters=counts.total,
        trainable_parameters=trained,
        flops_per_sample=flops,
        image_width=config.data.largest_latent[1] * PIXELS_PER_LATENT,
        image_height=config.data.largest_latent[0] * PIXELS_PER_LATENT,
        num_image_sizes=len(config.data.latent_sizes),
        reshards_after_forward=settled.parallel.reshards,
        weight_dtype=config.precision.weights,
        memory_bytes_per_gpu=step_memory(settled, sharding, micro_batch, room.is_gpu),
        offloaded_bytes_per_node=ranks_per_node * sum(offloaded),
        offload_copied_bytes_per_step=copied,
        offload_seconds_per_step=copied / HOST_LINK,
        communication_bytes_per_step=sent_by_rank(settled, sharding, accumulation),
        node_communication_bytes_per_step=sent_by_node(settled, sharding, accumulation),
        communication_bytes_within_node_per_step=sent_within_node(settled, sharding, accumulation),
        compute_seconds_per_step=compute,
        exposed_seconds_per_step=exposed,
        checkpoint_bytes=checkpoint,
        host_bytes_per_rank=checkpoint // sharding.dp_shard,
        snapshot_bytes_per_node=snapshot_bytes(config, rank_counts, ranks_per_node),
        loader_bytes_per_node=ranks_per_node * loader_bytes(config, rank_counts[0]),
        memory_limit_bytes=memory_limit,
        disk_bytes=checkpoint * (config.checkpoint.keep + 1),
        data_bytes_per_sample=_sample_bytes(config),
        mfu=mfu,
        mfu_dtype=config.precision.compute if config.precision.fp8 == "none" else "fp8",
        measured=found.source if found else None,
        is_predicted=predicted is not None,
        samples_per_second=rate,
        steps=steps,
        pictures=pictures,
        seconds=seconds,
        cost=price and seconds and price * seconds,
        gpu_hour=gpu_hour,
        target_samples=samples,
        target_source=source,
        target_seconds=to_target,
        target_cost=price and to_target and price * to_target,
    )


def fitting_change(config: RunConfig, plan: Callable[[RunConfig], Plan]) -> str | None:
    """Return the first options with which ``config``, which does not fit, would; None if there are none."""
    recomputed, fp8 = "--parallel.activation_checkpointing=1.0", "--adapter.base_dtype=fp8"
    changes = [f"--parallel.micro_batch_size={plan(config).largest_micro_batch}"]
    changes += ["--parallel.dp_replicate=1", recomputed]
    if config.adapter:
        changes += [fp8, f"{fp8} {recomputed}", f"--parallel.micro_batch_size=1 {fp8} {recomputed}"]
    changes += [f"--parallel.offload_blocks={config.model.num_blocks}"]
    for change in changes:
        with suppress(ConfigError):  # not of this run, or not of this preset
            if plan(_changed(config, change.split())).fits:
                return change
    return None


def faster_change(config: RunConfig, plan: Callable[[RunConfig], Plan]) -> tuple[str, Plan] | None:
    """Return options with which GPUs wait less for collectives, and their plan; None if they wait little.

    That of the sharding comes first: the data type of the reduction changes the rounding of gradients.
    """
    found, least = None, plan(config)
    options = ["--parallel.dp_replicate=per-node", "--precision.reduce=bfloat16"]
    for changes in (options[:1], options):
        if least.exposed_fraction <= MOST_EXPOSED:
            break
        with suppress(ConfigError):
            other = plan(_changed(config, changes))
            if other.fits is not False and other.exposed_fraction < least.exposed_fraction:
                found, least = (" ".join(changes), other), other
    return found


def _changed(config: RunConfig, options: Sequence[str]) -> RunConfig:
    return resolve(merge(config.model_dump(mode="json"), parse_overrides(list(options))))


def _on_cpus(config: RunConfig) -> RunConfig:
    """Return ``config`` with what it leaves to the device set for CPUs."""
    compiles = config.parallel.compiles(has_gpu=False)
    parallel = config.parallel.model_copy(update={"compile": compiles})
    return config.model_copy(update={"parallel": parallel})


def assumed_gpu(gpu: str | None, gpus_per_node: int) -> Gpu | None:
    """Return the GPU called ``gpu``, the default one if None; None on nodes without GPUs."""
    if gpu is None and gpus_per_node == 0:
        return None
    return find_gpu(gpu or DEFAULT_GPU)


def _sample_bytes(config: RunConfig) -> int:
    text = config.data.text_length * config.model.context_in_dim + config.model.vec_in_dim
    return 2 * (text + 2 * math.prod(config.latent_shape))
