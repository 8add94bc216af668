"""LoRA and DoRA: linear layers whose output gets a low-rank update, the only part that is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import base_output, base_weight, freeze_in_8_bits
from fluxtrain.model.layers import (
    BASE_MAGNITUDE,
    HADAMARD_FACTORS,
    MAGNITUDE,
    AdaptedLayer,
    Kronecker,
)

# Dropout of adapters, kohya's: of values of A x, of ranks, and of whole adapters.
#
# Each choice is a function of the sample's key, the adapter and the place in A x, by integer
# arithmetic that every device does alike. So it depends neither on the number of ranks nor on the
# division into micro batches, and the same choice is made when a block recomputes its activations.


_MASK = 0xFFFFFFFF
_VALUES, _RANKS, _ADAPTER = 0x3C6EF372, 0xDAA66D2B, 0x78DDE6E4
"""Streams of a key: they are combined with it, so that the three kinds of dropout are independent."""


@dataclass(frozen=True)
class AdapterDropout:
    """Probabilities with which parts of an adapter's A x are zero in training."""

    values: float
    """Of each value; the others are scaled up."""
    ranks: float
    """Of each rank of a sample; the others are scaled up."""
    adapter: float
    """Of a sample's whole adapter; nothing is scaled."""

    @staticmethod
    def of(config: AdapterConfig) -> AdapterDropout | None:
        if not config.has_dropout:
            return None
        return AdapterDropout(config.dropout, config.rank_dropout, config.module_dropout)

    def apply(self, low: Float[Tensor, "b ... r"], keys: Int[Tensor, " b"]) -> Tensor:
        """Return ``low``, A x of samples with ``keys``, with some values zero."""
        shape = len(keys), *(1 for _ in low.shape[1:])
        keys = keys.view(shape)
        factor = torch.ones(shape, dtype=low.dtype, device=low.device)
        if self.adapter:
            factor = factor * _kept(keys ^ _ADAPTER, self.adapter)
        for stream, probability, shape in (
            (_RANKS, self.ranks, low.shape[-1:]),
            (_VALUES, self.values, low.shape[1:]),
        ):
            if probability:
                places = _numbered(shape, low.device)
                kept = _kept(places ^ _mixed(keys ^ stream), probability)
                factor = factor * kept / (1 - probability)
        return low * factor.to(low.dtype)


def adapter_keys(keys: Int[Tensor, " b"], names: list[str]) -> tuple[Int[Tensor, " b"], ...]:
    """Return keys of the samples with ``keys``, numbers below 2**32, for each of the adapters ``names``."""
    digests = (hashlib.sha256(name.encode()).digest() for name in names)
    salts = torch.tensor([int.from_bytes(each[:4], "little") for each in digests])
    salts = salts.to(keys.device, non_blocking=True)
    return _mixed(_mixed(keys) ^ salts[:, None]).unbind()


def _numbered(shape: torch.Size, device: torch.device) -> Int[Tensor, ...]:
    """Return a pseudorandom number for each place of ``shape``."""
    return _mixed(torch.arange(shape.numel(), device=device)).view(shape)


def _kept(numbers: Int[Tensor, ...], probability: float) -> Tensor:
    """Return for each of ``numbers`` whether it is kept: with 1 - ``probability``."""
    return _mixed(numbers) >= int(probability * 2**32)


def _mixed(x: Int[Tensor, ...]) -> Int[Tensor, ...]:
    """Return a permutation of the numbers below 2**32 in which neighbours have nothing in common.

    Xorshifts and products in turn, as the end of MurmurHash3 has them. Products beyond int64 wrap around,
    which leaves their low half as it is.
    """
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
PARAMETERS = ("lora_A", "lora_B", MAGNITUDE, *_LOKR, *HADAMARD_FACTORS)
"""Names of an adapter's parameters in its layer: down to the rank and up again, or a product's factors."""


