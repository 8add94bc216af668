"""One optimizer step reads no number on the host, and copies nothing to the device but the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.trainer.ranks import CPU
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fluxtrain import optim
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.batch import Batch
from fluxtrain.data.loader import AnyBatch
from fluxtrain.loss import FlowLoss
from fluxtrain.model.flux import Flux
from fluxtrain.optimizer_step import add_gradients, update
from fluxtrain.step_times import StepTimes
from fluxtrain.warm_up import synthetic_batch

GPU = torch.device("cuda", 0)
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


@pytest.mark.parametrize("model", MODELS)
def test_no_number_is_read_on_the_host(model: dict[str, Any]) -> None:
    config = make_config(model)
    with FakeTensorMode():  # whose tensors have no values: to read one is an error
        model, times = Flux(config.model), StepTimes(CPU)
        flow_loss = FlowLoss(model, config, torch.float32)
        optimizer = optim.make_optimizer(model, config.optim)
        batch, bad_step = synthetic_batch(config, 8, CPU), torch.tensor(optim.NEVER)
        for number in (1, 2):
            for _ in range(2):
                losses, _ = add_gradients(flow_loss, unchanged, batch, 16.0, times)
            norm, bad_step = update(model, optimizer, config, number, bad_step, times)
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
