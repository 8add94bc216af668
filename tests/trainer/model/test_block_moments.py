"""The peaks of a block's passes against those that torch's memory tracker measures, on fake tensors."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.blocks import DoubleStreamBlock, SingleStreamBlock
from fluxtrain.model.cost import double_block_moments, single_block_moments
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import use_fp8
from fluxtrain.parallel.compile import attention_backend

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
