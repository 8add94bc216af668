"""The check for a loss or gradients that are not finite."""

from __future__ import annotations

import math

from torch import Tensor

from fluxtrain import optim
from fluxtrain.checkpoint import Checkpoints
from fluxtrain.errors import DivergedError


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
