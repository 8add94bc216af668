"""RunConfig, ``spec.run`` of a FluxTraining: the whole configuration of the trainer.

A preset sets every field; the file and the command line override it. The docstring of a field is its
description in ``kubectl explain``, ``docs/config.md`` and ``--help-fields``. The API server refuses changes
of ``IMMUTABLE`` fields while the job exists; the others may change from one attempt to the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from fluxtrain.contract.model_base import (
    IMMUTABLE,
    Count,
    Fraction,
    Label,
    Path,
    Positive,
    Rule,
    StrictModel,
    iter_fields,
)
from fluxtrain.contract.process import RENDEZVOUS_PORT
from fluxtrain.contract.run.adapter import (
    ADAPTER_RULES,
    AdapterConfig,
    AdapterFileConfig,
    AddedAdapter,
)
from fluxtrain.contract.run.data import DataConfig, Side
from fluxtrain.contract.run.model import CONDITIONS, DEPTHS, ModelConfig
from fluxtrain.contract.run.optim import FlowConfig, OptimConfig, ScheduleConfig
from fluxtrain.contract.run.precision import (
    PRECISION_RULES,
    EncodersConfig,
    Fp8,
    Precision,
    PrecisionConfig,
    PreprocessConfig,
    SamplingConfig,
)
from fluxtrain.contract.run.presets import MLPERF_EVALUATION_SAMPLES, PRESETS
from fluxtrain.errors import ConfigError

_Project = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=r"^[^/\\#?%:\x00-\x1f\x7f]+$",
        title="1 to 128 characters without / \\ # ? % :",
    ),
]
_Tag = Annotated[str, Field(min_length=1, max_length=64)]


class WandbConfig(StrictModel):
    """A run at Weights & Biases. The key is read from the variable WANDB_API_KEY alone."""

    project: _Project = "fluxtrain"
    """Project of the run."""
    entity: Label | None = None
    """Team or user of the project; null: the key's default."""
    name: Label | None = None
    """Name of the run; null: Weights & Biases invents one."""
    group: Label | None = None
    """Group of the run; null: none."""
    tags: Annotated[list[_Tag], Field(max_length=20)] = []
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``online``: send; without a key or a connection as ``offline``: write to ``wandb/`` of the output,
    which ``wandb sync`` sends later; ``disabled``: do nothing."""


class MLPerfConfig(StrictModel):
    """Submitter's entries of the MLPerf log."""

    organization: Label = "example-org"
    """submission_org of the MLPerf log."""
    platform: Label = "example-platform"
    """submission_platform of the MLPerf log."""
    division: Literal["closed", "open", "auto"] = "open"
    """submission_division of the MLPerf log. ``closed`` is possible with the presets ``mlperf-*`` only, which
    have it; what breaks a rule is refused, or ends the run. With ``auto`` the run is closed as long as no
    rule is broken; the log says which one made it open."""
    status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    """submission_status of the MLPerf log."""


class PreflightConfig(StrictModel):
    """A check before training: each rank's matrix products, and its exchanges with other nodes, are compared
    with the median of all ranks."""

    factor: Annotated[float, Field(gt=1, le=100)] = 1.5
    """A rank whose matrix product, or whose exchange with each of its partners, is slower than the median by
    more than this factor ends the start; its pod is replaced."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Longest time of the matrix products and of the all-reduces together; at least two of each run. An
    exchange between two nodes that takes half of it has timed out."""


_Sizes = Annotated[list[Side], Field(max_length=16)]
_Lengths = Annotated[list[Annotated[int, Field(ge=1, le=8192)]], Field(max_length=16)]
_Batches = Annotated[list[Annotated[int, Field(ge=1, le=65_536)]], Field(max_length=64)]


