"""``spec.run.benchmark``: what the benchmark task measures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.run.buckets import PIXELS_PER_TOKEN
from fluxtrain.contract.run.encoders import Precision
from fluxtrain.contract.run.precision import Fp8
from fluxtrain.contract.strict_model import Count, Fraction, Positive, StrictModel

_Sizes = Annotated[
    list[Annotated[int, Field(ge=16, le=32_768, multiple_of=PIXELS_PER_TOKEN)]],
    Field(max_length=16),
]
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
