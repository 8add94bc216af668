"""Estimate memory, FLOPs, communication, time and disk space from a config and a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.data import PIXELS_PER_LATENT
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.precision import Precision
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.data.order import BatchShares
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.model.cost import copied_bytes, host_sizes
from fluxtrain.model.parameters import count_parameters, count_trained, run_flops
from fluxtrain.parallel.node_memory import loader_bytes, snapshot_bytes
from fluxtrain.parallel.traffic import exposed_seconds, sent_by_node, sent_by_rank, sent_within_node
from fluxtrain.plan.pictures import PicturesPlan
from fluxtrain.runtime.devices import Gpu, find_gpu, find_peak
from fluxtrain.train.memory import Memory, settle_resharding, state_bytes, sum_error
from fluxtrain.train.micro_batch import Room, largest_micro_batch, settle_micro_batch, step_memory

DEFAULT_GPU = "MI300X"
DEFAULT_MFU = 0.3
"""Default fraction of the dense bfloat16 peak: published FLUX trainers reach 0.16 to 0.22, a very good
one 0.38 to 0.45."""
DEFAULT_FP8_MFU = 0.2
"""Default fraction of the dense fp8 peak, which is twice that of bfloat16: in MLPerf it is 0.05 to 0.30."""
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
    """What was measured, if the throughput is not assumed."""
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
    if found and gpu and _gpu_of(found) is None:
        text = (
            f"a measurement on {found.device}, whose peak is unknown, says nothing of another GPU"
        )
        raise ConfigError("--gpu", gpu, text)
    device = assumed_gpu(gpu or (_gpu_of(found) if found else None), gpus_per_node)
    if device is None:
        config = _on_cpus(config)
    room = Room.of(device.memory_bytes if device else None, ranks_per_node, memory_limit)
    requested = config.parallel.micro_batch_size
    config = settle_micro_batch(config, num_ranks, ranks_per_node, room)
    shares = BatchShares.of(config, num_ranks)
    if measured is not None:
        found = measured.of(given, num_ranks, shares.micro_batch_size)
    micro_batch, accumulation = shares.micro_batch_size, shares.accumulation_steps
    settled = settle_resharding(
        config, num_ranks, ranks_per_node, device.memory_bytes if device else None
    )
    counts = count_parameters(config.model)
    sharding = Sharding.of(config, num_ranks, ranks_per_node)
    batch = config.schedule.global_batch_size
    steps = None if config.schedule.epochs is not None else config.schedule.steps
    steps = pictures.steps if pictures is not None else steps
    computed = batch + shares.padding
    largest = None if device is None else largest_micro_batch(config, sharding, room)
    flops = run_flops(config)
    speed, mfu = _speed(device, mfu, flops, found, config)
    rate = speed and speed * num_ranks * batch / computed
    compute = accumulation * micro_batch / speed if speed else None
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
        gpu_memory_bytes=device.memory_bytes if device else None,
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
        exposed_seconds_per_step=(
            exposed_seconds(settled, sharding, accumulation, compute)
            if compute and device and nodes > 1
            else None
        ),
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


def _gpu_of(speed: Speed) -> str | None:
    """Return the name in the table of GPUs of what was measured; None if it is not there."""
    peak = find_peak(speed.device, "bfloat16")
    return peak.gpu if peak else None


def _peak(gpu: Gpu, config: RunConfig) -> float:
    """Return the dense FLOP/s of ``gpu`` in the type of the linear layers."""
    fp8 = config.precision.fp8
    if fp8 == "none":
        own = gpu.float32_flops if config.precision.compute == "float32" else None
        return own or gpu.peak_flops
    if gpu.fp8_flops is None:
        text = f"{gpu.name} has no fp8 matrix products; use none"
        raise ConfigError("spec.run.precision.fp8", fp8, text)
    return gpu.fp8_flops


def _speed(
    device: Gpu | None, mfu: float | None, flops: float, measured: Speed | None, config: RunConfig
) -> tuple[float | None, float | None]:
    """Return samples per second of a rank with a sample's ``flops``, and MFU; None if they are unknown."""
    if measured is not None:
        own = _gpu_of(measured)
        if own is None or device is None:
            return measured.samples_per_second, None
        mfu = measured.samples_per_second * flops / _peak(find_gpu(own), config)
    if device is None:
        return None, None
    mfu = mfu or (DEFAULT_MFU if config.precision.fp8 == "none" else DEFAULT_FP8_MFU)
    return _peak(device, config) * mfu / flops, mfu


def _sample_bytes(config: RunConfig) -> int:
    text = config.data.text_length * config.model.context_in_dim + config.model.vec_in_dim
    return 2 * (text + 2 * math.prod(config.latent_shape))


# Speeds that the benchmark task has measured, from which a plan takes its hours.


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_MAX_BYTES = 1 << 24


class _Trial(BaseModel):
    setting: Setting
    micro_batch_size: _Count
    num_ranks: _Count
    global_batch_size: _Count


