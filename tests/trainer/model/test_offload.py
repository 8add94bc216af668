"""Frozen weights in host memory: runs are equal to the last bit, and two blocks are on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import in_process
from tests.trainer.outputs import losses
from tests.trainer.ranks import CPU
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_model import random_flux, save_flux
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError
from fluxtrain.model import offloading as offloading_module
from fluxtrain.model.cost import copied_bytes, host_sizes, offloaded_blocks
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.model.offloading import Offloading, Ring
from fluxtrain.parallel import compile
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import DTYPES, build_model
from fluxtrain.plan.estimate import make_plan
from fluxtrain.sample.denoise import sample_latents
from fluxtrain.sample.prompts import Prompt
from fluxtrain.train.loop import synthetic_batch
from fluxtrain.weights.reader import open_weights

NUM_BLOCKS = 7
RUN: dict[str, Any] = {
    "preset": "micro",
    "initial_weights": "weights.safetensors",
    "model": {"depth": 3, "depth_single_blocks": 4},
    "adapter": {"rank": 4},
    "schedule": {"steps": 4, "warmup_steps": 0},
    "parallel": {"micro_batch_size": 4},  # gradients accumulate on one rank
    "evaluation": {"every_samples": 32, "at_start": True},
    "adapter_file": {"every_steps": 0, "dtype": "float32"},
    "checkpoint": {"every_steps": 2, "memory_every_steps": 0, "asynchronous": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
HALF = {"precision": {"compute": "bfloat16"}}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dropout": {"adapter": {"dropout": 0.2, "module_dropout": 0.1}, **HALF},
    "dora in 8 bits": {"adapter": {"dora": True, "base_dtype": "fp8"}, **HALF},
    "lokr": {"adapter": {"kind": "lokr"}, **HALF},
    "loha": {"adapter": {"kind": "loha"}, **HALF},
    "some blocks": {"adapter": {"double_blocks": "none", "single_blocks": "2"}},
}


def offloading(count: int, **parallel: Any) -> dict[str, Any]:
    return {"parallel": {"offload_blocks": count, **parallel}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models root with random weights."""
    folder = tmp_path_factory.mktemp("models")
    save_flux(random_flux(resolve(RUN).model), folder)
    return folder


def build(models: Path, *changes: dict[str, Any]) -> tuple[RunConfig, Flux]:
    config = resolve(merge_all(RUN, *changes))
    weights = open_weights(models / "weights.safetensors")
    return config, build_model(config, World.alone(), weights.read(list(weights.shapes)))


def refuses(memory: Tensor) -> bool:
    return False


def fails(memory: Tensor) -> bool:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("pin", [refuses, fails])
@pytest.mark.parametrize("pinned", [0, 2])
def test_memory_that_is_not_page_locked_is_an_error(
    pin: Callable[[Tensor], bool], pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        blocks = {f"{i}": nn.Linear(10, 10 + i).requires_grad_(False) for i in range(4)}
    answers = iter([*[lambda memory: True] * pinned, pin])
    monkeypatch.setattr(offloading_module, "pin", lambda memory: next(answers)(memory))
    with pytest.raises(ConfigError) as caught:
        Offloading(blocks).allocate(torch.device("cuda"))
    text = "spec.run.parallel.offload_blocks: got 4; each rank needs 3,328 bytes of page-locked host memory"
    assert text in str(caught.value)
    assert f"refused 768 of them after {pinned * 768:,}, those of {pinned} blocks" in str(
        caught.value
    )
    assert "(ulimit -l) or the memory of the pod, or offload fewer blocks" in str(caught.value)


def gradients_of(models: Path, *changes: dict[str, Any]) -> list[Tensor]:
    """Return the losses of three passes forward and backward, of evaluations, and all gradients."""
    config, model = build(models, *changes)
    compute = DTYPES[config.precision.compute]
    optimizer = optim.make_optimizer(model, config.optim, compute)
    flow_loss, batch = FlowLoss(model, config, compute), synthetic_batch(config, 2, CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in (batch.mean, batch.noise, batch.txt, batch.vec):
        tensor.normal_(generator=generator)
    batch.weights.fill_(1)
    batch.keys.copy_(torch.tensor([11, 12]))
    trained = [each for each in model.parameters() if each.requires_grad]
    numbers = list[Tensor]()
    for _ in range(3):
        for parameter in trained:  # adapters begin without effect
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise.to(parameter.dtype), alpha=0.02)
        losses = flow_loss.training(batch)
        torch.autograd.backward(losses.sum())
        numbers += [losses.detach(), *(_gradient(each).clone() for each in trained)]
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            numbers.append(flow_loss(batch))
    return numbers


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("lora", 0.0), ("lora", 0.5), ("dropout", 1.0), ("dora in 8 bits", 0.5), ("lokr", 1.0),
     ("some blocks", 0.0)],
)  # fmt: skip
def test_losses_and_gradients_are_those_without(models: Path, kind: str, recompute: float) -> None:
    change = KINDS[kind]
    expected = gradients_of(models, change, offloading(0, activation_checkpointing=recompute))
    assert sum(each.any().item() for each in expected) > 0.8 * len(expected)
    for count in (1, 3, NUM_BLOCKS):
        found = gradients_of(models, change, offloading(count, activation_checkpointing=recompute))
        assert all(map(torch.equal, found, expected)), count


