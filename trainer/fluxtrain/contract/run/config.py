"""RunConfig, ``spec.run`` of a FluxTraining: the whole configuration of the trainer.

A preset sets every field; the file and the command line override it. The docstring of a field is its
description in ``kubectl explain``, ``docs/config.md`` and ``--help-fields``. The API server refuses changes
of ``IMMUTABLE`` fields while the job exists; the others may change from one attempt to the next.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain.contract.run.adapter import (
    ADDED_ADAPTERS,
    CLIP_NEEDS_CLIP,
    CLIP_NEEDS_IMAGES,
    AdapterConfig,
    AdapterFileConfig,
    AddedAdapter,
)
from fluxtrain.contract.run.benchmark import BenchmarkConfig
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.encoders import EncodersConfig, PreprocessConfig
from fluxtrain.contract.run.flow import FlowConfig
from fluxtrain.contract.run.mlperf import MLPerfConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.contract.run.precision import (
    FP8_WIDTHS,
    WITHOUT_ADAPTERS,
    WITHOUT_AVERAGED_STEPS,
    PrecisionConfig,
)
from fluxtrain.contract.run.preflight import PreflightConfig
from fluxtrain.contract.run.prepare import PrepareConfig
from fluxtrain.contract.run.presets import MLPERF_EVALUATION_SAMPLES, PRESETS
from fluxtrain.contract.run.sampling import SamplingConfig
from fluxtrain.contract.run.schedule import ScheduleConfig
from fluxtrain.contract.run.wandb import WandbConfig
from fluxtrain.contract.strict_model import (
    IMMUTABLE,
    Count,
    Fraction,
    Path,
    Positive,
    Rule,
    StrictModel,
)

PER_NODE: Final = "per-node"
"""The value of ``parallel.dp_replicate`` with which each node is a replica."""
RANDOM_SEED: Final = "random"
"""The value of ``seed`` with which each run draws its own."""
LARGEST_SEED = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""


class ParallelConfig(StrictModel):
    """Distribution of a global batch over ranks; does not change what is computed."""

    micro_batch_size: Positive = 32
    """Maximum samples per rank and forward pass; the rank's share is split evenly, with padding if needed."""
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
    blocks or fewer save nothing. Each rank has them whole. ``fluxtrain plan`` tells the memory of both, and
    whether the copies take longer than the step."""
    compile: bool | None = None
    """Compile each block with torch.compile before training starts; null: on GPUs that have Triton and a C
    compiler, not on CPUs, for which it needs a C++ compiler."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Torch's implementation of attention, as in its SDPBackend; ``auto``: torch's first choice for the
    device and the shapes. A run that names one which its device lacks is refused. CPUs have ``flash`` and
    ``math``, ROCm no ``cudnn``; there ``flash`` is AOTriton's, or composable kernel's if
    TORCH_ROCM_FA_PREFER_CK=1. ``math`` keeps the scores of all pairs of tokens in memory."""

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


OFFLOADED_BLOCKS = (
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
        lambda run: run.parallel.offload_blocks <= run.model.depth + run.model.depth_single_blocks,
        "self.parallel.offload_blocks <= self.model.depth + self.model.depth_single_blocks",
        others=("model.depth", "model.depth_single_blocks"),
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
        ADDED_ADAPTERS,
        CLIP_NEEDS_IMAGES,
        CLIP_NEEDS_CLIP,
        FP8_WIDTHS,
        WITHOUT_ADAPTERS,
        WITHOUT_AVERAGED_STEPS,
        *OFFLOADED_BLOCKS,
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
        height, width = self.data.largest_latent
        return height * width // 4

    @property
    def latent_channels(self) -> int:
        """Return the channels of the latents before packing."""
        return self.model.in_channels // 4

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Return the shape "ch h w" of one sample's latents, the largest, before packing."""
        return self.latent_channels, *self.data.largest_latent
