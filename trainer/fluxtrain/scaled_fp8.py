"""Weights in fp8 (e4m3) as ComfyUI's files have them: plain, or with a scale beside each.

| tensor                                          | meaning                                            |
|-------------------------------------------------|----------------------------------------------------|
| LAYER.weight                                    | values in e4m3                                     |
| LAYER.scale_weight, LAYER.weight_scale          | float32 factor of all of them, or of each row      |
| LAYER.scale_input, LAYER.input_scale            | for products in fp8; not read                      |
| scaled_fp8, LAYER.comfy_quant                   | mark such a file and layer; not read               |
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
"""Types of these tensors in safetensors files."""
_SCALES = (".scale_weight", ".weight_scale")
_NOT_READ = (".scale_input", ".input_scale", ".comfy_quant")
_MARKER = "scaled_fp8"


def is_beside(name: str) -> bool:
    """Return whether tensor ``name`` is a scale or a mark, and no weight of the model."""
    return name == _MARKER or name.endswith((*_SCALES, *_NOT_READ))


def scales_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names of scales among ``names``, by those of their weights."""
    return {
        f"{name.removesuffix(suffix)}.weight": name
        for name in names
        for suffix in _SCALES
        if name.endswith(suffix)
    }


def unscaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``values``, whose first axis has the rows, times ``scale``; float32 if they are in fp8.

    Raises ValueError if the scale is neither one number nor one for each row, or is no usable number.
    """
    if scale is None:
        return values.float() if values.dtype == torch.float8_e4m3fn else values
    if scale.numel() not in (1, values.shape[0]):
        raise ValueError(f"has {scale.numel()} scales for {values.shape[0]} rows")
    factors = scale.float().reshape(-1, *(1 for _ in values.shape[1:]))
    if not torch.isfinite(factors).all():
        raise ValueError("has a scale that is not finite")
    return values.float() * factors
