"""PreflightConfig, ``spec.run.preflight``: a check of all devices and links before training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fluxtrain.contract.strict_model import StrictModel


class PreflightConfig(StrictModel):
    """A check before training: each rank's matrix products, and its exchanges with other nodes, are compared
    with the median of all ranks."""

    factor: Annotated[float, Field(gt=1, le=100)] = 1.5
    """A rank whose matrix product, or whose exchange with each of its partners, is slower than the median by
    more than this factor ends the start; its pod is replaced."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Longest time of the matrix products and of the all-reduces together; at least two of each run. An
    exchange between two nodes that takes half of it has timed out."""
