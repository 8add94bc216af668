"""OptimConfig: the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import IMMUTABLE, StrictModel

LearningRate = Annotated[float, Field(gt=0, le=10)]


class OptimConfig(StrictModel):
    """The optimizer of all parameters, with MLPerf's values."""

    name: Annotated[Literal["adamw"], IMMUTABLE] = "adamw"
    """The optimizer."""
    learning_rate: LearningRate = 1e-4
    """Learning rate after the warm-up. The presets ``mlperf-*`` have that of MLCommons' reference runs for
    the global batch sizes 512, 1024, 2048 and 4096."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the second moment."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator for numerical stability."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay of all parameters."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """Maximum global L2 norm of the gradients; larger ones are clipped."""
