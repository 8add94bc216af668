"""The FluxTraining of a packaged run: the job that ran, with its configuration and seed in full."""

from __future__ import annotations

from typing import Any

import yaml

from fluxtrain.mlperf.review.evidence import Run

_STORAGE = {
    "data": {"persistentVolumeClaim": {"claimName": "data"}},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "output": {"persistentVolumeClaim": {"claimName": "output"}},
}


def job_text(run: Run, name: str, image: str | None) -> str:
    """Return the job that repeats ``run``, in YAML: its nodes, GPUs and image, and its own seed."""
    config = dict(run.config or {})
    if (seed := run.number("seed")) is not None:
        config["seed"] = seed
    spec: dict[str, Any] = {} if image is None else {"image": image}
    if (nodes := _count(run, "number_of_nodes")) is not None and nodes > 0:
        spec["nodes"] = {"min": nodes, "max": nodes}
    if (gpus := _count(run, "accelerators_per_node")) is not None:
        spec["gpusPerNode"] = gpus
    job = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name},
        "spec": {**spec, "run": config, "storage": _STORAGE},
    }
    head = "# Volume claims have other names elsewhere; fluxtrain run ignores them.\n"
    return head + yaml.safe_dump(job, sort_keys=False)


def _count(run: Run, field: str) -> int | None:
    text = str(run.system.get(field))
    return int(text) if text.isdecimal() else None
