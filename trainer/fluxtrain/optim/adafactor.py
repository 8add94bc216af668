"""Adafactor (Shazeer and Stern, 2018) without a first moment: the second is a row and a column of a matrix.

As transformers' with ``scale_parameter`` and ``relative_step`` off, which is how FLUX.1 is fine-tuned. Two
reductions over the ranks, of all columns and of one number of each parameter, serve all parameters.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from fluxtrain.optim.optimizer import Optimizer, RowVector, ScaledGradients
from fluxtrain.parallel.sharding import first_column, local_part, sum_over_parts

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
        self._spans = {
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
        return {ROWS if is_matrix else WHOLE: self._zeros(like)}

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps with the columns that were loaded."""
        self._columns.load()
        super().resume(steps)

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        newest = self.steps_taken.clamp(min=1) ** _EXPONENT * (1 - found_inf)
        gradients = self._scaled_gradients(grad_scale, found_inf)
        self._accumulate(gradients, newest)
        clipped = self._clipping(gradients, found_inf)
        rate = self._rate * (1 - found_inf)
        for group in self._groups():
            updates = gradients[group]
            if not gradients.are_kept:
                self._normalize(group, updates, found_inf)
            self._move(group, updates, clipped, rate)
        self._columns.save()

    def _moment(self, parameter: nn.Parameter) -> Tensor:
        return local_part(self.state[parameter][ROWS if parameter.ndim == 2 else WHOLE])

    def _accumulate(self, gradients: ScaledGradients, newest: Tensor) -> None:
        """Average the squares of ``gradients``, with the weight ``newest``, into the second moments."""
        sums = torch.zeros_like(self._columns.values)
        for group in self._groups():
            for parameter, gradient in zip(self._owned[group], gradients[group], strict=True):
                squares = gradient.square().add_(_SMALLEST_SQUARE)
                if parameter.ndim == 2:
                    sums[self._spans[parameter]] = squares.sum(dim=0)
                    squares = squares.mean(dim=1)
                self._moment(parameter).mul_(1 - newest).add_(squares * newest)
        sum_over_parts(sums, self.weights[self._parameters[0]])
        self._columns.values.mul_(1 - newest).add_(sums / self._heights * newest)

    def _normalize(self, group: slice, gradients: list[Tensor], found_inf: Tensor) -> None:
        """Make updates of ``gradients`` of the parameters in ``group``, in place; 0 if ``found_inf`` is 1."""
        for parameter, gradient in zip(self._owned[group], gradients, strict=True):
            self._divide_by_root(parameter, gradient)
            gradient.masked_fill_(found_inf.bool(), 0.0)

    def _divide_by_root(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Divide ``gradient`` by the root of its second moment; a matrix's is the product of both parts."""
        moment = self._moment(parameter)
        if parameter.ndim == 1:
            gradient.mul_(moment.rsqrt())
            return
        columns = self._columns.values[self._spans[parameter]]
        gradient.mul_((moment / columns.mean()).rsqrt_().unsqueeze(1)).mul_(columns.rsqrt())

    def _clipping(self, gradients: ScaledGradients, found_inf: Tensor) -> Tensor:
        """Return the factor of each parameter's update that limits its root mean square."""
        squares = torch.zeros_like(self._sizes)
        for group in self._groups():
            updates = gradients[group]
            self._normalize(group, updates, found_inf)
            norms = torch.stack(torch._foreach_norm(updates))
            squares[self._positions[group]] = norms.square()
        sum_over_parts(squares, self.weights[self._parameters[0]])
        return 1 / ((squares / self._sizes).sqrt() / _LARGEST_RMS).clamp(min=1)

    def _move(self, group: slice, updates: list[Tensor], clipped: Tensor, rate: Tensor) -> None:
        """Change the weights in ``group`` by ``updates`` times ``clipped`` and ``rate``."""
        with self._changing(group) as weights:
            positions = self._positions[group]
            for update, position, weight in zip(updates, positions, weights, strict=True):
                update.mul_(clipped[position]).add_(weight, alpha=self._config.weight_decay)
            torch._foreach_mul_(updates, rate)
            self._scale(updates, group)
            torch._foreach_sub_(weights, updates)