class _Measurement(BaseModel):
    images_per_second_per_gpu: _Positive
    device: str
    compiled: bool


class _Entry(BaseModel):
    trial: _Trial
    measurement: _Measurement | None

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        assert self.measurement is not None
        return self.trial.micro_batch_size / self.measurement.images_per_second_per_gpu


class _File(BaseModel):
    run: dict[str, Any]
    trials: list[_Entry]


@dataclass(frozen=True)
class Speed:
    """What a rank does of a run, by measurement."""

    samples_per_second: float
    device: str
    source: str
    """What was measured, for people."""


class MeasuredSpeeds:
    """The content of a ``benchmark.json``."""

    def __init__(self, path: Path) -> None:
        """Read ``path``; raises DataError if it is not the result of a benchmark."""
        self._path = path
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise DataError(f"{path}: has more than {_MAX_BYTES} bytes")
            self._content = _File.model_validate_json(content)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        except ValidationError as error:
            text = error.errors()[0]["msg"]
            raise DataError(f"{path}: not the benchmark.json of a benchmark ({text})") from None

    def of(self, config: RunConfig, num_ranks: int, micro_batch: int) -> Speed:
        """Return the speed of ``config`` on ``num_ranks`` in micro batches of ``micro_batch`` samples.

        Between two batches that were measured, the time of a step is interpolated; outside of them, it is in
        proportion to the batch. Of several numbers of ranks, the nearest up to ``num_ranks`` counts.
        Raises ConfigError if none is of the same model, adapters, shapes, precision and recomputation.
        """
        entries = self._matching(config)
        counts = {entry.trial.num_ranks for entry in entries}
        count = max((n for n in counts if n <= num_ranks), default=min(counts))
        by_batch = {e.trial.micro_batch_size: e for e in entries if e.trial.num_ranks == count}
        points = [by_batch[batch] for batch in sorted(by_batch)]
        near = _nearest(points, micro_batch)
        batches = " and ".join(str(entry.trial.micro_batch_size) for entry in near)
        device = near[0].measurement.device if near[0].measurement else ""
        return Speed(
            samples_per_second=micro_batch / _seconds(near, micro_batch),
            device=device,
            source=f"at batch {batches} of each of {count} ranks on {device} ({self._path})",
        )

    def _matching(self, config: RunConfig) -> list[_Entry]:
        own = config.model_dump(mode="json", include={"model", "adapter"})
        for section, value in own.items():
            if value != self._content.run.get(section):
                text = f"was measured with another spec.run.{section}"
                raise ConfigError("--measured", str(self._path), text)
        blocks = config.parallel.offload_blocks
        if blocks != self._content.run.get("parallel", {}).get("offload_blocks", 0):
            text = "was measured with another spec.run.parallel.offload_blocks"
            raise ConfigError("--measured", str(self._path), text)
        wanted, compiled = Setting.of(config), config.parallel.compile
        found = [
            entry
            for entry in self._content.trials
            if entry.measurement is not None
            and _uncompiled(entry.trial.setting) == _uncompiled(wanted)
            and entry.trial.global_batch_size
            == entry.trial.micro_batch_size * entry.trial.num_ranks
            and compiled in (None, entry.measurement.compiled)
        ]
        if not found:
            trials = [entry.trial for entry in self._content.trials if entry.measurement]
            settings = dict.fromkeys(str(_uncompiled(trial.setting)) for trial in trials)
            text = f"has {'; '.join(settings) or 'no measurement'}; needed is {wanted}"
            raise ConfigError("--measured", str(self._path), text)
        return _of_one_kind(found)


def _of_one_kind(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return those of ``entries`` that were compiled, if there are some, else all."""
    compiled = [e for e in entries if e.measurement is not None and e.measurement.compiled]
    return compiled or list(entries)


def _uncompiled(setting: Setting) -> Setting:
    """Return what ``setting`` computes, however it is compiled: a measurement says that by itself."""
    return replace(setting, compile=None)


def _nearest(points: Sequence[_Entry], batch: int) -> list[_Entry]:
    """Return the measurement of ``batch``, else those around it, else the one at that end."""
    below = [entry for entry in points if entry.trial.micro_batch_size <= batch]
    above = [entry for entry in points if entry.trial.micro_batch_size >= batch]
    ends = [*below[-1:], *above[:1]]
    return ends[:1] if len(ends) == 2 and ends[0] == ends[1] else ends


def _seconds(near: Sequence[_Entry], batch: int) -> float:
    """Return the seconds of a step with ``batch`` samples, by one or two measurements."""
    low, high = near[0], near[-1]
    sizes = low.trial.micro_batch_size, high.trial.micro_batch_size
    if low is high:
        return low.seconds * batch / sizes[0]
    part = (batch - sizes[0]) / (sizes[1] - sizes[0])
    return low.seconds + part * (high.seconds - low.seconds)
