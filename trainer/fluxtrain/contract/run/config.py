"""RunConfig: everything that the trainer needs to know, checked before anything starts.

It is ``spec.run`` of a FluxTraining. A preset gives every value; what the file or the command
line says beside it wins. The sentence under a field is its text in ``kubectl explain``, in
``docs/config.md`` and in ``--help``. ``FIXED`` fields make up the run's identity: the API server
refuses to change them while the job exists. All others may change from one attempt to the next.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain.contract.run.encoders import EncodersConfig, Precision, PreprocessConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.section import (
    FIXED,
    Count,
    Fraction,
    Label,
    Path,
    Positive,
    Rule,
    Section,
)

Layout = Literal["shards", "arrow", "parquet", "webdataset"]
"""What encoded samples lie in: ``shards`` are ours, the others MLCommons' and its submitters'."""
LearningRate = Annotated[float, Field(gt=0, le=10)]
LARGEST_SEED = 2**53 - 1
"""The largest whole number up to which JSON's readers agree on every one."""

PRESETS = (
    "mlperf-schnell",
    "mlperf-schnell-raw",
    "dev-finetune",
    "dev-lora",
    "benchmark",
    "openmoji",
    "micro",
)


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

    rules: ClassVar = (
        Rule(
            "latent_size",
            ("source", "image_size"),
            "must be image_size / 8 where source is images",
            lambda data: data.source != "images" or data.latent_size * 8 == data.image_size,
            "self.source != 'images' || self.latent_size * 8 == self.image_size",
        ),
    )

    source: Annotated[Literal["encoded", "images", "synthetic"], FIXED] = "encoded"
    """``encoded``: shards of text encodings and latents; ``images``: WebDataset tars of images and
    captions, encoded on the fly; ``synthetic``: made by the trainer."""
    layout: Literal["auto", Layout] = "auto"
    """What encoded samples lie in: ``shards`` are ours, the others MLCommons' and its submitters';
    ``auto`` looks into the folder."""
    train: Path = "train"
    """Folder of the training samples."""
    validation: Path = "validation"
    """Folder of the validation samples."""
    empty_encodings: Path = "empty.safetensors"
    """File with the encodings of the empty prompt, used where a prompt is dropped; or a folder with
    MLCommons' t5_empty.npy and clip_empty.npy."""
    image_size: Annotated[int, Field(ge=1, le=32_768), FIXED] = 256
    """Side of the square images in pixels."""
    latent_size: Annotated[int, Field(ge=2, le=4096, multiple_of=2), FIXED] = 32
    """Side of the latents: image_size / 8 with FLUX's autoencoder."""
    text_length: Annotated[int, Field(ge=1, le=8192), FIXED] = 256
    """Text tokens per sample."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 4
    """Loader processes per rank; 0 reads in the training process."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 4
    """Micro batches that each loader process keeps ready."""
    verify_checksums: bool = False
    """Whether each record's CRC-32 is compared as it is read."""
    max_bad_fraction: Fraction = 0.01
    """Stop when more than this part of the samples read so far, or of a validation set, could not be read."""
    synthetic: Annotated[SyntheticConfig, FIXED] = SyntheticConfig()
    """Shape of the synthetic data set."""


