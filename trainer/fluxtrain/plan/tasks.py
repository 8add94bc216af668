"""The plan of a task other than train: the memory of a rank, and the time where it is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.data.sources import open_source
from fluxtrain.encode.files import encoder_bytes
from fluxtrain.errors import FluxtrainError
from fluxtrain.model.cost import forward_flops
from fluxtrain.plan.estimate import Plan
from fluxtrain.plan.table import Row, aligned, digits, duration, each_of, gib, verdict
from fluxtrain.runtime.progress import decimal
from fluxtrain.sample.prompts import chosen_prompts
from fluxtrain.state.random_seed import with_any_seed
from fluxtrain.train.memory import forward_memory
from fluxtrain.train.micro_batch import USABLE

Training = Callable[[int], RunConfig]
"""The training that a benchmark takes steps of, by the batch of a rank."""


class TaskPlan(BaseModel):
    """A task, or one setting of a benchmark; None if unknown."""

    model_config = ConfigDict(frozen=True)

    name: str
    gpu: str | None
    gpu_memory_bytes: int | None
    num_ranks: int
    batch_size: int
    """Samples of a pass on one rank."""
    memory_bytes: int
    """Peak of one rank; of preprocess the encoders' weights alone."""
    mfu: float | None = None
    """Assumed fraction of the dense peak."""
    samples_per_second: float | None = None
    """Of all ranks."""
    samples: int | None = None
    seconds: float | None = None
    """Time of the samples, or of a setting's measurements."""
    output_bytes_per_sample: int | None = None
    change: str | None = None
    """The option with which it would fit, if it does not."""

    @property
    def fits(self) -> bool:
        return _fits(self.memory_bytes, self.gpu_memory_bytes)


def plan_benchmark(
    config: RunConfig, plan: Callable[[RunConfig], Plan], trainings: Mapping[str, Training]
) -> Iterator[TaskPlan]:
    """Yield of each setting the given batches, or the largest that fits, with the time of all below it."""
    given = sorted(set(config.benchmark.micro_batch_sizes))
    for name, at in trainings.items():
        fitting = plan(at(1)).largest_micro_batch
        largest = config.parallel.most_samples if fitting is None else fitting
        for batch in given or [max(1, min(largest, config.benchmark.largest_micro_batch))]:
            of_batch = plan(at(batch))
            below = 0 if given else (1 << (batch - 1).bit_length()) - 1  # powers of two
            seconds = of_batch.seconds and of_batch.seconds * (batch + below) / batch
            used = of_batch.memory_bytes_per_gpu.total
            rate = of_batch.samples_per_second
            change = fitting and f"--benchmark.micro_batch_sizes=[{fitting}]"
            yield _made(name, of_batch, batch, used, rate, seconds=seconds, change=change or None)


def plan_task(config: RunConfig, plan: Plan, data_root: Path) -> TaskPlan:
    """Return the plan of evaluate, sample or preprocess, by the ``plan`` of a training on the same ranks."""
    with_images = config.data.model_copy(update={"source": "images"})
    encoders = encoder_bytes(config.model_copy(update={"data": with_images}))
    if config.task == "preprocess":
        size = plan.data_bytes_per_sample
        batch = config.preprocess.batch_size
        return _made(config.task, plan, batch, encoders, output_bytes_per_sample=size)
    change = None
    flops = forward_flops(config.model, config.image_tokens, config.data.text_length)
    if config.task == "sample":  # every rank holds the whole model, after the text encoders
        batch = 1
        used = max(encoders, forward_memory(config, Sharding(1, 1, 1), batch))
        flops *= config.sampling.num_steps * (1 + (config.sampling.cfg_scale > 1))
    else:
        batch = config.evaluation.batch_size
        ranks = plan.num_ranks, plan.num_ranks // plan.num_nodes, plan.dp_replicate

        def needed(batch: int) -> int:
            return encoder_bytes(config) + forward_memory(config, Sharding(*ranks), batch)

        used, halves = needed(batch), (batch >> n for n in range(1, batch.bit_length()))
        smaller = next((n for n in halves if _fits(needed(n), plan.gpu_memory_bytes)), None)
        change = smaller and f"--evaluation.batch_size={smaller}"
    rate = None
    if plan.samples_per_second is not None:  # of a training, with its padding
        padded = 1 + plan.padded_samples / plan.global_batch_size
        rate = plan.samples_per_second * padded * plan.flops_per_sample / flops
    count = seconds = None
    with suppress(FluxtrainError):
        count = _count(config, data_root)
    if rate and count is not None:
        seconds = math.ceil(count / plan.num_ranks) * plan.num_ranks / rate
    return _made(
        config.task, plan, batch, used, rate, samples=count, seconds=seconds, change=change
    )


