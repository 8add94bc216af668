"""One optimizer step reads no number on the host, and copies nothing to the device but the batch.

Replicas reduce their gradients once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.numerics.full_tensor import full_tensor
from tests.trainer.ranks import CPU
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import AnyBatch, Batch
from fluxtrain.data.loader import training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import DTYPES, build_model
from fluxtrain.parallel.traffic import AXES, all_reduces_each
from fluxtrain.plan.measurement import Recorder
from fluxtrain.runtime.step_times import StepTimes
from fluxtrain.train.loop import synthetic_batch
from fluxtrain.train.step import add_gradients, update

GPU = torch.device("cuda", 0)
MANY = 64
MODELS: list[dict[str, Any]] = [{}, {"guidance_embed": True}]


def make_config(model: dict[str, Any]) -> RunConfig:
    return resolve({"preset": "micro", "model": model, "parallel": {"micro_batch_size": 8}})


def unchanged(batch: AnyBatch) -> Batch:
    assert isinstance(batch, Batch)
    return batch


class Copies(TorchDispatchMode):
    """Counts the copies between devices, and the operations in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.between_devices = self.in_float64 = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        if isinstance(result, Tensor):
            self.between_devices += any(tensor.device != result.device for tensor in tensors)
            self.in_float64 += result.dtype == torch.float64
        return result


OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"ema_decay": 0.9},
    {"name": "adafactor"},
    {"name": "lion"},
    {"name": "prodigy", "learning_rate": 1.0, "prodigy": {"bias_correction": True}},
    {"name": "schedule_free_adamw"},
]


@pytest.mark.parametrize("optimizer_fields", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_no_number_is_read_on_the_host(
    model: dict[str, Any], optimizer_fields: dict[str, Any]
) -> None:
    optimizer_config = OptimConfig(**optimizer_fields)
    config = make_config(model).model_copy(update={"optim": optimizer_config})
    with FakeTensorMode():  # whose tensors have no values: to read one is an error
        model, times = Flux(config.model), StepTimes(CPU)
        flow_loss = FlowLoss(model, config, torch.float32)
        optimizer = optim.make_optimizer(model, config.optim)
        batch, bad_step = synthetic_batch(config, 8, CPU), torch.tensor(optim.NEVER)
        for number in (1, 2):
            for is_last in (False, True):
                losses, _ = add_gradients(flow_loss, unchanged, batch, 16.0, times, is_last)
            norm, bad_step = update(optimizer, config, number, bad_step, times)
        for value in (norm, bad_step, losses.sum()):
            with pytest.raises(DataDependentOutputException):
                value.item()


@pytest.mark.parametrize("model", MODELS)
def test_only_the_first_pass_copies_positions_and_computes_rotations(
    model: dict[str, Any],
) -> None:
    config = make_config(model)
    with FakeTensorMode():
        with GPU:
            flow_loss = FlowLoss(Flux(config.model), config, torch.float32)
        batches = [synthetic_batch(config, size, GPU) for size in (8, 5)]
        with Copies() as first:
            flow_loss(batches[0])
        with Copies() as later:
            for batch in batches:
                flow_loss(batch)
    assert first.between_devices == 2
    assert first.in_float64
    assert (later.between_devices, later.in_float64) == (0, 0)


def write_gradients(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Write the gradients of two micro batches, and how often they were reduced between replicas.

    Once as a step has them, once with both reduced like the last one.
    """
    with process_group() as joined:
        model = build_model(config, joined)
        flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
        shares = BatchShares.of(config, joined.size)
        assert shares.accumulation_steps == 2
        batches = training_batches(config, open_sources(config, Path()), shares, joined.rank)
        both = [next(batches) for _ in range(2)]
        mesh = next(model.parameters()).device_mesh
        groups = {axis: mesh.get_group(axis) for axis in AXES}
        for name, first_is_last in (("step", False), ("each", True)):
            with Recorder(groups) as recorder:
                for batch, is_last in zip(both, (first_is_last, True), strict=True):
                    add_gradients(flow_loss, unchanged, batch, 4.0, StepTimes(CPU), is_last)
            gradients = {n: full_tensor(p.grad) for n, p in model.named_parameters()}
            calls = {(each.axis, each.operation): each.calls for each in recorder.collectives()}
            if joined.is_main:
                torch.save((gradients, calls), paths.output / f"{name}.pt")
            model.zero_grad()


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_replicas_reduce_the_sum_of_a_steps_gradients(tmp_path: Path, reduce: str) -> None:
    config = resolve(
        {
            "preset": "micro",
            "parallel": {"dp_replicate": 2, "micro_batch_size": 2},
            "precision": {"reduce": reduce},
        }
    )
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert ranks.finish(write_gradients, config, paths, size=4) == [0] * 4, ranks.output_of(paths)
    (found, calls), (each, calls_of_each) = (
        torch.load(tmp_path / f"{name}.pt") for name in ("step", "each")
    )
    torch.testing.assert_close(found, each)
    between, within = ("dp_replicate", "all_reduce"), ("dp_shard", "reduce_scatter")
    groups = config.model.depth + config.model.depth_single_blocks + 1
    assert calls_of_each[between] == calls[within] == calls_of_each[within] == 2 * groups
    assert all_reduces_each(config) == (reduce == "bfloat16")
    assert calls[between] == (2 * groups if reduce == "bfloat16" else groups)


def write_sums(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Write the gradients of MANY times the same micro batch, reduced in float32 and in bfloat16."""
    with process_group() as joined:
        for reduce in ("float32", "bfloat16"):
            changed = config.precision.model_copy(update={"reduce": reduce})
            config = config.model_copy(update={"precision": changed})
            flow_loss = FlowLoss(build_model(config, joined), config, torch.float32)
            shares = BatchShares.of(config, joined.size)
            batch = next(
                training_batches(config, open_sources(config, Path()), shares, joined.rank)
            )
            for number in range(1, MANY + 1):
                is_last = number == MANY
                add_gradients(flow_loss, unchanged, batch, 4.0, StepTimes(CPU), is_last)
            named = flow_loss.model.named_parameters()
            gradients = {name: full_tensor(parameter.grad) for name, parameter in named}
            if joined.is_main:
                torch.save(gradients, paths.output / f"{reduce}.pt")


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)], ids=["plain", "replicas"])
def test_gradients_reduced_in_bfloat16_accumulate_in_float32(
    tmp_path: Path, size: int, replicas: int
) -> None:
    """In bfloat16 the later ones of as many would be lost beside the sum, some five per cent of it."""
    parallel = {"dp_replicate": replicas, "micro_batch_size": 1}
    config = resolve({"preset": "micro", "parallel": parallel})
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert ranks.finish(write_sums, config, paths, size) == [0] * size, ranks.output_of(paths)
    exact, rounded = (torch.load(tmp_path / f"{name}.pt") for name in ("float32", "bfloat16"))
    errors = [float((rounded[name] - g).norm() / g.norm()) for name, g in exact.items() if g.any()]
    assert 0 < max(errors) < torch.finfo(torch.bfloat16).eps
    assert {gradient.dtype for gradient in rounded.values()} == {torch.float32}
