"""Blocks with Triton kernels compute what those of PyTorch do, whatever their layers, or do not run.

Triton's interpreter runs the kernels here, in float32, so that nothing but the order of sums differs; and in
bfloat16 next to float64.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.ranks import CPU
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_model import random_flux
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError
from fluxtrain.launch.several_nodes import _differences
from fluxtrain.launch.torchrun import write_config
from fluxtrain.model import fp8
from fluxtrain.model.blocks import DoubleStreamBlock, SingleStreamBlock, rotation
from fluxtrain.model.lora import is_adapter
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel import parallelize
from fluxtrain.parallel.compile import kernels_on, resolve_kernels
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import DTYPES, build_model
from fluxtrain.train.loop import synthetic_batch

GPU = torch.device("cuda", 0)
MODULES = "fluxtrain.model.modulation", "fluxtrain.model.kernels"
Interpreted = Callable[..., ModuleType]
RUN: dict[str, Any] = {
    "preset": "micro",
    "initial_weights": "weights.safetensors",
    "model": {
        "hidden_size": 32,
        "num_heads": 2,
        "axes_dim": [4, 6, 6],
        "depth": 1,
        "depth_single_blocks": 1,
    },
    "data": {"latent_size": 6, "text_length": 7},  # 16 tokens, of which 9 are an image's
}
ADAPTER: dict[str, Any] = {"rank": 2, "double_blocks": "all", "single_blocks": "all"}
COMPILED = {"precision": {"compute": "bfloat16"}, "parallel": {"compile": None}}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"parallel": {"activation_checkpointing": 1.0}},
    "other widths": {"model": {"hidden_size": 96, "num_heads": 3, "axes_dim": [8, 12, 12]}},
    "lora": {"adapter": ADAPTER},
    "lora of one layer": {"adapter": {**ADAPTER, "layers": ["img_attn.qkv"]}},
    "split lora, dropout": {"adapter": {**ADAPTER, "split_qkv": True, "dropout": 0.3}},
    "lokr": {"adapter": {**ADAPTER, "kind": "lokr"}},
    "dora": {"adapter": {**ADAPTER, "dora": True}},
    "8 bits": {"adapter": {**ADAPTER, "base_dtype": "fp8"}},
    "offloaded": {"adapter": ADAPTER, "parallel": {"offload_blocks": 2}},
    "fp8 tensorwise": {"precision": {"compute": "bfloat16", "fp8": "tensorwise"}},
    "fp8 rowwise": {"precision": {"compute": "bfloat16", "fp8": "rowwise"}},
}
TOLERANCES = {"fp8 tensorwise": 0.2, "fp8 rowwise": 0.2}
"""In fp8 a last bit of bfloat16, which the interpreter cuts off, becomes as much as fp8's own error."""


