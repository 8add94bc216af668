"""AdamW with both moments in 8 bits, as torchao's; those of vectors and narrow matrices are in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.optim import is_quantized
from fluxtrain.optimizers import adamw
from fluxtrain.optimizers.dynamic_quantization import DynamicCode, num_blocks
from fluxtrain.optimizers.optimizer import Optimizer
from fluxtrain.sharded_tensor import local_part, rows_like

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether they have a sign."""
SCALE = "_scale"
"""Suffix of the scales' names."""


class AdamW8bit(Optimizer):
    """Torch's fused AdamW on one parameter after the other, whose moments are in float32 only meanwhile."""

    def _allocate(self) -> None:
        device = self.steps_taken.device
        self._codes = {name: DynamicCode(signed, device) for name, signed in MOMENTS.items()}

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        if not is_quantized(tuple(weight.shape)):
            return {name: self._zeros(weight) for name in MOMENTS}
        state = {}
        for name in MOMENTS:
            state[name] = torch.zeros_like(weight, dtype=torch.uint8)
            state[name + SCALE] = rows_like(weight, num_blocks(weight.shape[1]))
        return state

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        for index, (parameter, gradient, factor) in enumerate(
            zip(self._owned, self._gradients(), self._factors, strict=True)
        ):
            average, square = (self._moment(parameter, name) for name in MOMENTS)
            with self._changing(slice(index, index + 1)) as weight:
                tensors = weight, [gradient.float()], [average], [square]
                rate = self._rate * factor
                adamw.step(tensors, self.steps_taken, self._config, rate, grad_scale, found_inf)
            for name, values in zip(MOMENTS, (average, square), strict=True):
                self._keep(parameter, name, values, found_inf.bool())

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return moment ``name`` of ``parameter`` in float32, this rank's part."""
        state = self.state[parameter]
        values = local_part(state[name])
        if name + SCALE not in state:
            return values
        return self._codes[name].dequantized(values, local_part(state[name + SCALE]))

    def _keep(self, parameter: nn.Parameter, name: str, values: Tensor, is_bad: Tensor) -> None:
        """Keep ``values`` as moment ``name`` of ``parameter``, unless ``is_bad``."""
        state = self.state[parameter]
        if name + SCALE not in state:
            return
        new = self._codes[name].quantized(values)
        for kept, each in zip((name, name + SCALE), new, strict=True):
            old = local_part(state[kept])
            old.copy_(torch.where(is_bad, old, each))