class BenchmarkConfig(StrictModel):
    """The benchmark task: speed and memory of training steps, for every combination of the lists below."""

    image_sizes: _Sizes = []
    """Side lengths of the images in pixels, eight for each latent; empty: data.image_size."""
    text_lengths: _Lengths = []
    """Text tokens per sample; empty: data.text_length."""
    compute: Annotated[list[Precision], Field(max_length=4)] = []
    """Data types of forward and backward; empty: precision.compute."""
    fp8: Annotated[list[Fp8], Field(max_length=3)] = []
    """How the blocks' linear layers use fp8; empty: precision.fp8."""
    activation_checkpointing: Annotated[list[Fraction], Field(max_length=16)] = []
    """Fractions of the blocks that recompute their activations; empty: parallel.activation_checkpointing."""
    compile: Annotated[list[bool], Field(max_length=2)] = []
    """Whether blocks are compiled; empty: parallel.compile."""
    micro_batch_sizes: _Batches = []
    """Samples per rank and step; empty: the largest that fits, which is searched for from
    parallel.micro_batch_size on, and the powers of two below it."""
    scaling: Annotated[list[Literal["weak", "strong"]], Field(max_length=2)] = []
    """Also measure on 1, 2, 4 ... nodes up to all, or on as many ranks of a single node: ``weak`` with the
    fastest batch per rank, ``strong`` with schedule.global_batch_size for all ranks together."""
    largest_micro_batch: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Where that search ends."""
    warmup_steps: Count = 10
    """Steps before the measurement, rounded up to whole fifths of it."""
    steps: Positive = 30
    """Steps that are measured, in five parts."""
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Memory of a rank without a GPU; null: four fifths of what is free, divided among the node's ranks."""
    trial_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1800
    """A measurement that takes longer is ended, and counts as failed."""


_SECRET_IN_URL = r"(?i)^[a-z+.-]+://[^/?#]*@|[?&][^=&]*(sig|token|key|credential|password)[^=&]*="
"""A user name, or a query with a signature or a token."""


