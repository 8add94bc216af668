"""/dev/shm holds the batches that the data loaders keep there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.resource.fluxtraining import Spec
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.data.loader import evaluation_batches, training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.parallel.node_memory import loader_bytes, sample_bytes
from fluxtrain_operator.resources.volumes import shared_memory

ENCODED = 256 * 4096 * 4 + 768 * 4 + 4 * 16 * 32 * 32 * 4
"""Bytes of a sample of MLPerf: T5's and CLIP's encodings, and four tensors of its latents' shape."""
IMAGE = 3 * 256 * 256 + 2 * 16 * 32 * 32 * 4 + 8192

OPEN = {"logging": {"mlperf": {"division": "open"}}}


def config_of(preset: str, **changes: Any) -> RunConfig:
    return resolve(merge({"preset": preset}, changes))


def spec_of(**fields: Any) -> Spec:
    return validate(Spec, {"run": {"preset": "micro"}, **fields}, "spec")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of("mlperf-schnell"), ENCODED),
        (config_of("mlperf-schnell-raw"), IMAGE),
        (config_of("micro"), 4 * 16 * 4 + 16 * 4 + 4 * 4 * 4 * 4 * 4),
    ],
    ids=["encoded", "images", "synthetic"],
)
def test_the_bytes_of_a_sample(config: RunConfig, expected: int) -> None:
    assert sample_bytes(config) == expected


@pytest.mark.parametrize(
    ("config", "num_ranks", "expected"),
    [
        (config_of("micro"), 1, 0),  # the training process loads
        (config_of("mlperf-schnell"), 1, 18 * (32 + 16) * ENCODED),
        (config_of("mlperf-schnell"), 16, 18 * (32 + 16) * ENCODED),
        (config_of("mlperf-schnell"), 64, 18 * (8 + 16) * ENCODED),  # 512 / 64 samples
        (config_of("mlperf-schnell"), 1000, 18 * (1 + 16) * ENCODED),
        (
            config_of("mlperf-schnell", **OPEN, evaluation={"every_samples": 0}),
            1,
            18 * 32 * ENCODED,
        ),
        (config_of("mlperf-schnell", data={"num_workers": 1, "prefetch": 1}), 1, 3 * 48 * ENCODED),
        (config_of("mlperf-schnell-raw", task="preprocess"), 1, 18 * 64 * IMAGE),
        (config_of("mlperf-schnell-raw", task="prepare"), 1, 0),
    ],
)
def test_the_batches_of_a_rank(config: RunConfig, num_ranks: int, expected: int) -> None:
    assert loader_bytes(config, num_ranks) == expected


@pytest.mark.parametrize(
    ("preset", "fields", "size"),
    [
        ("micro", {}, "1Gi"),
        ("micro", {"gpusPerNode": 1}, "1Gi"),
        ("micro", {"gpusPerNode": 8}, "4Gi"),  # collectives only
        ("mlperf-schnell", {}, "4Gi"),
        ("mlperf-schnell", {"gpusPerNode": 8}, "33Gi"),
        ("mlperf-schnell", {"gpusPerNode": 8, "nodes": {"min": 4, "max": 4}}, "24Gi"),
        ("mlperf-schnell", {"gpusPerNode": 8, "nodes": {"min": 8, "max": 8}}, "19Gi"),
    ],
)
def test_the_size_for_a_pod(preset: str, fields: dict[str, Any], size: str) -> None:
    assert shared_memory(config_of(preset), spec_of(**fields)) == size


def bytes_of(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.tensors().values())


def test_real_batches_are_as_large_as_computed(tmp_path: Path) -> None:
    config = config_of("micro", data={"text_length": 64})
    sources = open_sources(config, tmp_path)
    shares = BatchShares.of(config, 1)
    training = next(training_batches(config, sources, shares, rank=0))
    evaluation = next(iter(evaluation_batches(config, sources.validation, 0, 1)))
    for batch in (training, evaluation):
        assert isinstance(batch, Batch)
        assert bytes_of(batch) == pytest.approx(len(batch) * sample_bytes(config), rel=0.01)
