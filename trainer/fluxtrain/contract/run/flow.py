"""FlowConfig: the training draws of rectified flow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import Fraction, StrictModel

TimestepSampling = Literal[
    "uniform", "logit_normal", "sigmoid", "shift", "flux_shift", "mode", "cosmap"
]
LossWeighting = Literal["none", "sigma_sqrt", "cosmap"]


class FlowConfig(StrictModel):
    """Rectified flow: sampling of timesteps (t=0 clean, t=1 noise), noise, weights and prompt dropout."""

    timestep_sampling: TimestepSampling = "uniform"
    """Distribution of t in training; ``uniform`` is MLPerf's, ``mode`` and ``cosmap`` are Stable Diffusion
    3's."""
    logit_mean: Annotated[float, Field(ge=-100, le=100)] = 0.0
    """Mean of the normal distribution of ``logit_normal``."""
    logit_std: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Standard deviation of the normal distribution of ``logit_normal``."""
    sigmoid_scale: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Factor on the normal variate of ``sigmoid``, ``shift`` and ``flux_shift`` before the sigmoid."""
    shift: Annotated[float, Field(gt=0, le=1000)] = 3.0
    """s of ``shift``, which maps t to s t / (1 + (s - 1) t)."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """s of ``mode``: above 0 favours the middle of the line, below 0 its ends."""
    loss_weighting: LossWeighting = "none"
    """Weight of a sample's loss in training by its t: ``sigma_sqrt`` is 1 / t^2, ``cosmap`` is
    2 / (pi (1 - 2 t + 2 t^2)). Weights by the signal-to-noise ratio have no meaning for a flow."""
    noise_offset: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Standard deviation of a normal variate for each sample and channel, added to all its noise; 0.03 to 0.1
    lets images be darker and lighter. kohya's trainer of FLUX.1 accepts it without an effect."""
    guidance: Annotated[float, Field(ge=0, le=100)] | None = None
    """Distilled guidance while training and evaluating models with ``guidance_embed``; 1 for FLUX.1 dev's
    adapters; null: ``sampling.guidance``."""
    prompt_dropout: Fraction = 0.1
    """Probability that both text encodings of a sample are replaced by those of the empty prompt."""
    reference_rounding: bool = False
    """Round latents, noise, t, their mixture and the target to ``precision.compute``, as MLPerf's reference
    does; false computes them in float32. The presets ``mlperf-*`` round."""