class PrepareConfig(StrictModel):
    """The prepare task: converts MLPerf's raw data to the images and captions that ``data`` names."""

    rules: ClassVar = (
        Rule(
            "input",
            "must have no user name, password, token or signature: whoever may view the job can read it",
            lambda prepare: re.search(_SECRET_IN_URL, prepare.input) is None,
            f"!self.input.matches('{_SECRET_IN_URL}')",
        ),
        Rule(
            "samples",
            "must be 1 or more if dataset is coco",
            lambda prepare: prepare.samples != 0 or prepare.dataset != "coco",
            "self.samples != 0 || self.dataset != 'coco'",
            others=("dataset",),
        ),
        Rule(
            "problematic",
            "must be left out if dataset is coco",
            lambda prepare: prepare.problematic is None or prepare.dataset != "coco",
            "self.dataset != 'coco'",
            others=("dataset",),
        ),
    )

    dataset: Annotated[Literal["cc12m", "coco"], IMMUTABLE] = "cc12m"
    """``cc12m``: cleaned, to ``data.train``; ``coco``: a subset with timesteps, to ``data.validation``."""
    input: Path = "raw"
    """cc12m: a folder of raw tars, the URL of a manifest, or hf://datasets/ORG/NAME[@REVISION]; coco: the
    folder with ``val2014`` and ``annotations``. A relative folder is below the data root."""
    samples: Annotated[Count | None, IMMUTABLE] = None
    """Number of samples; null: MLPerf's 1,099,776 of cc12m, 29,696 of coco; 0: all usable ones of cc12m."""
    problematic: Annotated[Path | None, IMMUTABLE] = None
    """cc12m: file with indices to leave out, one per line, below the data root."""
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Worker processes; null: one per available core. The result does not depend on it."""


PER_NODE: Final = "per-node"
"""The value of ``parallel.dp_replicate`` with which each node is a replica."""
RANDOM_SEED: Final = "random"
"""The value of ``seed`` with which each run draws its own."""
LARGEST_SEED = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""


AUTO: Final = "auto"
"""The value of ``parallel.micro_batch_size`` with which a run finds its own."""
Kernel = Literal["blocks", "optimizer"]


class ParallelConfig(StrictModel):
    """Distribution of a global batch over ranks; does not change what is computed."""

    micro_batch_size: Positive | Literal["auto"] = 32
    """Maximum samples per rank and forward pass; the rank's share is split evenly, with padding if needed.
    ``auto``: a training takes the most that fit the smallest GPU by the estimate of ``fluxtrain plan``, or
    half of the memory of a machine without one; the number is printed, and kept in the output for all later
    starts as long as it fits."""
    dp_replicate: Positive | Literal["per-node"] = 1
    """Replicas of the sharded state (HSDP); 1 is plain FSDP2; ``per-node``: each node holds one, however many
    nodes there are. Fewer than the number are used if the ranks of each would not be part of one node, or
    whole nodes."""
    reshard_after_forward: bool | None = None
    """Free gathered weights after the forward pass: less memory, one more all-gather; null: unless a step
    needs less than four fifths of the GPU's memory without it, by the estimate of ``fluxtrain plan``."""
    activation_checkpointing: Fraction = 0.0
    """Fraction of the blocks, evenly spaced, whose activations are recomputed in the backward pass."""
    offload_blocks: Count = 0
    """Blocks, evenly spaced, whose frozen weights are in page-locked host memory, not in the GPU's; only with
    ``adapter``. They are copied while the blocks between compute, to two buffers that stay on the GPU, so two
    blocks or fewer save nothing. Each rank has them whole. ``fluxtrain plan`` prints the memory of both, and
    whether the copies take longer than the step."""
    compile: bool | None = None
    """Compile each block with torch.compile before training starts; null: on GPUs that have Triton and a C
    compiler, not on CPUs, for which it needs a C++ compiler."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Torch's implementation of attention, as in its SDPBackend; ``auto``: torch's first choice for the
    device and the shapes. A run that names one which its device lacks is refused. CPUs have ``flash`` and
    ``math``, ROCm no ``cudnn``; there ``flash`` is AOTriton's, or composable kernel's if
    TORCH_ROCM_FA_PREFER_CK=1. ``math`` keeps the scores of all pairs of tokens in memory."""
    kernels: Annotated[list[Kernel], Field(max_length=2)] | None = None
    """Parts of a step that have Triton kernels of our own instead of torch's: ``blocks``, what is between the
    matrix products of the blocks in bfloat16, and ``optimizer``, AdamW's step; both need GPUs and compiled
    blocks. Null: those that the run and its GPU allow, which the run's config.json names. []: none. A
    training that names one which cannot run is refused."""

    @property
    def most_samples(self) -> int:
        """Return ``micro_batch_size``, which the trainer has replaced by a number if it was ``auto``."""
        assert isinstance(self.micro_batch_size, int), "train.micro_batch has found it"
        return self.micro_batch_size

    @property
    def reshards(self) -> bool:
        """Return whether gathered weights are freed; null is replaced where the GPU's memory is known."""
        return self.reshard_after_forward is not False

    def compiles(self, has_gpu: bool) -> bool:
        """Return whether blocks are compiled on GPUs, or on CPUs, of a machine with a compiler."""
        return has_gpu if self.compile is None else self.compile


class EvaluationConfig(StrictModel):
    """MLPerf's evaluation: the loss over the whole validation set at stored timesteps t = 0/8 ... 7/8."""

    every_samples: Count = MLPERF_EVALUATION_SAMPLES
    """Training samples between two evaluations, rounded up to a whole global batch; 0: no evaluation."""
    batch_size: Positive = 16
    """Samples per rank and forward pass."""
    target_loss: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Complete the run if the evaluation loss is at or below this; null: no target."""
    at_start: bool = False
    """Also evaluate before the first step."""
    at_end: bool = False
    """Also evaluate after the last step."""

    @property
    def is_on(self) -> bool:
        """Return whether a run evaluates at all."""
        return self.every_samples > 0 or self.at_start or self.at_end


class CheckpointConfig(StrictModel):
    """Checkpoints; one is always saved after the last step and when the run is stopped."""

    every_steps: Count = 1000
    """Steps between two checkpoints; 0: only at the end and when stopped."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of complete checkpoints to keep."""
    asynchronous: bool = True
    """Continue training while the checkpoint is written."""
    memory_every_steps: Count | None = None
    """Steps between two snapshots in memory, from which crashed processes and replaced nodes continue; null:
    as many as cost at most 1 % of the training time; 0: none."""