def finish(models: Path, output: Path, size: int, *changes: dict[str, Any], crash: int = 0) -> None:
    """Train on ``size`` ranks, which crash after step ``crash``."""
    config = resolve(merge_all(RUN, *changes))
    in_process.train(config, RunPaths(output, output, models), size, crash)


def results_of(output: Path) -> tuple[Any, ...]:
    """Return the losses, and the contents of all files of weights."""
    files = {path.relative_to(output): path.read_bytes() for path in output.rglob("*.safetensors")}
    assert any("checkpoints" in path.parts for path in files)
    assert any("adapters" in path.parts for path in files)
    return losses(output), losses(output, "eval_loss"), files


@pytest.mark.parametrize("change", [{}, {**KINDS["dora in 8 bits"], "optim": {"ema_decay": 0.9}}])
def test_a_run_writes_the_same_files(models: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    outputs = tmp_path / "without", tmp_path / "with"
    for output, count in zip(outputs, (0, 5), strict=True):
        finish(models, output, 1, change, offloading(count, activation_checkpointing=0.5))
    without, found = map(results_of, outputs)
    assert found == without


@pytest.mark.slow
@pytest.mark.parametrize(("size", "parallel"), [
    (2, {}), (3, {"reshard_after_forward": False}), 
])  # fmt: skip
def test_ranks_that_crash_and_offload_more_write_the_same_files(
    models: Path, tmp_path: Path, size: int, parallel: dict[str, Any]
) -> None:
    adapters = {**KINDS["some blocks"], **HALF}  # some blocks have nothing that FSDP2 shards
    outputs = tmp_path / "without", tmp_path / "with"
    finish(models, outputs[0], size, adapters, offloading(0, **parallel))
    finish(models, outputs[1], size, adapters, offloading(3, **parallel), crash=3)
    finish(models, outputs[1], size, adapters, offloading(NUM_BLOCKS, **parallel))
    without, found = map(results_of, outputs)
    assert found == without


class LateCopies:
    """Copies that are done at the last moment; until then the buffers have no numbers."""

    def __init__(self) -> None:
        self._waiting = dict[int, tuple[Tensor, Tensor]]()

    def begin(self, place: int, buffer: Tensor, host: Tensor) -> None:
        buffer.fill_(255)
        self._waiting[place] = buffer, host

    def wait(self, place: int) -> None:
        if place in self._waiting:
            buffer, host = self._waiting.pop(place)
            buffer.copy_(host)


@pytest.mark.parametrize("recompute", [0.0, 0.5])
def test_passes_wait_for_copies_and_copies_for_passes(
    models: Path, monkeypatch: pytest.MonkeyPatch, recompute: float
) -> None:
    expected = gradients_of(models, offloading(0, activation_checkpointing=recompute))
    monkeypatch.setattr(offloading_module, "_AtOnce", LateCopies)
    for count in (3, NUM_BLOCKS):
        found = gradients_of(models, offloading(count, activation_checkpointing=recompute))
        assert all(map(torch.equal, found, expected)), count


@pytest.mark.parametrize(
    ("count", "expected"), [(0, []), (1, [6]), (3, [2, 4, 6]), (7, [*range(7)])]
)
def test_blocks_are_spread_evenly(count: int, expected: list[int]) -> None:
    assert offloaded_blocks(resolve(merge_all(RUN, offloading(count)))) == expected


@pytest.mark.parametrize("kind", ["lora", "dora in 8 bits"])
def test_two_buffers_are_all_that_parameters_and_autograd_refer_to(models: Path, kind: str) -> None:
    config, model = build(models, KINDS[kind], offloading(NUM_BLOCKS))
    assert model.offloading is not None
    buffers = {buffer.data_ptr(): len(buffer) for buffer in model.offloading.ring.buffers}
    sizes = host_sizes(config)
    assert sum(host.untyped_storage().nbytes() for host in model.offloading.ring.hosts) == sum(
        sizes
    )
    assert sorted(buffers.values()) == sorted([max(sizes[::2]), max(sizes[1::2])])
    names = model.offloading.host
    frozen = {name: each for name, each in model.named_parameters() if name in names}
    matrices = [each for each in frozen.values() if each.dim() == 2]
    assert frozen.keys() == names.keys()
    assert all(each.untyped_storage().data_ptr() in buffers for each in frozen.values())
    shapes = {shape for each in matrices for shape in (each.shape, each.mT.shape)}
    saved = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and tensor.shape in shapes:
            saved.append(tensor)
        return tensor

    compute = DTYPES[config.precision.compute]
    optim.make_optimizer(model, config.optim, compute)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        FlowLoss(model, config, compute)(synthetic_batch(config, 3, CPU))
    assert len(saved) >= 2 * NUM_BLOCKS
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} == buffers.keys()


