"""FLOPs and memory peaks of blocks against torch's counter and tracker."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tests.trainer.tiny_model import SMALL
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.blocks import DoubleStreamBlock, SingleStreamBlock
from fluxtrain.model.cost import (
    double_block_moments,
    forward_flops,
    single_block_moments,
    training_flops,
)
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import use_fp8
from fluxtrain.parallel.compile import attention_backend

pytestmark = pytest.mark.slow

CONFIGS = {
    "small": SMALL,
    "guidance": SMALL.model_copy(update={"guidance_embed": True}),
    "narrow MLP": SMALL.model_copy(update={"mlp_ratio": 1.3, "in_channels": 32}),
    "no double blocks": SMALL.model_copy(update={"depth": 0}),
}


def counted(
    config: ModelConfig, image_tokens: int, text_tokens: int, device: str
) -> tuple[int, int]:
    """Return forward FLOPs, and forward and backward FLOPs, as torch counts them for one sample."""
    with torch.device(device):
        model = Flux(config)
        arguments = {
            "img": torch.zeros(1, image_tokens, config.in_channels),
            "img_ids": torch.zeros(image_tokens, 3),
            "txt": torch.zeros(1, text_tokens, config.context_in_dim),
            "txt_ids": torch.zeros(text_tokens, 3),
            "timesteps": torch.zeros(1),
            "y": torch.zeros(1, config.vec_in_dim),
            "guidance": torch.zeros(1) if config.guidance_embed else None,
        }
    # the counter does not support the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(**arguments).sum()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "tokens"), [("small", (16, 5)), *((name, (4, 64)) for name in CONFIGS)]
)
def test_flops_of_small_models_equal_torchs_count(name: str, tokens: tuple[int, int]) -> None:
    config = CONFIGS[name]
    ours = forward_flops(config, *tokens), training_flops(config, *tokens)
    assert ours == counted(config, *tokens, device="cpu")


@pytest.mark.parametrize(
    ("tokens", "forward", "training"),
    [
        ((256, 256), 6_806_745_120_768, 20_413_685_956_608),
        pytest.param((4096, 512), 74_384_632_971_264, 223_139_397_107_712, marks=pytest.mark.slow),
    ],
)
def test_flops_of_the_full_model_equal_torchs_count(
    tokens: tuple[int, int], forward: int, training: int
) -> None:
    schnell = ModelConfig()
    assert (forward_flops(schnell, *tokens), training_flops(schnell, *tokens)) == (
        forward,
        training,
    )
    assert counted(schnell, *tokens, device="meta") == (forward, training)


CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def make_config(
    latent_size: int, text: int, compute: str, attention: str, fp8: str = "none"
) -> RunConfig:
    return resolve(
        {
            "preset": "dev-finetune",
            "data": {"latent_size": latent_size, "text_length": text},
            "precision": {"compute": compute, "fp8": fp8},
            "parallel": {"compile": False, "attention": attention},
        }
    )


def measured(block: nn.Module, inputs: list[Tensor], vec: Tensor, tokens: int) -> tuple[int, int]:
    """Return the peaks of the forward and of the backward pass, without the weights."""
    weights = sum(p.nbytes for p in block.parameters())
    tracker = MemTracker()
    tracker.track_external(block, *inputs, vec)
    positions = torch.empty(tokens, 64), torch.empty(tokens, 64)
    with tracker:
        outputs = block(*inputs, vec, positions)
        forward = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.empty_like(output) for output in outputs]
        tracker._peak_mem = dict.fromkeys(tracker._peak_mem, 0)  # of the backward pass alone
        torch.autograd.backward(outputs, gradients)
    return forward - weights, tracker.get_tracker_snapshot("peak")[CPU]["Total"] - weights


def errors(kind: str, config: RunConfig, batch: int) -> tuple[float, float]:
    """Return the relative errors of the planned peaks of a forward and a backward pass."""
    hidden, heads = config.model.hidden_size, config.model.num_heads
    image, text = config.image_tokens, config.data.text_length
    dtype = DTYPES[config.precision.compute]
    make: Any = DoubleStreamBlock if kind == "double" else SingleStreamBlock
    streams = (image, text) if kind == "double" else (image + text,)
    with FakeTensorMode():
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            block = make(hidden, heads, 4 * hidden, 1e-6)
        finally:
            torch.set_default_dtype(default)
        if config.precision.fp8 != "none":
            model = nn.ModuleDict({f"{kind}_blocks": nn.ModuleList([block])})
            use_fp8(cast(Flux, model), config.precision.fp8, CPU)
        inputs = [torch.empty(batch, n, hidden, dtype=dtype, requires_grad=True) for n in streams]
        vec = torch.empty(batch, hidden, dtype=dtype, requires_grad=True)
        with attention_backend(config.parallel.attention):
            forward, backward = measured(block, inputs, vec, image + text)
    moments = (double_block_moments if kind == "double" else single_block_moments)(config)
    saved, outputs = batch * moments.saved, batch * moments.inputs
    peaks = [
        saved + batch * moment.activations + dtype.itemsize * moment.gradients
        for moment in moments.backward
    ]
    planned = saved + batch * moments.forward.activations
    return planned / forward - 1, (max(peaks) + outputs) / backward - 1  # here the outputs live on


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("latent_size", "text", "batch", "attention"),
    [
        (32, 256, 8, "flash"),
        (64, 128, 8, "flash"),
        (16, 512, 16, "flash"),
        (32, 256, 8, "math"),
        (64, 1024, 4, "math"),
    ],
)
@pytest.mark.parametrize("kind", ["double", "single"])
def test_peaks_are_as_counted(
    kind: str, latent_size: int, text: int, batch: int, attention: str, compute: str
) -> None:
    config = make_config(latent_size, text, compute, attention)
    assert errors(kind, config, batch) == pytest.approx((0, 0), abs=0.02)


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("latent_size", "text"), [(32, 256), (64, 128)])
@pytest.mark.parametrize("kind", ["double", "single"])
def test_peaks_with_copies_of_rounding_are_as_counted(
    kind: str, latent_size: int, text: int, fp8: str
) -> None:
    config = make_config(latent_size, text, "bfloat16", "flash", fp8)
    assert errors(kind, config, batch=8) == pytest.approx((0, 0), abs=0.05)