def gradients(config: RunConfig, world: World, kernels: list[str]) -> dict[str, Tensor]:
    """Return the losses of three samples, and the gradients of all that is trained."""
    with mock.patch.object(parallelize, "kernels_on", return_value=kernels):
        model = build_model(config, world, random_flux(config.model).named_parameters())
    flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
    optim.make_optimizer(model, config.optim, DTYPES[config.precision.compute])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):  # some are zero, which would hide a lost gradient
                parameter.normal_(0, 0.1, generator=generator)
    batch = synthetic_batch(config, 3, CPU)
    for tensor in (batch.mean, batch.noise, batch.txt, batch.vec):
        tensor.normal_(generator=generator)
    batch.weights.fill_(1)
    losses = flow_loss(batch)
    torch.autograd.backward(losses.sum())
    found = {"losses": losses.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def require_equal(config: RunConfig, world: World, tolerance: float = 2e-5) -> None:
    plain, ours = (gradients(config, world, kernels) for kernels in ([], ["blocks"]))
    assert plain.keys() == ours.keys()
    for name, values in plain.items():
        error = (values.float() - ours[name].float()).norm()
        assert error <= tolerance * values.float().norm() + 1e-12, name


@pytest.mark.parametrize("layers", LAYERS)
def test_kernels_compute_the_same_with_any_layers(interpreted: Interpreted, layers: str) -> None:
    interpreted(*MODULES)
    config = resolve(merge_all(RUN, LAYERS[layers]))
    require_equal(config, World.alone(), TOLERANCES.get(layers, 2e-5))


def test_kernels_tell_the_largest_value_of_a_gradient_to_the_bit(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, rounded, told = interpreted(*MODULES), fp8.rounded, list[tuple[Tensor, Tensor]]()

    def noting(matrix: Tensor, *how: Any) -> Any:
        if isinstance(how[-1], Tensor):
            told.append((how[-1], matrix.float().abs().amax()))
        return rounded(matrix, *how)

    monkeypatch.setattr(fp8, "rounded", noting)
    gradients(resolve(merge_all(RUN, LAYERS["fp8 tensorwise"])), World.alone(), ["blocks"])
    assert len(told) == 3 * (2 + 2 * 4), "all layers of both blocks: gradients, weights twice"
    assert all(largest.equal(expected) for largest, expected in told)
    x, bad = torch.ones(1, 9, 32), torch.ones(1, 9, 32)
    bad[0, 7, 5] = torch.inf
    assert kernels._gelu_backward(bad, x, True)[-1].amax().isinf()
    bad[0, 1, 30] = torch.nan
    assert kernels._gelu_backward(bad, x, True)[-1].amax().isnan()


def in_ranks(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    ranks.interpret_triton(pytest.MonkeyPatch())
    ranks.set_environment(world, port)
    with process_group() as joined, mock.patch.object(parallelize, "uses_fsdp", return_value=True):
        require_equal(config, joined)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_kernels_compute_the_same_on_shards(tmp_path: Path, size: int) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    ranks.finish_all(in_ranks, tmp_path, size, resolve(RUN))


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter round to bfloat16 as GPUs do; it cuts the bits off."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    cut = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return cut(values, source, target, mode)
        numbers = torch.from_numpy(values.astype("float32")).bfloat16()
        return numbers.view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("width", "heads", "samples", "text"), [(128, 1, 1, 5), (16, 3, 2, 6), (16, 1, 2, 70)]
)
@pytest.mark.parametrize("kind", [SingleStreamBlock, DoubleStreamBlock])
def test_blocks_are_as_close_to_float64_as_those_of_pytorch(
    interpreted: Interpreted,
    kind: type[SingleStreamBlock | DoubleStreamBlock],
    width: int,
    heads: int,
    samples: int,
    text: int,
) -> None:
    kernels = interpreted(*MODULES)
    torch.manual_seed(0)
    block = kind(width * heads, heads, 4 * width * heads, 1e-6).bfloat16()
    right = kind(width * heads, heads, 4 * width * heads, 1e-6).double()
    right.load_state_dict(block.state_dict())
    is_single = kind is SingleStreamBlock
    lengths = [text + 8] if is_single else [8, text]
    streams = [torch.randn(samples, n, width * heads).bfloat16() for n in lengths]
    vec = torch.randn(samples, width * heads).bfloat16()
    by = rotation(torch.arange(text + 8.0)[:, None], (width,), 10_000)
    expected = passes(right, [each.double() for each in (*streams, vec)], by)
    errors = []
    for each in (kind, kernels.KernelSingleBlock if is_single else kernels.KernelDoubleBlock):
        block.__class__ = each
        found = passes(block, [*streams, vec], by)
        pairs = zip(found, expected, strict=True)
        errors.append([float((a - b).norm() / b.norm()) for a, b in pairs])
    theirs, ours = map(torch.tensor, errors)
    assert (ours <= 1.5 * theirs + 2**-9).all()
    assert ours.mean() <= 1.05 * theirs.mean()


def passes(block: nn.Module, inputs: list[Tensor], by: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the outputs of ``block``, and the gradients of ``inputs`` and of its parameters, in float64."""
    inputs = [each.clone().requires_grad_() for each in inputs]
    block.zero_grad()
    outputs = block(*inputs, by)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(
        outputs, [torch.randn(each.shape, generator=generator).to(each) for each in outputs]
    )
    tensors = *outputs, *(each.grad for each in (*inputs, *block.parameters()))
    return [each.detach().double() for each in tensors if each is not None]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # older dynamos do so
@pytest.mark.torch_range
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["KernelSingleBlock", "KernelDoubleBlock"])
def test_a_block_with_kernels_is_one_graph(kind: str, dynamic: bool, recomputed: bool) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    torch.compiler.reset()
    block = getattr(importlib.import_module(MODULES[-1]), kind)(32, 2, 128, 1e-6)
    if recomputed:
        block.forward = parallelize._recomputing(block.forward)
    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        raise NotImplementedError

    block.compile(fullgraph=True, dynamic=dynamic, backend=compiler)
    by = rotation(torch.arange(12.0)[:, None], (16,), 10_000)
    lengths = [12] if kind == "KernelSingleBlock" else [8, 4]
    streams = [torch.randn(2, n, 32, requires_grad=True) for n in lengths]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        block(*streams, torch.randn(2, 32, requires_grad=True), by)
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("changes", "capability", "expected"),
    [
        ({}, (9, 0), ["blocks", "optimizer"]),
        ({}, (7, 5), ["optimizer"]),
        ({"precision": {"compute": "float32"}}, (9, 0), ["optimizer"]),
        ({"precision": {"weights": "bfloat16"}}, (9, 0), ["blocks"]),
        ({"precision": {"fp8": "rowwise"}}, (9, 0), ["blocks", "optimizer"]),
        ({"optim": {"name": "lion"}}, (9, 0), ["blocks"]),
        ({"adapter": ADAPTER, "initial_weights": "w"}, (9, 0), ["blocks", "optimizer"]),
        ({"parallel": {"compile": False}}, (9, 0), []),
        ({"parallel": {"kernels": ["optimizer"]}}, (9, 0), ["optimizer"]),
        ({"parallel": {"kernels": []}}, (9, 0), []),
        (
            {"model": {"hidden_size": 48, "num_heads": 2, "axes_dim": [8, 8, 8]}},
            (9, 0),
            ["optimizer"],
        ),
        ({"model": {"mlp_ratio": 3.3}}, (9, 0), ["optimizer"]),
    ],
)
def test_kernels_run_where_the_run_and_the_gpu_allow(
    a_gpu: Callable[[tuple[int, int]], None],
    changes: dict[str, Any],
    capability: tuple[int, int],
    expected: list[str],
) -> None:
    a_gpu(capability)
    config = resolve(merge_all({"preset": "micro"}, COMPILED, changes))
    assert kernels_on(GPU, config) == expected
    assert kernels_on(CPU, resolve({"preset": "micro"})) == []


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"precision": {"compute": "float32"}}, "blocks", "bfloat16"),
        ({"optim": {"name": "lion"}}, "optimizer", "optim.name"),
        ({"parallel": {"compile": False}}, "blocks", "compiled"),
    ],
)
def test_a_kernel_that_is_named_and_cannot_run_is_refused(
    a_gpu: Callable[[tuple[int, int]], None], changes: dict[str, Any], name: str, reason: str
) -> None:
    a_gpu((9, 0))
    named = {"parallel": {"kernels": [name]}}
    config = resolve(merge_all({"preset": "micro"}, COMPILED, changes, named))
    with pytest.raises(ConfigError, match=rf"spec.run.parallel.kernels: got '{name}'; .*{reason}"):
        resolve_kernels(config, GPU)


def test_a_kernel_that_is_named_changes_no_model_on_another_machine() -> None:
    """A plan is verified, and a run evaluated, where the training could not run."""
    named = {"parallel": {"kernels": ["blocks", "optimizer"]}}
    model = parallelize.empty_model(resolve(merge_all(RUN, named)), World.alone())
    assert {type(block) for block in model.blocks} == {DoubleStreamBlock, SingleStreamBlock}


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, ["blocks", "optimizer"]), (False, [])])
def test_the_config_of_a_run_names_the_kernels(
    a_gpu: Callable[[tuple[int, int]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_gpu: bool,
    expected: list[str],
) -> None:
    a_gpu((9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = resolve(merge_all({"preset": "micro"}, COMPILED))
    path = write_config(config, tmp_path)
    assert json.loads(path.read_text())["parallel"]["kernels"] == expected
    assert _differences(config, path) == "", "a node that is refused has the fields of the others"


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Return a function that lets this machine seem to have a GPU, with all that compiling needs."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    monkeypatch.setenv("CC", "true")  # a program that exists

    def have(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return have