class LoggingConfig(StrictModel):
    """Logs and metrics."""

    rules: ClassVar = (
        Rule(
            "metrics_port",
            f"must not be {RENDEZVOUS_PORT}, the port of the rendezvous",
            lambda logging: logging.metrics_port != RENDEZVOUS_PORT,
            f"self.metrics_port != {RENDEZVOUS_PORT}",
        ),
    )

    every_steps: Positive = 10
    """Steps between two log lines; the loss is copied from the device only then."""
    straggler_factor: Annotated[float, Field(gt=1, le=100)] | None = 1.2
    """A rank that is slower than the median by more than this factor is a straggler; null: none is named."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics and /progress; null: 9464, or a free one if it is in use; 0: disabled."""
    ledger: bool = False
    """Write the samples that each rank used in each step to ``ledger/rank_*.jsonl``."""
    tensorboard: bool = False
    """Also write metrics and sample images to ``tensorboard/`` of the output; needs the package
    tensorboard."""
    wandb: WandbConfig | None = None
    """Also send them to Weights & Biases, such as {project: flux}; needs the package wandb; null: no."""
    mlperf: MLPerfConfig = MLPerfConfig()
    """Submitter's entries of the MLPerf log."""


def _needs_images(task: str) -> Rule:
    return Rule(
        "data.source",
        f"must be images if task is {task}",
        lambda run: run.task != task or run.data.source == "images",
        f"self.task != '{task}' || self.data.source == 'images'",
        others=("task",),
    )


_BLOCK_RULES = (
    Rule(
        "parallel.offload_blocks",
        "must be 0 without adapter: only frozen weights stay as they are on the host",
        lambda run: run.parallel.offload_blocks == 0 or run.adapter is not None,
        "self.parallel.offload_blocks == 0 || has(self.adapter) || self.preset in "
        f"{[name for name, values in PRESETS.items() if 'adapter' in values]}",
    ),
    Rule(
        "parallel.offload_blocks",
        "must be at most the number of blocks",
        lambda run: run.parallel.offload_blocks <= run.model.num_blocks,
        "self.parallel.offload_blocks <= " + " + ".join(f"self.model.{f}" for f in DEPTHS.values()),
        others=tuple(f"model.{field}" for field in DEPTHS.values()),
    ),
)
_CONDITIONED = ("train", "sample", "benchmark")
_SYNTHETIC = [
    name for name, values in PRESETS.items() if values.get("data", {}).get("source") == "synthetic"
]


def _paired_rule(name: str) -> Rule:
    return Rule(
        "model.condition",
        f"must not be {name} without data.controls, the pictures that those of data.images are made from",
        lambda run: run.model.condition != name or not run.data.images or bool(run.data.controls),
        f"self.model.condition != '{name}' || has(self.data.controls)",
        others=("data.images",),
    )


