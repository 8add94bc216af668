"""Folders of finished runs, and a system description, as a submission needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.trainer.mlperf.good_run import CONVERGED, SYSTEM, write_run

from fluxtrain.mlperf.review.package import FIELDS


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
