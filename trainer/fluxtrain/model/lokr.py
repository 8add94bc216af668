"""LoKr: linear layers whose weight gets a Kronecker product, the only part that is trained."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.model.adapter_dropout import AdapterDropout
from fluxtrain.model.frozen import base_output
from fluxtrain.model.kronecker import Kronecker


class LokrLinear(nn.Linear):
    """A linear layer plus its adapter: (W + scale w1 ⊗ w2) x + b, without computing w1 ⊗ w2.

    In training ``dropout`` leaves the update of some samples out, by their ``keys``.
    """

    lokr_w1: nn.Parameter
    lokr_w1_a: nn.Parameter
    lokr_w1_b: nn.Parameter
    lokr_w2: nn.Parameter
    lokr_w2_a: nn.Parameter
    lokr_w2_b: nn.Parameter
    scale: float
    factors: Kronecker
    dropout: AdapterDropout | None
    keys: Int[Tensor, " b"] | None

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Return the layer's output with the update."""
        rows = x.view(*x.shape[:-1], self.factors.first[1], self.factors.second[1])
        if self.factors.is_second_low:
            low = F.linear(F.linear(rows, self.lokr_w2_b), self.lokr_w2_a)
        else:
            low = F.linear(rows, self.lokr_w2)
        first = self.lokr_w1_a @ self.lokr_w1_b if self.factors.is_first_low else self.lokr_w1
        update = F.linear(low.transpose(-1, -2), first).transpose(-1, -2).flatten(-2)
        if self.training and self.dropout is not None and self.keys is not None:
            update = self.dropout.apply(update, self.keys)
        return base_output(self, x, self.bias).add(update, alpha=self.scale)