_CONDITION_RULES = (
    Rule(
        "model.condition",
        "must be none unless task is train, sample or benchmark: only data.images has conditions",
        lambda run: run.model.condition == "none" or run.task in _CONDITIONED,
        f"self.model.condition == 'none' || self.task in {list(_CONDITIONED)}",
        others=("task",),
    ),
    Rule(
        "model.condition",
        "must be none unless data.images is set, or data.source is synthetic",
        lambda run: (
            run.model.condition == "none"
            or run.task != "train"
            or run.data.images is not None
            or run.data.source == "synthetic"
        ),
        "self.model.condition == 'none' || has(self.task) && self.task != 'train' || has(self.data) && "
        "(has(self.data.images) || has(self.data.source) && self.data.source == 'synthetic') || "
        f"self.preset in {_SYNTHETIC}",
    ),
    *(_paired_rule(name) for name, condition in CONDITIONS.items() if not condition.has_hole),
    Rule(
        "data.controls",
        "must be null unless model.condition is set",
        lambda run: run.data.controls is None or run.model.condition != "none",
        "has(self.model) && has(self.model.condition) && self.model.condition != 'none'",
    ),
    Rule(
        "data.validation",
        "must be none if model.condition is set: encoded samples have no conditions; use validation_split",
        lambda run: (
            run.data.validation is None
            or run.model.condition == "none"
            or run.data.images is None
            or run.task != "train"
        ),
        "self.data.validation == 'none' || self.model.condition == 'none' || !has(self.data.images)",
        others=("model.condition",),
    ),
)
"""Rules of RunConfig."""


class RunConfig(StrictModel):
    """The configuration of a run."""

    rules: ClassVar = (
        Rule(
            "schedule.min_learning_rate",
            "must be at most optim.learning_rate",
            lambda run: run.schedule.min_learning_rate <= run.optim.learning_rate,
            "self.schedule.min_learning_rate <= self.optim.learning_rate",
            others=("optim.learning_rate",),
        ),
        _needs_images("preprocess"),
        _needs_images("prepare"),
        *ADAPTER_RULES,
        *PRECISION_RULES,
        *_BLOCK_RULES,
        *_CONDITION_RULES,
    )

    preset: Annotated[Literal[tuple(PRESETS)], IMMUTABLE]  # type: ignore[valid-type]
    """Complete configuration that the other fields override."""
    task: Annotated[
        Literal["train", "prepare", "preprocess", "benchmark", "evaluate", "sample"], IMMUTABLE
    ] = "train"
    """Task of the run."""
    seed: Annotated[Annotated[int, Field(ge=0, le=LARGEST_SEED)] | Literal["random"], IMMUTABLE] = (
        1234
    )
    """Seed of the initial weights, the sample order and all random draws. ``random``: drawn once per output
    folder from the system's randomness, kept there and logged, so that a resumed run has the same."""
    model: Annotated[ModelConfig, IMMUTABLE] = ModelConfig()
    """The transformer."""
    initial_weights: Annotated[Path | None, IMMUTABLE] = None
    """Weights to start from, relative to the models root: BFL's file, a diffusers folder, a checkpoint or the
    output of a run; null: random initialization."""
    data: DataConfig = DataConfig()
    """Training and validation samples."""
    encoders: EncodersConfig = EncodersConfig()
    """Frozen text encoders and autoencoder."""
    flow: Annotated[FlowConfig, IMMUTABLE] = FlowConfig()
    """Sampling of timesteps and prompt dropout."""
    optim: Annotated[OptimConfig, IMMUTABLE] = OptimConfig()
    """Optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Length, batch size and learning rate schedule."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution over ranks."""
    precision: Annotated[PrecisionConfig, IMMUTABLE] = PrecisionConfig()
    """Data types."""
    preflight: PreflightConfig | None = None
    """Check of all devices before training starts, such as {}; null: none."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    benchmark: BenchmarkConfig = BenchmarkConfig()
    """What the benchmark task measures."""
    prepare: PrepareConfig = PrepareConfig()
    """Input of the prepare task."""
    preprocess: PreprocessConfig = PreprocessConfig()
    """Output of the preprocess task."""
    adapter: Annotated[AdapterConfig | None, IMMUTABLE] = None
    """Adapters to train instead of the weights."""
    adapter_file: AdapterFileConfig = AdapterFileConfig()
    """Files of trained adapters."""
    added_adapters: Annotated[list[AddedAdapter], Field(max_length=16)] = []
    """Adapters that are added to ``initial_weights`` in the tasks sample and evaluate, such as
    ``[{path: style.safetensors, strength: 0.8}]``; paths are relative to the models root."""
    sampling: SamplingConfig = SamplingConfig()
    """Image sampling."""
    logging: LoggingConfig = LoggingConfig()
    """Logs and metrics."""

    @property
    def drawn_seed(self) -> int:
        """Return the seed, which the trainer has replaced by a number if it was ``random``."""
        assert isinstance(self.seed, int), "random_seed.with_seed has drawn it"
        return self.seed

    @property
    def trains_clip(self) -> bool:
        """Return whether adapters of the CLIP text encoder are trained."""
        return self.adapter is not None and self.adapter.clip is not None

    @property
    def training_guidance(self) -> float:
        """Return the distilled guidance of training and evaluation."""
        return self.sampling.guidance if self.flow.guidance is None else self.flow.guidance

    @property
    def evaluation_steps(self) -> int:
        """Return the steps between two evaluations, ceil(every_samples / batch) as in MLPerf; 0: none."""
        return math.ceil(self.evaluation.every_samples / self.schedule.global_batch_size)

    @property
    def image_tokens(self) -> int:
        """Return the number of image tokens (packed latents) of one sample, the largest."""
        return self.model.image_tokens(*self.data.largest_latent)

    @property
    def latent_channels(self) -> int:
        """Return the channels of the latents that are noised, before packing."""
        return self.model.out_channels // 4

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Return the shape "ch h w" of one sample's latents, the largest, with its condition's below them."""
        channels = self.latent_channels + self.model.condition_channels
        return channels, *self.data.largest_latent


