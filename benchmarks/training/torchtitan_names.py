"""torchtitan's names of the tensors: BFL's, except those of the norms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_OURS, _THEIRS = "_norm.scale", "_norm.weight"


def to_torchtitan(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under torchtitan's names."""
    return {_renamed(name, _OURS, _THEIRS): tensor for name, tensor in ours.items()}


def from_torchtitan(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return torchtitan's tensors under our names."""
    return {_renamed(name, _THEIRS, _OURS): tensor for name, tensor in theirs.items()}


def _renamed(name: str, before: str, after: str) -> str:
    return name.removesuffix(before) + after if name.endswith(before) else name
