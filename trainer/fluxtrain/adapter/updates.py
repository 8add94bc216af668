"""The updates of an adapter's layers: low-rank ones and Kronecker products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fluxtrain.adapter.product import Product
from fluxtrain.adapter.update import Update

AnyUpdate = Update | Product
Adapter = dict[str, AnyUpdate]
"""The updates by the layers' names in BFL's layout: ``double_blocks.0.img_attn.qkv``."""


def num_parameters(updates: Iterable[AnyUpdate]) -> int:
    """Return the number of values in the matrices of ``updates``."""
    count = 0
    for update in updates:
        if isinstance(update, Product):
            count += sum(tensor.numel() for tensor in update.tensors.values())
        else:
            for piece in update.pieces:
                norms = 0 if piece.magnitude is None else piece.magnitude.values.numel()
                count += piece.down.numel() + piece.up.numel() + norms
    return count


def is_dora(adapter: Mapping[str, AnyUpdate]) -> bool:
    """Return whether some layers of ``adapter`` have magnitudes (DoRA)."""
    return any(update.is_dora for update in low_rank(adapter).values())


def low_rank(adapter: Mapping[str, AnyUpdate]) -> dict[str, Update]:
    """Return the updates of ``adapter`` that are low-rank."""
    return {layer: update for layer, update in adapter.items() if isinstance(update, Update)}


def ranks_and_alphas(update: AnyUpdate) -> tuple[int, float]:
    """Return the rank and alpha of ``update`` as one piece; those of a product without a rank are 1."""
    if isinstance(update, Product):
        return update.rank or 1, update.alpha
    piece = update.without_magnitudes().whole()
    return piece.rank, piece.scale * piece.rank