class AdaptedLinear(nn.Linear):
    """A linear layer plus its adapter, whose update is multiplied by ``scale``."""

    scale: float
    dropout: AdapterDropout | None
    keys: Int[Tensor, " b"] | None

    def dropped(self, x: Tensor) -> Tensor:
        """Return ``x``; in training with what ``dropout`` sets to zero, by the ``keys`` of the samples."""
        if self.training and self.dropout is not None and self.keys is not None:
            return self.dropout.apply(x, self.keys)
        return x


class LoraLinear(AdaptedLinear):
    """A linear layer plus its adapter: W x + b + scale B A x, with an A for each of ``splits``.

    Dropout sets parts of A x to zero.
    """

    lora_A: nn.Parameter  # noqa: N815  (as in LoRA's paper)
    lora_B: nn.Parameter  # noqa: N815
    splits: tuple[int, ...]

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        return torch.add(base_output(self, x, self.bias), self.update(x), alpha=self.scale)

    def update(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Return B A x."""
        low = self.dropped(F.linear(x, self.lora_A))
        if len(self.splits) == 1:
            return F.linear(low, self.lora_B)
        lows = low.chunk(len(self.splits), dim=-1)
        parts = zip(lows, torch.split(self.lora_B, list(self.splits)), strict=True)
        return torch.cat([F.linear(each, rows) for each, rows in parts], dim=-1)


class DoraLinear(LoraLinear):
    """A linear layer plus its adapter of decomposed weights (DoRA): m / |V| V x + b, where V = W + scale B A.

    |V| is the norm of each row of V, which gets no gradient. ``magnitude`` is the change of m since the
    training began with m = |W|: rounded to the compute dtype, it still has its own leading digits.
    """

    magnitude: nn.Parameter
    base_magnitude: Float[Tensor, " out"]
    """|W| in float32."""

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        total = torch.add(base_output(self, x, None), self.update(x), alpha=self.scale)
        norms = self.row_norms()
        change = (self.base_magnitude - norms + self.magnitude.float()) / norms
        whole = total if self.bias is None else total + self.bias
        return torch.addcmul(whole, total, change.to(total.dtype))

    @torch.no_grad()
    def row_norms(self) -> Float[Tensor, " out"]:
        """Return |V| in float32: from |W|, W Aᵀ and A Aᵀ, without computing V."""
        count, rows = len(self.splits), list(self.splits)
        crossed, squared = [], []
        for down, up, weight in zip(
            self.lora_A.chunk(count),
            torch.split(self.lora_B, rows),
            torch.split(base_weight(self, self.lora_A.dtype), rows),
            strict=True,
        ):
            up, whole = up.float(), down.float()
            crossed.append((F.linear(weight, down).float() * up).sum(dim=1))
            squared.append(((up @ (whole @ whole.T)) * up).sum(dim=1))
        sums = 2 * self.scale * torch.cat(crossed) + self.scale**2 * torch.cat(squared)
        least = torch.finfo(torch.float32).tiny
        return (self.base_magnitude.square() + sums).clamp(min=least).sqrt()


def add_adapters(
    model: Flux,
    layers: Iterable[AdaptedLayer],
    dtype: torch.dtype,
    dropout: AdapterDropout | None = None,
    in_8_bits: Iterable[str] = (),
) -> None:
    """Freeze ``model`` in ``dtype`` and give ``layers`` their adapters, with parameters in float32.

    Names of the model's parameters stay; the new ones have no values yet, and neither have the weights of the
    layers ``in_8_bits``.
    """
    model.to(dtype).requires_grad_(False)
    for name in in_8_bits:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        freeze_in_8_bits(linear)
    for layer in layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, nn.Linear)
        device = module.weight.device
        module.__class__ = _class_of(layer)
        for name, shape in layer.shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            module.register_parameter(name, nn.Parameter(empty))
        assert isinstance(module, AdaptedLinear)
        module.scale, module.dropout, module.keys = layer.scale, dropout, None
        if isinstance(module, LoraLinear):
            module.splits = layer.splits
            if isinstance(module, DoraLinear):
                norms = torch.empty(layer.outputs, dtype=torch.float32, device=device)
                module.register_buffer(BASE_MAGNITUDE, norms, persistent=False)
        elif isinstance(module, LokrLinear) and (factors := layer.kronecker) is not None:
            module.factors = factors


def _class_of(layer: AdaptedLayer) -> type[AdaptedLinear]:
    if not layer.is_low_rank:
        return LohaLinear if layer.is_loha else LokrLinear
    return DoraLinear if layer.is_dora else LoraLinear


@torch.no_grad()
def measure(model: nn.Module, name: str, weight: Float[Tensor, "out in"]) -> None:
    """Let a DoRA of ``model`` know the norms of the rows of ``weight``, the parameter ``name``, unsharded."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight":
        return
    module = model.get_submodule(layer)
    if isinstance(module, DoraLinear):
        rounded = weight.to(module.base_magnitude.device)
        if module.weight.dtype.itemsize > 1:
            rounded = rounded.to(module.weight.dtype)
        module.base_magnitude.copy_(torch.linalg.vector_norm(rounded, dim=1, dtype=torch.float32))


def magnitudes(model: nn.Module) -> dict[str, Float[Tensor, " out"]]:
    """Return the norms of the rows of the weights of DoRA's layers, by the tensors' names."""
    modules = model.named_modules()
    return {
        f"{name}.{BASE_MAGNITUDE}": each.base_magnitude
        for name, each in modules
        if isinstance(each, DoraLinear)
    }


def set_keys(model: Flux, keys: Int[Tensor, " b"]) -> None:
    """Let the adapters of ``model`` choose what they drop by ``keys`` of the next samples, below 2**32."""
    dropping = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AdaptedLinear) and module.dropout is not None
    }
    if dropping:
        for module, own in zip(dropping.values(), adapter_keys(keys, list(dropping)), strict=True):
            module.keys = own


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in PARAMETERS


