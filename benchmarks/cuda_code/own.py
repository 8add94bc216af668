"""What the trainer's own kernels read and write, in bytes, by the arguments of a launch.

Their gradients and activations are in bfloat16. Tables of angles and weights of norms stay in caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def _heads(values: Mapping[str, Any]) -> int:
    """Return the bytes of a launch of `_write_heads`: q, k and perhaps v, read and written."""
    parts = values["y_row"] // (values["heads"] * values["width"])
    return 2 * 2 * values["count"] * parts * values["heads"] * values["width"]


def _gradients(values: Mapping[str, Any]) -> int:
    """Return the bytes of a launch of `_write_gradients`: gradients, q, k and GELU's input, partial sums."""
    heads, hidden, rows = values["heads"], values["hidden"], values["rows"]
    tokens = values["count"] * values["width"] * 2
    blocks = -(-values["count"] // (values["tokens"] * values["steps"]))
    groups = -(-heads // rows)
    sums = (3 * heads + hidden) * values["has_bias"] + 2 * groups
    moved = tokens * (2 * (3 * heads + hidden) + 2 * heads + hidden)
    largest = (3 * groups + -(-hidden // rows)) * values["has_largest"]
    return moved + 4 * blocks * (sums * values["width"] + largest)


def _modulation(values: Mapping[str, Any]) -> int:
    """Return the bytes of a launch of `_write_modulation`: two gradients, the norm's input, scale, sums."""
    dx, tokens, width = values["dx"], values["n"], values["width"]
    numbers = int(dx.numel() if isinstance(dx, Tensor) else dx.get_numel())
    samples = numbers // (tokens * width)
    parts = samples * -(-tokens // values["steps"])
    return 2 * (4 * numbers + samples * width) + 4 * parts * 2 * width * values["has_sums"]


OWN: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "_write_heads": _heads,
    "_write_gradients": _gradients,
    "_write_modulation": _modulation,
}
"""By name of a kernel."""