def _made(
    name: str,
    plan: Plan,
    batch: int,
    used: int,
    rate: float | None = None,
    **more: float | str | None,
) -> TaskPlan:
    ranks = {name: getattr(plan, name) for name in ("gpu", "gpu_memory_bytes", "num_ranks")}
    if _fits(used, plan.gpu_memory_bytes):
        more["change"] = None
    mfu = plan.mfu if rate else None
    values = {"batch_size": batch, "memory_bytes": used, "samples_per_second": rate, "mfu": mfu}
    return TaskPlan.model_validate({"name": name, **ranks, **values, **more})


def _fits(used: int, room: int | None) -> bool:
    return room is None or used <= USABLE * room


def _count(config: RunConfig, data_root: Path) -> int | None:
    """Return the samples or prompts; None if their files are not read for a plan."""
    if config.task == "sample":
        return len(chosen_prompts(with_any_seed(config), data_root))
    if config.data.source == "images":
        return None
    return len(open_source(config, data_root, "validation"))


def render(plans: list[TaskPlan]) -> str:
    """Return the answer, and ``plans`` as aligned rows under their names."""
    lines = aligned([(plan.name, list(_rows(plan))) for plan in plans])
    notes = ["", "Not counted: start-up, encoding, reading and writing."]
    return "\n".join([_answer(plans), "", *lines, *notes])


def _answer(plans: list[TaskPlan]) -> str:
    most = max(plans, key=lambda plan: plan.memory_bytes)
    ranks, room = each_of(most.num_ranks, most.gpu), most.gpu_memory_bytes
    answer = verdict(most.memory_bytes, room, most.fits, ranks, most.change)
    known = [plan.seconds for plan in plans if plan.seconds is not None]
    return f"{answer} Time: {duration(sum(known))}." if len(known) == len(plans) else answer


def _rows(plan: TaskPlan) -> Iterator[Row]:
    rank, fit, written = "GPU" if plan.gpu else "process", "", plan.output_bytes_per_sample
    if plan.gpu_memory_bytes is not None:
        fit = f"of {gib(plan.gpu_memory_bytes)}: {'fits' if plan.fits else 'DOES NOT FIT'}"
    yield "batch", f"{plan.batch_size:,}", f"on each of {plan.num_ranks} × {plan.gpu or rank}"
    yield "memory" if written is None else "encoders", gib(plan.memory_bytes), fit
    if written is not None:
        yield "one encoded sample", decimal(written, "B"), "times the number of samples"
    if (rate := plan.samples_per_second) is not None:
        of_each = f"{digits(rate / plan.num_ranks)} per {rank}"
        of_each += "" if plan.mfu is None else f", {plan.mfu:.0%} of its dense peak"
        yield "throughput", f"{digits(rate)} samples/s", of_each
    if plan.seconds is not None:
        of = "" if plan.samples is None else f"for {plan.samples:,} samples"
        yield "time", duration(plan.seconds), of
        return
    why = "no FLOPs of encoders are known" if written is not None else "no peak is known for CPUs"
    yield "time", "unknown", why if rate is None else "the samples are not here to be counted"
