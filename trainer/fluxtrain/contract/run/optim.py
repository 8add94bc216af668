"""OptimConfig: the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.model_base import IMMUTABLE, Count, Fraction, Positive, Rule, StrictModel

LearningRate = Annotated[float, Field(gt=0, le=10)]
OptimizerName = Literal[
    "adamw", "adamw_8bit", "adafactor", "lion", "prodigy", "schedule_free_adamw"
]
STATE_VALUES: Mapping[OptimizerName, int] = {
    "adamw": 2,
    "adamw_8bit": 0,
    "adafactor": 0,
    "lion": 1,
    "prodigy": 4,
    "schedule_free_adamw": 2,
}
"""Numbers that the optimizer keeps of a parameter, in float32, in checkpoints too; ``adafactor`` has one of
each row and column of a matrix, ``adamw_8bit`` two numbers in 8 bits and the scales of their blocks."""
QUANTIZED_BLOCK = 256
"""Most neighbours in a row of a matrix that share a scale in ``adamw_8bit``; shorter rows are in float32."""
_FLOAT32 = 4
_LEAST_FACTOR = 0.01
"""Least learning rate of ``prodigy``: smaller ones are meant for other optimizers."""


class ProdigyConfig(StrictModel):
    """Prodigy's estimate d of the step size, a factor of the learning rate."""

    d0: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """First estimate."""
    d_coef: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Factor of every estimate; 0.5 to 2 are usual."""
    growth_rate: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Most that the estimate grows in a step, such as 1.02; null: unlimited."""
    bias_correction: bool = False
    """Correct the bias of the moments, as Adam does; its author advises it for diffusion models."""
    safeguard_warmup: bool = False
    """Leave the learning rate out of the estimate's denominator; its author advises it with a warm-up."""


class OptimConfig(StrictModel):
    """The optimizer of all parameters, with MLPerf's values."""

    rules: ClassVar = (
        Rule(
            "learning_rate",
            f"must be at least {_LEAST_FACTOR} if name is prodigy: it is a factor of the step size that "
            "prodigy finds; 1.0 is usual",
            lambda optim: optim.name != "prodigy" or optim.learning_rate >= _LEAST_FACTOR,
            f"self.name != 'prodigy' || self.learning_rate >= {_LEAST_FACTOR}",
            others=("name",),
        ),
        Rule(
            "prodigy",
            "must be left out unless name is prodigy",
            lambda optim: optim.name == "prodigy" or optim.prodigy == ProdigyConfig(),
            "self.name == 'prodigy'",
            others=("name",),
        ),
        Rule(
            "ema_decay",
            "must be null if name is schedule_free_adamw: it averages the weights by itself",
            lambda optim: optim.ema_decay is None or optim.name != "schedule_free_adamw",
            "self.name != 'schedule_free_adamw'",
            others=("name",),
        ),
    )

    name: Annotated[OptimizerName, IMMUTABLE] = "adamw"
    """The optimizer. ``adamw_8bit`` keeps its moments in 8 bits, with a scale for each 256 numbers of a row,
    as torchao's; those of shorter rows are in float32. ``adafactor`` keeps a row and a column of each matrix
    instead of moments, as transformers' without scale_parameter and relative_step; ``lion`` one moment;
    ``prodigy`` finds its step size; ``schedule_free_adamw`` averages the weights instead of a decay of the
    learning rate."""
    learning_rate: LearningRate = 1e-4
    """Learning rate after the warm-up. The presets ``mlperf-*`` have that of MLCommons' reference runs for
    the global batch sizes 512, 1024, 2048 and 4096. ``lion`` needs a third to a tenth of AdamW's, ``prodigy``
    1.0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment; of ``schedule_free_adamw`` the place between average and steps;
    ``adafactor`` has none."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the second moment, and of ``lion``'s only one; that of ``adafactor`` follows from the
    step."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator for numerical stability; ``lion`` and ``adafactor`` do not use it."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay of all parameters."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """Maximum global L2 norm of the gradients; larger ones are clipped."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Keep an exponential moving average of the trained weights, such as 0.999 of it and the rest of the new
    weights at each step; the first steps count more. Evaluations, sample images and adapter files are of the
    average; checkpoints have both, and what is exported, sampled or started from them is the average. null:
    none."""
    prodigy: ProdigyConfig = ProdigyConfig()
    """Options of ``prodigy``."""

    @property
    def state_bytes(self) -> float:
        """Return the bytes that are kept of a parameter of a wide matrix besides its weight."""
        quantized = 2 * (1 + _FLOAT32 / QUANTIZED_BLOCK) if self.name == "adamw_8bit" else 0
        return _FLOAT32 * self.state_values + quantized

    @property
    def takes_rounded_gradients(self) -> bool:
        """Return whether it computes with gradients in the compute dtype, if a step has one micro batch."""
        return self.name == "adamw"

    @property
    def state_values(self) -> int:
        """Return the numbers that are kept of a parameter besides its weight."""
        return STATE_VALUES[self.name] + (self.ema_decay is not None)


def is_quantized(shape: tuple[int, ...]) -> bool:
    """Return whether ``adamw_8bit`` keeps the moments of a parameter of ``shape`` in 8 bits."""
    return len(shape) == 2 and shape[1] >= QUANTIZED_BLOCK


Decay = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


def _only_of(field: str, neutral: float, decay: Decay) -> Rule:
    """Return the rule that ``field`` is ``neutral`` unless the schedule is ``decay``."""
    return Rule(
        field,
        f"must be {neutral} unless decay is {decay}: other schedules do not use it",
        lambda schedule: getattr(schedule, field) == neutral or schedule.decay == decay,
        f"self.{field} == {neutral} || self.decay == '{decay}'",
        others=("decay",),
    )


class ScheduleConfig(StrictModel):
    """Length of the training, batch size and learning rate schedule."""

    rules: ClassVar = (
        _only_of("cycles", 1, "cosine_with_restarts"),
        _only_of("power", 1.0, "polynomial"),
    )

    steps: Positive = 30_000
    """Maximum number of optimizer steps."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Passes over the training samples, which give the number of steps instead of ``steps``, rounded up, when
    the data are opened; null: ``steps``."""
    global_batch_size: Annotated[Positive, IMMUTABLE] = 512
    """Samples per optimizer step, over all ranks and accumulation steps."""
    warmup_steps: Annotated[Count, IMMUTABLE] = 0
    """Steps of linear warm-up, with learning rate learning_rate x step / warmup_steps; of the presets
    ``mlperf-*``, as learning_rate."""
    decay: Annotated[Decay, IMMUTABLE] = "constant"
    """Learning rate schedule after the warm-up: kohya's and diffusers' of the same names."""
    decay_fraction: Annotated[Fraction, IMMUTABLE] = 1.0
    """Fraction of the steps, at the end, over which the learning rate decays; constant before. It begins
    after the warm-up at the earliest."""
    min_learning_rate: Annotated[float, Field(ge=0, le=10), IMMUTABLE] = 0.0
    """Final learning rate of every decay."""
    cycles: Annotated[Annotated[int, Field(ge=1, le=1000)], IMMUTABLE] = 1
    """Half periods of ``cosine_with_restarts``, each of which begins at the full learning rate."""
    power: Annotated[Annotated[float, Field(gt=0, le=100)], IMMUTABLE] = 1.0
    """Exponent of ``polynomial``: what remains of the decay, to this power."""


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