class PrepareConfig(Section):
    """The prepare task: a raw set of MLPerf's to the pictures and captions that ``data`` names."""

    rules: ClassVar = (
        Rule(
            "samples",
            ("dataset",),
            "must be 1 or more where dataset is coco",
            lambda prepare: prepare.samples != 0 or prepare.dataset != "coco",
            "self.samples != 0 || self.dataset != 'coco'",
        ),
        Rule(
            "problematic",
            ("dataset",),
            "must be left out where dataset is coco",
            lambda prepare: prepare.problematic is None or prepare.dataset != "coco",
            "self.dataset != 'coco'",
        ),
    )

    dataset: Annotated[Literal["cc12m", "coco"], FIXED] = "cc12m"
    """``cc12m``: cleaned to ``data.train``; ``coco``: the subset with timesteps to ``data.validation``."""
    input: Path = "raw"
    """cc12m: a folder of raw tars, the URL of a manifest, or hf://datasets/ORG/NAME[@REVISION]; coco: the
    folder that holds ``val2014`` and ``annotations``. A relative folder lies under the data root."""
    samples: Annotated[Count | None, FIXED] = None
    """How many; none: MLPerf's 1,099,776 and 29,696; 0: all that are fit, of cc12m."""
    problematic: Annotated[Path | None, FIXED] = None
    """cc12m: file of indices to leave out, one a line, under the data root."""
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes; none: one per core that may be used. The result is the same for any number."""


class FlowConfig(Section):
    """Rectified flow: how timesteps are drawn (t=0 clean, t=1 noise) and prompts dropped."""

    timestep_sampling: Literal["uniform", "logit_normal", "sigmoid", "shift", "flux_shift"] = (
        "uniform"
    )
    """Distribution of t in training; ``uniform`` is MLPerf's."""
    logit_mean: Annotated[float, Field(ge=-100, le=100)] = 0.0
    """Mean of the normal of ``logit_normal``."""
    logit_std: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Standard deviation of the normal of ``logit_normal``."""
    sigmoid_scale: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Factor on the normal of ``sigmoid``, ``shift`` and ``flux_shift`` before the sigmoid."""
    shift: Annotated[float, Field(gt=0, le=1000)] = 3.0
    """s of ``shift``: t becomes s t / (1 + (s - 1) t)."""
    prompt_dropout: Fraction = 0.1
    """Probability that a sample's text tokens and pooled vector are both the empty prompt's."""


class OptimConfig(Section):
    """AdamW on all parameters, as MLPerf fixes it."""

    learning_rate: LearningRate = 1e-4
    """Base learning rate, reached after warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay, on every parameter."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """Gradients are clipped to this global L2 norm."""


class ScheduleConfig(Section):
    """How long, in which batches, and the learning rate on the way."""

    steps: Positive = 30_000
    """Optimizer steps at most."""
    global_batch_size: Annotated[Positive, FIXED] = 512
    """Samples per optimizer step over all ranks and accumulation."""
    warmup_steps: Annotated[Count, FIXED] = 0
    """Steps of linear warm-up: learning_rate x step / warmup_steps."""
    decay: Annotated[Literal["constant", "cosine"], FIXED] = "constant"
    """What follows the warm-up."""
    decay_fraction: Annotated[Fraction, FIXED] = 1.0
    """The last part of the steps over which ``cosine`` decays; constant before."""
    min_learning_rate: Annotated[float, Field(ge=0, le=10), FIXED] = 0.0
    """Where ``cosine`` ends."""


class ParallelConfig(Section):
    """How one global batch is divided; never changes what is computed, only where."""

    micro_batch_size: Positive = 32
    """Most samples per rank in one forward pass; the rank's share is divided evenly, or filled up."""
    dp_replicate: Positive = 1
    """Whole replicas of the shards (HSDP), in an elastic job fewer while its ranks are no multiple; 1 holds
    one (FSDP2)."""
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
    target_loss: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Stop with success when the evaluation loss is at or below this."""
    at_start: bool = False
    """Whether to evaluate before the first step as well."""
    at_end: bool = False
    """Whether to evaluate after the last step, due or not."""


class CheckpointConfig(Section):
    """When the run's state is saved; the last step and a stop always are."""

    every_steps: Count = 1000
    """Save after this many steps; 0 only at the end and when asked to stop."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Complete checkpoints that are kept."""
    asynchronous: bool = True
    """Whether training goes on while the checkpoint is written."""


