"""The parts of an optimizer step: the gradients of micro batches, and the update.

Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fluxtrain import optim
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import AnyBatch, Batch
from fluxtrain.errors import DivergedError
from fluxtrain.model.loss import FlowLoss
from fluxtrain.optim import learning_rate
from fluxtrain.optim.optimizer import Optimizer
from fluxtrain.parallel.parallelize import reduce_between_replicas
from fluxtrain.parallel.traffic import all_reduces_each
from fluxtrain.runtime.step_times import StepTimes
from fluxtrain.state.checkpoint import Checkpoints

Encode = Callable[[AnyBatch], Batch]


def add_gradients(
    flow_loss: FlowLoss,
    encode: Encode,
    batch: AnyBatch,
    samples_per_rank: float,
    times: StepTimes,
    is_last: bool,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of one micro batch; return each sample's loss times its weight, and its weight.

    Gradients are averaged over the ranks, so each rank divides by its part of the global batch,
    ``samples_per_rank``. Replicas may wait for the step's last micro batch, and then average their sums.
    """
    reduce_between_replicas(flow_loss.model, is_last or all_reduces_each(flow_loss.config))
    with times.forward():
        encoded = encode(batch)
        losses = flow_loss.training(encoded)
    with times.backward():
        torch.autograd.backward(losses.sum() / samples_per_rank)
    return losses.detach(), encoded.weights


def update(
    optimizer: Optimizer,
    config: RunConfig,
    step: int,
    bad_step: Tensor,
    times: StepTimes,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Clip the gradients and take optimizer step ``step``; return their norm and the first bad step.

    Both stay on the device. Nothing is updated from ``bad_step`` on, the first step with a gradient that is
    not finite. ``before_update`` is called before weights or moments change.
    """
    optim.set_learning_rate(optimizer, learning_rate(step, config.optim, config.schedule))
    norm = optimizer.gradient_norm()
    bad_step = optim.first_bad_step(bad_step, norm, step)
    before_update()
    with times.optimizer():
        optim.update(optimizer, norm, config.optim.max_grad_norm, bad_step)
    optimizer.zero_grad(set_to_none=True)
    return norm, bad_step


def require_finite(
    bad_step: Tensor,
    checkpoints: Checkpoints,
    step: int,
    loss: float = 0.0,
    kind: str = "training",
) -> None:
    """Raise DivergedError if ``loss``, or the gradients of a step up to ``step``, are not finite.

    ``bad_step`` is the result of :func:`optim.first_bad_step`; reading it waits for the device. Every rank
    must call this, with the same result. A checkpoint that is being written is from before, and is kept.
    """
    first, reasons = int(bad_step.item()), list[str]()
    if not math.isfinite(loss):
        reasons.append(f"the {kind} loss is {loss} at step {step}")
    if first != optim.NEVER:
        reasons.append(f"the gradient norm is not finite at step {first}")
    if not reasons:
        return
    checkpoints.finish()
    saved = checkpoints.saved_step
    kept = f"the checkpoint of step {saved} is kept" if saved else "no checkpoint was saved yet"
    advice = (
        "start another run, with its own output and a lower spec.run.optim.learning_rate or more "
        "spec.run.schedule.warmup_steps"
    )
    raise DivergedError("; ".join([*reasons, kept, advice]))
