"""OptimConfig: the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.model_base import IMMUTABLE, Count, Fraction, Positive, Rule, StrictModel

LearningRate = Annotated[float, Field(gt=0, le=10)]
OptimizerName = Literal[
    "adamw", "adamw_8bit", "adafactor", "lion", "prodigy", "schedule_free_adamw"
]


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimizer without torch: its state, what it sums over the ranks, what it needs."""

    state_values: int = 0
    """Numbers that it keeps of each value of a parameter in float32, in checkpoints too."""
    quantized_values: int = 0
    """Numbers that it keeps of each value in 8 bits, with scales; in float32 unless `is_quantized`."""
    is_factored: bool = False
    """Whether it keeps a number of each row, and of each column, of a matrix; it sums the columns and a
    number of each tensor over the ranks."""
    shared_values: int = 0
    """Numbers in float64 that it keeps of the whole model."""
    summed_values: int = 0
    """Numbers in float64 that one all-reduce of each step sums over the ranks."""
    step_bytes: int = 17
    """Bytes of each value of weights in bfloat16 while a step changes it: weight, gradient, random numbers,
    the result, and intermediate results of the optimizer."""
    takes_rounded_gradients: bool = False
    """Whether it computes with gradients in the compute dtype, if a step has one micro batch."""
    has_kernel: bool = False
    """Whether a Triton kernel of our own takes its step on GPUs."""
    finds_step_size: bool = False
    """Whether the learning rate is a factor of a step size that it finds, one for all parameters."""
    averages: bool = False
    """Whether it averages the weights by itself: it has weights of its own next to the parameters."""


OPTIMIZER_KINDS: Mapping[OptimizerName, OptimizerKind] = {
    "adamw": OptimizerKind(state_values=2, takes_rounded_gradients=True, has_kernel=True),
    "adamw_8bit": OptimizerKind(quantized_values=2),
    "adafactor": OptimizerKind(is_factored=True),
    "lion": OptimizerKind(state_values=1, step_bytes=17 + 4),
    "prodigy": OptimizerKind(
        state_values=4, shared_values=3, summed_values=2, step_bytes=17 + 4, finds_step_size=True
    ),
    "schedule_free_adamw": OptimizerKind(state_values=2, shared_values=2, averages=True),
}
QUANTIZED_BLOCK = 256
"""Most neighbours in a row of a matrix that share a scale; shorter rows are in float32."""
_FLOAT32 = 4
_FINDING = [name for name, kind in OPTIMIZER_KINDS.items() if kind.finds_step_size]
AVERAGING = [name for name, kind in OPTIMIZER_KINDS.items() if kind.averages]


def is_none_of(path: str, names: Sequence[OptimizerName]) -> str:
    """Return the CEL expression that the optimizer's name at ``path`` is none of ``names``."""
    return " && ".join(f"{path} != '{name}'" for name in names)


_LEAST_FACTOR = 0.01
"""Least factor of a step size that is found: smaller ones are meant for other optimizers."""


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
            f"must be at least {_LEAST_FACTOR} if name is {' or '.join(_FINDING)}: it is a factor of the "
            f"step size that {' or '.join(_FINDING)} finds; 1.0 is usual",
            lambda optim: not optim.kind.finds_step_size or optim.learning_rate >= _LEAST_FACTOR,
            f"{is_none_of('self.name', _FINDING)} || self.learning_rate >= {_LEAST_FACTOR}",
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
            f"must be null if name is {' or '.join(AVERAGING)}: it averages the weights by itself",
            lambda optim: optim.ema_decay is None or not optim.kind.averages,
            is_none_of("self.name", AVERAGING),
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
    def kind(self) -> OptimizerKind:
        """Return what is known of the optimizer without torch."""
        return OPTIMIZER_KINDS[self.name]

    @property
    def averages(self) -> bool:
        """Return whether the run is judged by averages of the weights."""
        return self.ema_decay is not None or self.kind.averages

    @property
    def state_bytes(self) -> float:
        """Return the bytes that are kept of a parameter of a wide matrix besides its weight."""
        quantized = self.kind.quantized_values * (1 + _FLOAT32 / QUANTIZED_BLOCK)
        return _FLOAT32 * self.state_values + quantized

    @property
    def state_values(self) -> int:
        """Return the numbers that are kept of a parameter besides its weight."""
        return self.kind.state_values + (self.ema_decay is not None)


def is_quantized(shape: tuple[int, ...]) -> bool:
    """Return whether the `quantized_values` of a parameter of ``shape`` are in 8 bits."""
    return len(shape) == 2 and shape[1] >= QUANTIZED_BLOCK


Decay = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


def _only_of(field: str, neutral: float, decay: Decay) -> Rule:
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
