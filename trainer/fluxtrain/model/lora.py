"""LoRA: linear layers whose output gets a low-rank update, the only part that is trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.model.adapted_layers import AdaptedLayer
from fluxtrain.model.adapter_dropout import AdapterDropout, adapter_keys
from fluxtrain.model.flux import Flux
from fluxtrain.model.lokr import LokrLinear

_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
PARAMETERS = ("lora_A", "lora_B", *_LOKR)
"""Names of an adapter's parameters in its layer: down to the rank and up again, or a product's factors."""


class LoraLinear(nn.Linear):
    """A linear layer plus its adapter: W x + b + scale B A x, with an A for each of ``splits``.

    In training ``dropout`` sets parts of A x to zero, by the ``keys`` of the samples.
    """

    lora_A: nn.Parameter  # noqa: N815  (as in LoRA's paper)
    lora_B: nn.Parameter  # noqa: N815
    scale: float
    splits: tuple[int, ...]
    dropout: AdapterDropout | None
    keys: Int[Tensor, " b"] | None

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Return the layer's output with the update."""
        y, low = F.linear(x, self.weight, self.bias), F.linear(x, self.lora_A)
        if self.training and self.dropout is not None and self.keys is not None:
            low = self.dropout.apply(low, self.keys)
        if len(self.splits) == 1:
            update = F.linear(low, self.lora_B)
        else:
            lows = low.chunk(len(self.splits), dim=-1)
            parts = zip(lows, torch.split(self.lora_B, list(self.splits)), strict=True)
            update = torch.cat([F.linear(each, rows) for each, rows in parts], dim=-1)
        return torch.add(y, update, alpha=self.scale)


def add_adapters(
    model: Flux,
    layers: Iterable[AdaptedLayer],
    dtype: torch.dtype,
    dropout: AdapterDropout | None = None,
) -> None:
    """Freeze ``model`` in ``dtype`` and give ``layers`` their adapters, with parameters in float32.

    Names of the model's parameters stay; the new ones have no values yet.
    """
    model.to(dtype).requires_grad_(False)
    for layer in layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, nn.Linear)
        device = module.weight.device
        module.__class__ = LoraLinear if layer.kronecker is None else LokrLinear
        for name, shape in layer.shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            module.register_parameter(name, nn.Parameter(empty))
        assert isinstance(module, LoraLinear | LokrLinear)
        module.scale, module.dropout, module.keys = layer.scale, dropout, None
        if isinstance(module, LoraLinear):
            module.splits = layer.splits
        elif (factors := layer.kronecker) is not None:
            module.factors = factors


def set_keys(model: Flux, keys: Int[Tensor, " b"]) -> None:
    """Let the adapters of ``model`` choose what they drop by ``keys`` of the next samples, below 2**32."""
    dropping = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear | LokrLinear) and module.dropout is not None
    }
    if dropping:
        for module, own in zip(dropping.values(), adapter_keys(keys, list(dropping)), strict=True):
            module.keys = own


def is_adapter(name: str) -> bool:
    """Return whether the parameter ``name`` belongs to an adapter."""
    return name.rpartition(".")[2] in PARAMETERS