class LokrLinear(AdaptedLinear):
    """A linear layer plus its adapter (LoKr): (W + scale w1 ⊗ w2) x + b, without computing w1 ⊗ w2.

    Dropout leaves the update of some samples out, as in LoHa.
    """

    lokr_w1: nn.Parameter
    lokr_w1_a: nn.Parameter
    lokr_w1_b: nn.Parameter
    lokr_w2: nn.Parameter
    lokr_w2_a: nn.Parameter
    lokr_w2_b: nn.Parameter
    factors: Kronecker

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        rows = x.view(*x.shape[:-1], self.factors.first[1], self.factors.second[1])
        if self.factors.is_second_low:
            low = F.linear(F.linear(rows, self.lokr_w2_b), self.lokr_w2_a)
        else:
            low = F.linear(rows, self.lokr_w2)
        first = self.lokr_w1_a @ self.lokr_w1_b if self.factors.is_first_low else self.lokr_w1
        update = F.linear(low.transpose(-1, -2), first).transpose(-1, -2).flatten(-2)
        update = self.dropped(update)
        return base_output(self, x, self.bias).add(update, alpha=self.scale)


class LohaLinear(AdaptedLinear):
    """A linear layer plus its adapter (LoHa): (W + scale (w1_a w1_b) ⊙ (w2_a w2_b)) x + b."""

    hada_w1_a: nn.Parameter
    hada_w1_b: nn.Parameter
    hada_w2_a: nn.Parameter
    hada_w2_b: nn.Parameter

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        factors = self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b
        update = self.dropped(_HadamardProduct.apply(x, *factors))
        return base_output(self, x, self.bias).add(update, alpha=self.scale)


class _HadamardProduct(torch.autograd.Function):
    """x times (a b) ⊙ (c d), transposed; only x and the factors are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b, c, d)
        return F.linear(x, (a @ b) * (c @ d))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, a, b, c, d) = grads, ctx.saved_tensors
        first, second = a @ b, c @ d
        of_x = gradient @ (first * second) if ctx.needs_input_grad[0] else None
        of_product = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        of_first = of_product * second
        of_a, of_b = of_first @ b.T, a.T @ of_first
        of_second = of_product.mul_(first)
        return of_x, of_a, of_b, of_second @ d.T, c.T @ of_second
