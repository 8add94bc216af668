"""Small training runs on images and on their encodings, and the batches that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.trainer import ranks
from tests.trainer.tiny_encoders import config

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Layout
from fluxtrain.contract.run.resolve import merge
from fluxtrain.data.dataset import AnyBatch
from fluxtrain.data.images import ImageDataset
from fluxtrain.data.loader import training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import Sources, open_empty_text, open_source

_TRAINING = {
    "schedule": {"steps": 8, "global_batch_size": 12},
    "parallel": {"micro_batch_size": 6},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
    "evaluation": {"every_samples": 48, "batch_size": 5, "at_end": True},
    "checkpoint": {"every_steps": 3},
}


def image_run(**changes: Any) -> RunConfig:
    return config(**merge(_TRAINING, changes))


def encoded_run(layout: Layout, **changes: Any) -> RunConfig:
    data = {
        "source": "encoded",
        "train": f"{layout}/train",
        "validation": f"{layout}/validation",
        "empty_encodings": "preprocessed/empty.safetensors",
    }
    return image_run(**merge({"data": data}, changes))


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [r.get("train_loss", r.get("eval_loss")) for r in map(json.loads, lines)]


def ledger(output: Path) -> list[dict[str, Any]]:
    files = (output / "ledger").glob("rank_*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def train(run: RunConfig, prepared: RunPaths, output: Path) -> list[float]:
    """Train in ``output``; return all losses, of training and evaluation."""
    paths = RunPaths(output, prepared.data, prepared.models)
    assert ranks.finish(ranks.train_alone, run, paths) == [0], ranks.output_of(paths)
    return losses(output)


def batches(
    run: RunConfig, root: Path, rank: int = 0, ranks: int = 1, micro: int = 6, first: int = 0
) -> Iterator[AnyBatch]:
    """Return the training micro batches of ``rank``; no validation set is needed."""
    source = open_source(run, root, "train")
    empty = None if isinstance(source, ImageDataset) else open_empty_text(run, root, source)
    shares = BatchShares(run.schedule.global_batch_size, micro, ranks)
    return training_batches(run, Sources(source, source, empty), shares, rank, first)
