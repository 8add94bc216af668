"""Samples per second of a GPU: measured by the benchmark task, predicted, or a fraction of its peak.

A prediction is the sum of a step's matrix products, attention, the bytes that its blocks move between them,
FSDP2's copies and the optimizer's update. Launches, the first and the last layers are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.setting import Setting
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.model.cost import BYTES, recomputed_depths, recomputed_flops
from fluxtrain.model.layers import has_small_base
from fluxtrain.model.parameters import count_trained, run_flops
from fluxtrain.parallel.traffic import collectives
from fluxtrain.runtime.devices import Gpu, find_gpu, find_peak
from fluxtrain.train.memory import state_bytes

DEFAULT_MFU = 0.3
"""Default fraction of the dense bfloat16 peak: published FLUX trainers reach 0.16 to 0.22, a very good
one 0.38 to 0.45."""
DEFAULT_FP8_MFU = 0.2
"""Default fraction of the dense fp8 peak, which is twice that of bfloat16: in MLPerf it is 0.05 to 0.30."""

Moved = Mapping[str, Mapping[str, Sequence[float]]]
MOVED_FILE = Path(__file__).with_name("moved.json")
"""What a block moves in its forward and in its backward pass, by precision and kind, in activations of its
tokens in bfloat16. `python -m benchmarks.cuda_code --update` counts it in inductor's code."""
_FLOAT32 = 4


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, in FLOP/s and bytes per second."""

    bfloat16: float
    fp8: float
    attention: float
    bandwidth: float


MEASURED = "H200"
RATES = {
    MEASURED: Rates(661e12, 1199e12, 309e12, 4.2e12),
    "H100": Rates(661e12, 1199e12, 309e12, 2.9e12),
    "MI300X": Rates(531e12, 955e12, 220e12, 3.8e12),
    "MI325X": Rates(632e12, 1139e12, 220e12, 4.3e12),
    "MI350X": Rates(1008e12, 2017e12, 403e12, 5.8e12),
    "MI355X": Rates(1100e12, 2200e12, 440e12, 5.8e12),
}
"""The first are measured: means over a step's own products, attention by cuDNN, a copy. The others are
assumed: an H100 has the H200's products, and as large a part of its data sheet's bandwidth. AMD's have 75 %
of the most that AMD names for products, of MI355X hipBLASLt's fp8 and half of it, of MI350X as large a part
of its peak; 72 % of the data sheets' bandwidth; attention by AOTriton."""


@dataclass(frozen=True)
class Speed:
    """What a rank does of a run, by measurement."""

    samples_per_second: float
    device: str
    source: str
    """What was measured, for people."""


def predicted_seconds(
    config: RunConfig,
    gpu: Gpu,
    sharding: Sharding,
    micro_batch: int,
    accumulation: int,
    moved: Moved | None = None,
) -> float | None:
    """Return the seconds in which ``gpu`` computes a step of ``accumulation`` micro batches.

    ``config`` has settled its resharding. None without known rates of ``gpu``, and for what ``moved`` does
    not have: other adapters than LoRA on weights in bfloat16, float32, blocks without compiler or kernels.
    """
    rates, fp8 = RATES.get(gpu.name), config.precision.fp8
    moved = moved or json.loads(MOVED_FILE.read_text(encoding="utf-8"))
    of_blocks = moved.get(_kind(config))
    if rates is None or of_blocks is None:
        return None
    model, text, image = config.model, config.data.text_length, config.image_tokens
    width, fraction = model.hidden_size, config.parallel.activation_checkpointing
    again = recomputed_depths(model, fraction)
    passes = 3 * model.num_blocks + sum(again.values())
    attention = passes * 4 * (image + text) ** 2 * width
    flops = run_flops(config) + recomputed_flops(model, image, text, fraction, keeps_scores=True)
    units = 0.0
    for blocks, depth in model.depths.items():
        forward, backward = of_blocks[blocks.removesuffix("_blocks")]
        units += (depth + again[blocks]) * forward + depth * backward
    products = (flops - attention) / (rates.bfloat16 if fp8 == "none" else rates.fp8)
    of_sample = products + attention / rates.attention
    of_sample += units * (image + text) * width * BYTES["bfloat16"] / rates.bandwidth
    return (
        accumulation * micro_batch * of_sample
        + _copied(config, sharding, accumulation) / rates.bandwidth
    )


def _kind(config: RunConfig) -> str:
    """Return what the blocks compute in or train, as `MOVED_FILE` names it; "" for what it does not have."""
    adapter, kernels = config.adapter, config.parallel.kernels
    has_kernels = config.parallel.compiles(has_gpu=True) and (
        kernels is None or "blocks" in kernels
    )
    if config.precision.compute != "bfloat16" or not has_kernels:
        return ""
    if adapter is None:
        return "bfloat16" if config.precision.fp8 == "none" else config.precision.fp8
    is_lora = adapter.kind == "lora" and not adapter.dora and not has_small_base(config)
    return "lora" if is_lora else ""


def _copied(config: RunConfig, sharding: Sharding, accumulation: int) -> float:
    """Return the bytes that FSDP2's copies and the optimizer's update move in a step.

    Gathered weights and gradients are copied once each, from or to the buffer of their collective.
    """
    reduce = BYTES[config.precision.reduce]
    copies = {"all_gather": 2.0, "reduce_scatter": 1 + BYTES[config.precision.compute] / reduce}
    found = collectives(config, sharding, accumulation)
    copied = sum(copies.get(each.operation, 0) * each.content_bytes for each in found)
    trained = count_trained(config.model, config.adapter).total / sharding.dp_shard
    return copied + trained * (2 * state_bytes(config) + _FLOAT32)


def gpu_of(speed: Speed) -> str | None:
    """Return the name in the table of GPUs of what was measured; None if it is not there."""
    peak = find_peak(speed.device, "bfloat16")
    return peak.gpu if peak else None


def peak_of(gpu: Gpu, config: RunConfig) -> float:
    """Return the dense FLOP/s of ``gpu`` in the type of the linear layers."""
    fp8 = config.precision.fp8
    if fp8 == "none":
        own = gpu.float32_flops if config.precision.compute == "float32" else None
        return own or gpu.peak_flops
    if gpu.fp8_flops is None:
        text = f"{gpu.name} has no fp8 matrix products; use none"
        raise ConfigError("spec.run.precision.fp8", fp8, text)
    return gpu.fp8_flops


def assumed_speed(
    device: Gpu | None, mfu: float | None, flops: float, measured: Speed | None, config: RunConfig
) -> tuple[float | None, float | None]:
    """Return samples per second of a rank with a sample's ``flops``, and MFU; None if they are unknown."""
    if measured is not None:
        own = gpu_of(measured)
        if own is None or device is None:
            return measured.samples_per_second, None
        mfu = measured.samples_per_second * flops / peak_of(find_gpu(own), config)
    if device is None:
        return None, None
    mfu = mfu or (DEFAULT_MFU if config.precision.fp8 == "none" else DEFAULT_FP8_MFU)
    return peak_of(device, config) * mfu / flops, mfu


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
