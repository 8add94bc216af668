"""The benchmark's config, and logs of its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.order import BatchShares
from fluxtrain.mlperf.facts import RunFacts
from fluxtrain.mlperf.log import MLPerfLog


def benchmark(**changes: Any) -> RunConfig:
    return resolve({"preset": "mlperf-schnell", "seed": 7, **changes})


def open_log(path: Path, config: RunConfig, samples: int = 0, **facts: Any) -> MLPerfLog:
    shares = BatchShares(512, 32, facts.pop("num_ranks", 8))
    return MLPerfLog.open(
        path, samples, False, RunFacts(config, shares, 1_099_776, 29_696, 1e9, **facts)
    )
