"""The FluxTraining of a packaged run: the job that ran, with its configuration and seed in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from fluxtrain.mlperf.evidence import Run, count_of
from fluxtrain.mlperf.ran_job import read_ran_job

_STORAGE = {
    "data": {"persistentVolumeClaim": {"claimName": "data"}},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "output": {"persistentVolumeClaim": {"claimName": "output"}},
}


def job_text(run: Run, name: str, image: str | None) -> str:
    """Return the job that repeats ``run``, in YAML: its nodes, GPUs and image, and its own seed.

    The spec is that of the job that ran, if it was fetched from a cluster, without the jobs that it followed.
    """
    config = dict(run.config or {})
    if (seed := run.number("seed")) is not None:
        config["seed"] = seed
    ran = read_ran_job(run.log.parent)
    spec = _told_spec(run) if ran is None else _alone(ran["spec"])
    spec = {**spec, **({} if image is None else {"image": image}), "run": config}
    job = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name},
        "spec": spec,
    }
    head = "# Volume claims have other names elsewhere; fluxtrain run ignores them.\n"
    return head + yaml.safe_dump(job, sort_keys=False)


def _alone(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``spec`` as that of a job that waits for no other."""
    lifecycle = {
        name: value
        for name, value in (spec.get("lifecycle") or {}).items()
        if name not in ("startAfter", "startWhen")
    }
    return {**spec, "lifecycle": lifecycle}


def _told_spec(run: Run) -> dict[str, Any]:
    """Return nodes and GPUs as the log tells them, and claims to fill in."""
    spec: dict[str, Any] = {"storage": _STORAGE}
    if (nodes := count_of(run.system, "number_of_nodes")) is not None and nodes > 0:
        spec["nodes"] = {"min": nodes, "max": nodes}
    if (gpus := count_of(run.system, "accelerators_per_node")) is not None:
        spec["gpusPerNode"] = gpus
    return spec