@dataclass(frozen=True)
class Sharding:
    """Distribution of the training state over the ranks of equal nodes."""

    num_ranks: int
    ranks_per_node: int
    dp_replicate: int

    @staticmethod
    def of(config: RunConfig, num_ranks: int, ranks_per_node: int) -> Sharding:
        """Return the sharding with as many replicas as ``config`` allows.

        The ranks of a replica are all or some of one node, or whole nodes: a replica that shares nodes with
        others would gather its weights across nodes without need.
        """
        requested = config.parallel.dp_replicate
        most = num_ranks // ranks_per_node if requested == PER_NODE else min(requested, num_ranks)
        counts = (count for count in range(most, 1, -1) if num_ranks % count == 0)
        shardings = (Sharding(num_ranks, ranks_per_node, count) for count in counts)
        aligned = (sharding for sharding in shardings if sharding._is_aligned)
        return next(aligned, Sharding(num_ranks, ranks_per_node, 1))

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def dp_shard(self) -> int:
        """Return the number of ranks that share one replica of the state."""
        return self.num_ranks // self.dp_replicate

    @property
    def crosses_nodes(self) -> bool:
        """Return whether the ranks of one replica are on several nodes."""
        return self.dp_shard > self.ranks_per_node

    @property
    def _is_aligned(self) -> bool:
        smaller, larger = sorted((self.dp_shard, self.ranks_per_node))
        return larger % smaller == 0


def require_replicas(config: RunConfig, rank_counts: Sequence[int]) -> None:
    """Raise ConfigError if a fixed dp_replicate divides none of ``rank_counts``, which are ascending."""
    requested = config.parallel.dp_replicate
    if requested != PER_NODE and all(count % requested for count in rank_counts):
        first, last = rank_counts[0], rank_counts[-1]
        counts = f"{first}" if first == last else f"{first} to {last}"
        text = f"must divide the number of ranks, {counts}"
        raise ConfigError("spec.run.parallel.dp_replicate", requested, text)


IMMUTABLE_PATHS = tuple(field.path for field in iter_fields(RunConfig) if field.immutable)
"""The fields that determine the result; the others are paths, resources and intervals.

A resume from a checkpoint with other values is refused, as is a change through the API server.
"""


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path`` in nested mappings, None if it is missing."""
    value: Any = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
