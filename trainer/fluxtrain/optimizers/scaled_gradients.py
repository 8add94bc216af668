"""Gradients of all parameters divided by one number, in float32: in place, or a few at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.optimizers.bfloat16_weights import in_float32


class ScaledGradients:
    """Gradients divided by a number; zeros instead if a step is not to be taken."""

    def __init__(self, gradients: list[Tensor], grad_scale: Tensor, found_inf: Tensor) -> None:
        """Divide ``gradients`` in place by ``grad_scale``, or make zeros of them if ``found_inf`` is 1.

        Those in bfloat16 stay as they are: a float32 copy is divided each time that one is asked for.
        """
        self._gradients, self._scale, self._is_bad = gradients, grad_scale, found_inf.bool()
        self.are_kept = not gradients or gradients[0].dtype != torch.bfloat16
        """Whether what is changed in place stays changed."""
        if self.are_kept:
            self._divide(gradients)

    def __getitem__(self, group: slice) -> list[Tensor]:
        """Return the gradients of the parameters in ``group``, which may be changed in place."""
        if self.are_kept:
            return self._gradients[group]
        _, gradients = in_float32(self._gradients[group])
        self._divide(gradients)
        return gradients

    def _divide(self, gradients: list[Tensor]) -> None:
        if gradients:
            torch._foreach_div_(gradients, self._scale)
        for gradient in gradients:
            gradient.masked_fill_(self._is_bad, 0.0)