def test_steps_copy_what_is_planned(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = build(models, offloading(5))
    flow_loss, batch = FlowLoss(model, config, torch.float32), synthetic_batch(config, 2, CPU)
    copied, buffer, sizes = list[int](), Ring.buffer, host_sizes(config)

    def counting(ring: Ring, number: int) -> Tensor:
        copied.append(sizes[number])
        return buffer(ring, number)

    def taken() -> int:
        total = sum(copied)
        copied.clear()
        return total

    monkeypatch.setattr(Ring, "buffer", counting)
    for expected in (sum(sizes) + sum(sizes[:-2]), copied_bytes(sizes), copied_bytes(sizes)):
        torch.autograd.backward(flow_loss(batch).sum())
        assert taken() == expected
    with torch.no_grad():
        for expected in (sum(sizes[2:]), sum(sizes)):
            flow_loss(batch)
            assert taken() == expected
    assert make_plan(config, 1, 1).offload_copied_bytes_per_step == 4 * copied_bytes(sizes)


def test_images_are_those_without(models: Path) -> None:
    found = []
    for count in (0, 3):
        config, model = build(models, offloading(count))
        size = config.data.image_size
        prompt = Prompt("", size, size, seed=1, index=0, num_steps=3, cfg_scale=1.0, guidance=None)
        text = (
            torch.ones(config.data.text_length, config.model.context_in_dim),
            torch.ones(config.model.vec_in_dim),
        )
        flow_loss = FlowLoss(model.eval(), config, torch.float32)
        found.append(sample_latents(flow_loss, [prompt], [text], [text], [None], World.alone())[0])
    assert torch.equal(*found)


@pytest.mark.proof
# torch's tracer means to hide its own warning, but cannot hide errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_compute_the_same_with_as_many_graphs(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "BACKEND", "aot_eager_decomp_partition")
    found, graphs = [], []
    for count in (0, NUM_BLOCKS):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        options = {"compile": True, "activation_checkpointing": 0.5}
        found.append(gradients_of(models, HALF, offloading(count, **options)))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert all(map(torch.equal, *found))
    assert graphs[0] == graphs[1]
