"""The passes before training: they have the shapes of real batches, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tests.trainer.tiny_model import CPU, initialised
from torch import Tensor, nn

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import AnyBatch
from fluxtrain.data.loader import (
    evaluation_batch_size,
    evaluation_batches,
    training_batches,
)
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World
from fluxtrain.train import loop as module
from fluxtrain.train.loop import is_needed, prepare, synthetic_batch, warm_up

CONFIG = resolve(
    {
        "preset": "micro",
        "data": {"synthetic": {"validation_samples": 21}},
        "parallel": {"micro_batch_size": 6},
        "evaluation": {"batch_size": 5},
    }
)


def shapes(batch: AnyBatch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors().items()}


def test_the_shapes_are_those_of_every_batch() -> None:
    sources = open_sources(CONFIG, Path())
    shares = BatchShares.of(CONFIG, 2)
    size = evaluation_batch_size(CONFIG, 21, 2)
    kinds: list[tuple[Iterable[AnyBatch], int]] = [
        (training_batches(CONFIG, sources, shares, 1), shares.micro_batch_size),
        (evaluation_batches(CONFIG, sources.validation, 1, 2), size),
    ]
    for batches, expected in kinds:
        found = [shapes(batch) for batch, _ in zip(batches, range(5), strict=False)]
        assert found == [shapes(synthetic_batch(CONFIG, expected, CPU))] * len(found)


def test_a_warm_up_leaves_nothing_behind() -> None:
    model = initialised(CONFIG.model)
    passes = list[tuple[bool, bool, int]]()

    def record(
        module: nn.Module, inputs: object, options: dict[str, Tensor], output: Tensor
    ) -> None:
        passes.append((module.training, output.requires_grad, len(options["img"])))

    model.register_forward_hook(record, with_kwargs=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    signs = list[None]()
    warm_up(FlowLoss(model, CONFIG, torch.float32), 4, 5, CPU, lambda: signs.append(None))
    assert passes == [(True, True, 4), (False, False, 5)]
    assert len(signs) == 3
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_without_an_evaluation_only_a_training_batch_is_passed() -> None:
    model = initialised(CONFIG.model)
    sizes = list[int]()
    model.register_forward_pre_hook(
        lambda module, inputs, options: sizes.append(len(options["img"])), with_kwargs=True
    )
    warm_up(FlowLoss(model, CONFIG, torch.float32), 3, None, CPU)
    assert sizes == [3]


def test_a_model_that_cannot_be_compiled_on_gpus_is_passed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU without Triton is played by an unknown device: meta."""
    device = torch.device("meta")
    monkeypatch.setattr(module, "compiles", lambda parallel, device: False)
    monkeypatch.setattr(module, "missing_compiler", lambda device: "Triton is missing")
    config = resolve({"preset": "micro", "parallel": {"compile": None}})
    with device:
        flow_loss = FlowLoss(Flux(config.model), config, torch.float32)
    prepare(flow_loss, (2, None), World(0, 0, 1, device), tmp_path)
    assert "blocks are not compiled: Triton is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("node", "has_file"), [(0, False), (0, True), (1, False)])
def test_the_first_node_keeps_what_it_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, has_file: bool
) -> None:
    calls = list[str]()

    class Cache:
        @staticmethod
        def of(*arguments: object) -> Cache:
            return Cache()

        def load(self) -> bool:
            calls.append("load")
            return has_file

        def save(self) -> None:
            calls.append("save")

    monkeypatch.setattr(module, "CompileCache", Cache)
    monkeypatch.setattr(module, "compiles", lambda parallel, device: True)
    flow_loss = FlowLoss(initialised(CONFIG.model), CONFIG, torch.float32)
    prepare(flow_loss, (2, None), World(node, 0, 2, CPU, num_nodes=2), tmp_path)
    assert calls == ["load"] + ["save"] * (node == 0 and not has_file)


def test_an_eager_model_on_a_cpu_waits_for_nothing() -> None:
    assert not is_needed(CONFIG, World.alone())
    assert is_needed(CONFIG, World(0, 0, 1, torch.device("cuda", 0)))
