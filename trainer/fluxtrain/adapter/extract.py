"""The low-rank part of the difference of two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.adapter.update import Piece, Update
from fluxtrain.adapter.updates import Adapter
from fluxtrain.errors import DataError
from fluxtrain.model.adapted_layers import linear_layers
from fluxtrain.weights.reader import Weights, require_complete

_EXTRA = 16
"""Columns beyond the rank with which the largest singular vectors are found."""
_ITERATIONS = 4


@dataclass(frozen=True)
class Extracted:
    """An adapter, and how much of the difference it holds."""

    adapter: Adapter
    kept: float
    """Fraction of the squared differences of the blocks' linear layers."""
    left_out: int
    """Other tensors that differ: biases, norms, embeddings, the last layer."""


def extract(
    base: Weights, tuned: Weights, rank: int, report: Callable[[], object] = lambda: None
) -> Extracted:
    """Return the adapter of ``rank`` that makes ``tuned`` of ``base``, as far as that rank can.

    What differs only as ``tuned`` was rounded to its data type is left unchanged. Of tensors that the adapter
    cannot hold, those that differ only as ``base`` was rounded are not counted either.
    ``report`` is called after each tensor. Raises DataError if the models have other shapes, or are equal.
    """
    require_complete(base, tuned.model)
    require_complete(tuned, base.model)
    layers = {f"{layer}.weight" for layer in linear_layers(base.model)}
    names = list(base.shapes)
    adapter, squares, rest, left_out = Adapter(), 0.0, 0.0, 0
    for (name, before), (_, after) in zip(base.read(names), tuned.read(names), strict=True):
        report()
        if torch.equal(before.to(after.dtype), after):
            continue
        if name not in layers:
            left_out += not torch.equal(after.to(before.dtype), before)
            continue
        difference = after.float() - before.float()
        update = _truncated(difference, rank)
        adapter[name.removesuffix(".weight")] = update
        squares += difference.square().sum().item()
        rest += (difference - update.delta()).square().sum().item()
    if not adapter:
        raise DataError(f"{tuned.path}: the blocks' linear layers are those of {base.path}")
    return Extracted(adapter, 1 - rest / squares, left_out)


def _truncated(difference: Float[Tensor, "out in"], rank: int) -> Update:
    """Return the update with the largest singular values; the same in each call."""
    count = min(rank + _EXTRA, *difference.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(difference, q=count, niter=_ITERATIONS)
    kept = min(rank, len(values))
    root = values[:kept].sqrt()
    down, up = (right[:, :kept] * root).T.contiguous(), left[:, :kept] * root
    return Update(len(difference), (Piece(0, down, up, 1.0),))
