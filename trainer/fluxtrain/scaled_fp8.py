"""Weights in fp8 (e4m3 or e5m2) as ComfyUI's files have them: plain, or with a scale beside each.

| tensor                                          | meaning                                            |
|-------------------------------------------------|----------------------------------------------------|
| LAYER.weight                                    | values in e4m3, or e5m2                            |
| LAYER.scale_weight, LAYER.weight_scale          | float32 factor of all of them, or of each row      |
| LAYER.scale_input, LAYER.input_scale            | for products in fp8; not read                      |
| scaled_fp8, LAYER.comfy_quant                   | mark such a file and layer; not read               |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Types of such weights by their names in safetensors files."""
DTYPES = {**FP8, "U8": torch.uint8}
"""Types of all these tensors."""
_SCALES = (".scale_weight", ".weight_scale")
_NOT_READ = (".scale_input", ".input_scale", ".comfy_quant")
_MARKER = "scaled_fp8"
_EMBEDDINGS = ("shared.", "embed", "relative_attention_bias.")
"""Parts of the names of embeddings, whose values are looked up as they are."""


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


def require_scales(in_fp8: Mapping[str, Sequence[int]], names: Collection[str]) -> None:
    """Raise ValueError naming the first of the weights ``in_fp8``, by their shapes, without one scale.

    ``names`` are all tensors of the file. One without any scale has plain values. Embeddings have none.
    """
    scales = scales_of(names)
    if not scales and _MARKER not in names:
        return
    for name, shape in in_fp8.items():
        layer = name.removesuffix(".weight")
        if all(f"{layer}{suffix}" in names for suffix in _SCALES):
            raise ValueError(f"{name} has two scales, {' and '.join(_SCALES)}")
        is_layer = name.endswith(".weight") and len(shape) > 1
        if is_layer and name not in scales and not any(part in name for part in _EMBEDDINGS):
            raise ValueError(f"{name} is in fp8 without a scale, which the file has for others")


def require_shape(scale: Sequence[int], num_rows: int) -> None:
    """Raise ValueError unless a scale of this shape is one number, or one for each of ``num_rows``."""
    count = prod(scale)
    if count not in (1, num_rows) or (count > 1 and scale[0] != count):
        shape = list(scale)
        raise ValueError(
            f"has a scale of shape {shape} for {num_rows} rows: one number, or one a row"
        )


def require_usable(scale: Tensor, num_rows: int) -> None:
    """Raise ValueError unless ``scale`` is a positive number, or one for each of ``num_rows``."""
    require_shape(scale.shape, num_rows)
    factors = scale.float()
    if not (torch.isfinite(factors) & (factors > 0)).all():
        raise ValueError("has a scale that is not a positive, finite number")


def unscaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``values``, whose first axis has the rows, times ``scale``; float32 if they are in fp8.

    Raises ValueError if the scale is of no use, or a value in fp8 is not finite: a cast without a scale makes
    NaN of what is too large.
    """
    is_fp8 = values.dtype in FP8.values()
    found = values.float() if is_fp8 or scale is not None else values
    if scale is not None:
        require_usable(scale, values.shape[0])
        found = found * scale.float().reshape(-1, *(1 for _ in values.shape[1:]))
    if is_fp8 and not found.isfinite().all():
        raise ValueError("is in fp8 and has values that are not finite")
    return found
