"""Adafactor (Shazeer and Stern, 2018) without a first moment: the second is a row and a column of a matrix.

As transformers' with ``scale_parameter`` and ``relative_step`` off, which is how FLUX.1 is fine-tuned. Two
reductions over the ranks, of all columns and of one number of each parameter, serve all parameters.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from fluxtrain.optimizers.optimizer import Optimizer
from fluxtrain.optimizers.row_vector import RowVector
from fluxtrain.sharded_tensor import first_column, local_part, sum_over_parts

_SMALLEST_SQUARE = 1e-30
_LARGEST_RMS = 1.0
"""Root mean square of an update above which it is clipped."""
_EXPONENT = -0.8
"""The weight of the newest squares is the number of steps to this power."""
ROWS, WHOLE, COLUMNS = "exp_avg_sq_row", "exp_avg_sq", "exp_avg_sq_col"
"""Names of the second moment: of a matrix's rows, of a vector, of all matrices' columns."""


class Adafactor(Optimizer):
    """Adafactor with decoupled weight decay, times the learning rate."""

    def _allocate(self) -> None:
        parameters = self._parameters
        matrices = [each for each in parameters if each.ndim == 2]
        ends = list(accumulate((each.shape[1] for each in matrices), initial=0))
        self._places = {
            each: slice(*span) for each, span in zip(matrices, pairwise(ends), strict=True)
        }
        self._columns = RowVector(ends[-1], self.weights[parameters[0]], torch.float32)
        if matrices:
            self.shared[COLUMNS] = self._columns.rows
        device = self._columns.values.device
        heights = [float(each.shape[0]) for each in matrices for _ in range(each.shape[1])]
        self._heights = torch.tensor(heights, device=device)
        self._sizes = torch.tensor([float(each.numel()) for each in parameters], device=device)
        positions = {each: index for index, each in enumerate(parameters)}
        self._positions = [positions[each] for each in self._owned]

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        is_matrix = weight.ndim == 2
        like = first_column(weight) if is_matrix else weight
        return {ROWS if is_matrix else WHOLE: torch.zeros_like(like)}

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps with the columns that were loaded."""
        self._columns.load()
        super().resume(steps)

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        newest = self.steps_taken.clamp(min=1) ** _EXPONENT * (1 - found_inf)
        gradients = self._scaled_gradients(grad_scale, found_inf)
        self._accumulate(gradients, newest)
        for parameter, gradient in zip(self._owned, gradients, strict=True):
            self._normalize(parameter, gradient)
            gradient.masked_fill_(found_inf.bool(), 0.0)
        self._move(gradients, self._rate * (1 - found_inf))
        self._columns.save()

    def _moment(self, parameter: nn.Parameter) -> Tensor:
        return local_part(self.state[parameter][ROWS if parameter.ndim == 2 else WHOLE])

    def _accumulate(self, gradients: list[Tensor], newest: Tensor) -> None:
        """Average the squares of ``gradients``, with the weight ``newest``, into the second moments."""
        sums = torch.zeros_like(self._columns.values)
        for parameter, gradient in zip(self._owned, gradients, strict=True):
            squares = gradient.square().add_(_SMALLEST_SQUARE)
            if parameter.ndim == 2:
                sums[self._places[parameter]] = squares.sum(dim=0)
                squares = squares.mean(dim=1)
            self._moment(parameter).mul_(1 - newest).add_(squares * newest)
        sum_over_parts(sums, self.weights[self._parameters[0]])
        self._columns.values.mul_(1 - newest).add_(sums / self._heights * newest)

    def _normalize(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Divide ``gradient`` by the root of its second moment; a matrix's is the product of both parts."""
        moment = self._moment(parameter)
        if parameter.ndim == 1:
            gradient.mul_(moment.rsqrt())
            return
        columns = self._columns.values[self._places[parameter]]
        gradient.mul_((moment / columns.mean()).rsqrt_().unsqueeze(1)).mul_(columns.rsqrt())

    def _move(self, updates: list[Tensor], rate: Tensor) -> None:
        """Change the weights by ``updates`` of a root mean square of at most 1, times ``rate``."""
        squares = torch.zeros_like(self._sizes)
        if updates:
            squares[self._positions] = torch.stack(torch._foreach_norm(updates)).square()
        sum_over_parts(squares, self.weights[self._parameters[0]])
        clipped = 1 / ((squares / self._sizes).sqrt() / _LARGEST_RMS).clamp(min=1)
        for update, position, weight in zip(updates, self._positions, self._weights, strict=True):
            update.mul_(clipped[position]).add_(weight, alpha=self._config.weight_decay)
        if updates:
            torch._foreach_mul_(updates, rate)
            self._scale(updates, slice(None))
            torch._foreach_sub_(self._weights, updates)