class AdapterConfig(Section):
    """Low-rank adapters trained in place of the model's own weights."""

    kind: Literal["lora"] = "lora"
    """Kind of adapter."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """Scale of the update: alpha / rank."""


class SamplingConfig(Section):
    """Images on the way: Euler steps from noise for prompts of the validation set."""

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
    time_shift: Literal["none", "dev"] = "none"
    """Where the steps lie in time: ``none``: evenly, as schnell's; ``dev``: FLUX.1 dev's, by resolution."""
    cfg_scale: Annotated[float, Field(ge=0, le=100)] = 3.0
    """Classifier-free guidance: 1 is none; above 1 each step runs the model twice."""
    guidance: Annotated[float, Field(ge=0, le=100), FIXED] = 3.5
    """Distilled guidance in training and sampling, for models with ``guidance_embed``."""


class MLPerfConfig(Section):
    """What the MLPerf log says about who ran this."""

    organization: Label = "example-org"
    """submission_org."""
    platform: Label = "example-platform"
    """submission_platform."""
    division: Literal["closed", "open"] = "closed"
    """submission_division; ``closed``: an unreadable validation sample ends the run."""
    status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    """submission_status."""


class LoggingConfig(Section):
    """What is written down, how often, and where it is served."""

    rules: ClassVar = (
        Rule(
            "metrics_port",
            (),
            f"must not be {RENDEZVOUS_PORT}, the rendezvous store's",
            lambda logging: logging.metrics_port != RENDEZVOUS_PORT,
            f"self.metrics_port != {RENDEZVOUS_PORT}",
        ),
    )

    every_steps: Positive = 10
    """Steps between two log lines; the loss is read from the device only then."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics and /progress; none: the usual one, or a free one where that is taken; 0: off."""
    ledger: bool = False
    """Whether each rank writes which samples it used in each step, to ``ledger/rank_*.jsonl``."""
    mlperf: MLPerfConfig = MLPerfConfig()
    """The submitter's lines of the MLPerf log."""


def _needs_images(task: str) -> Rule:
    return Rule(
        "data.source",
        ("task",),
        f"must be images where task is {task}",
        lambda run: run.task != task or run.data.source == "images",
        f"self.task != '{task}' || self.data.source == 'images'",
    )


class RunConfig(Section):
    """One training: what it computes, on what, and how it is watched."""

    rules: ClassVar = (
        Rule(
            "schedule.min_learning_rate",
            ("optim.learning_rate",),
            "must be at most optim.learning_rate",
            lambda run: run.schedule.min_learning_rate <= run.optim.learning_rate,
            "self.schedule.min_learning_rate <= self.optim.learning_rate",
        ),
        _needs_images("preprocess"),
        _needs_images("prepare"),
    )

    preset: Annotated[Literal[PRESETS], FIXED]  # type: ignore[valid-type]
    """The complete configuration that the other fields change."""
    task: Annotated[
        Literal["train", "prepare", "preprocess", "benchmark", "evaluate", "sample"], FIXED
    ] = "train"
    """What to do."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED), FIXED] = 1234
    """Seed of the weights, the sample order and every random draw."""
    model: Annotated[ModelConfig, FIXED] = ModelConfig()
    """The transformer."""
    initial_weights: Annotated[Path | None, FIXED] = None
    """Weights to start from, relative to the models root: BFL's file, a folder of diffusers, a checkpoint
    or a run of ours; none: random ones."""
    data: DataConfig = DataConfig()
    """The samples."""
    encoders: EncodersConfig = EncodersConfig()
    """The frozen encoders."""
    flow: Annotated[FlowConfig, FIXED] = FlowConfig()
    """Timesteps and prompt dropout."""
    optim: Annotated[OptimConfig, FIXED] = OptimConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Length, batch size, learning rate."""
    parallel: ParallelConfig = ParallelConfig()
    """Division over ranks."""
    precision: Annotated[PrecisionConfig, FIXED] = PrecisionConfig()
    """Number formats."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The evaluation loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and keeping state."""
    prepare: PrepareConfig = PrepareConfig()
    """What the prepare task makes."""
    preprocess: PreprocessConfig = PreprocessConfig()
    """What the preprocess task writes."""
    adapter: Annotated[AdapterConfig | None, FIXED] = None
    """Train adapters only."""
    sampling: SamplingConfig = SamplingConfig()
    """Images on the way."""
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

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Return the shape "ch h w" of one sample's latents, before packing."""
        side = self.data.latent_size
        return self.latent_channels, side, side
