"""PreflightConfig, ``spec.run.preflight``: a check of all devices before training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fluxtrain.contract.strict_model import StrictModel


class PreflightConfig(StrictModel):
    """A check before training: matrix products on each rank, compared with the median of all ranks."""

    factor: Annotated[float, Field(gt=1, le=100)] = 1.5
    """A rank that is slower than the median by more than this factor ends the start; its pod is replaced."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Longest time of the check; at least two products and two all-reduces run."""
