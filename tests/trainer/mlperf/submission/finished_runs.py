"""Folders of finished runs, and a system description, as a submission needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tests.trainer.mlperf.good_run import CONVERGED, SYSTEM, write_log

from fluxtrain.mlperf.review.package import FIELDS


def write_run(folder: Path, seed: int, evaluations: int, reached: bool = True, **run: Any) -> Path:
    """Write log and config of a run as the trainer does, with a simulated clock."""
    folder.mkdir(parents=True)
    config = write_log(folder / "mlperf.log", seed, evaluations, reached, **run)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ten_runs(folder: Path, counts: tuple[int, ...] = CONVERGED, **run: Any) -> list[str]:
    return [str(write_run(folder / f"run_{i}", 100 + i, n, **run)) for i, n in enumerate(counts)]


def answers(folder: Path, **changed: Any) -> Path:
    """Write a complete system description."""
    path = folder / "system.yaml"
    texts: dict[str, Any] = {name: f"a {name}" for name in FIELDS}
    texts |= {"submitter": "example-org", "division": "closed", "system_name": "8xMI300X"}
    texts |= {"status": "Available on-premise", **SYSTEM}
    path.write_text(yaml.safe_dump(texts | changed))
    return path
