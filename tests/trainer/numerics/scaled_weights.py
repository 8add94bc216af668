"""Weights in fp8 as ComfyUI's files have them, and the values that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

State = dict[str, Tensor]
KINDS = ("plain", "scale_weight", "weight_scale", "rows")
_LARGEST = 448.0


def in_fp8(state: State, kind: str) -> tuple[State, State]:
    """Return ``state`` with its matrices in fp8, of one of KINDS, and what a reader has to return."""
    stored: State = (
        {} if kind == "plain" else {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    )
    expected: State = {}
    for name, value in state.items():
        if value.dim() != 2 or not name.endswith(".weight"):
            stored[name] = expected[name] = value
            continue
        axes = (1,) if kind == "rows" else (0, 1)
        scale = value.float().abs().amax(axes, keepdim=True) / _LARGEST
        scale = torch.ones(1, 1) if kind == "plain" else scale
        stored[name] = (value.float() / scale).to(torch.float8_e4m3fn)
        expected[name] = stored[name].float() * scale
        if kind != "plain":
            suffix = "scale_weight" if kind == "scale_weight" else "weight_scale"
            layer = name.removesuffix(".weight")
            stored[f"{layer}.{suffix}"] = scale.flatten() if kind == "rows" else scale.reshape(())
            stored[f"{layer}.scale_input"] = torch.tensor(1.0)
            stored[f"{layer}.comfy_quant"] = torch.zeros(9, dtype=torch.uint8)
    return stored, expected
