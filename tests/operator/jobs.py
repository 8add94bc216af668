"""Makers of FluxTrainings, pods and nodes as the API server returns them."""

from __future__ import annotations

import time
from typing import Any

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.cache import Cache

KEY = ("ns", "job")
NOW = stamp(time.time())
"""A recent time: pods that started long ago without any progress would count as stuck."""


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


OWNER = {"kind": "FluxTraining", "name": "job", "uid": "uid-job", "controller": True}


def make_training(
    spec: Manifest | None = None, status: Manifest | None = None, **metadata: Any
) -> Manifest:
    """Return a FluxTraining of the smallest run."""
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "job", "namespace": "ns", "uid": "uid-job", **metadata},
        "spec": {"run": {"preset": "micro"}, **(spec or {})},
        "status": status or {},
    }


def make_job(name: str = "job", **status: Any) -> Manifest:
    """Return a FluxTraining of several nodes as an API server returns it."""
    spec = {"nodes": {"min": 1, "max": 4}}
    added = {"uid": f"uid-{name}", "resourceVersion": "1", "generation": 1}
    return make_training(spec, status, name=name, creationTimestamp=NOW, **added)


def make_pod(
    name: str = "job-0", version: int = 1, node: str = "n1", job: str = "job", **metadata: Any
) -> Manifest:
    """Return a training pod that ``job`` controls."""
    labels = {
        names.LABEL_JOB: job,
        names.LABEL_MANAGED_BY: names.FIELD_MANAGER,
        names.LABEL_COMPONENT: names.TRAINER,
        names.LABEL_INDEX: name.rpartition("-")[2],
    }
    common = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version)}
    return {
        "metadata": {
            **common,
            "labels": labels,
            "annotations": {},
            "ownerReferences": [{**OWNER, "name": job}],
            **metadata,
        },
        "spec": {"nodeName": node},
    }


def make_node(name: str = "n1", ready: bool = True) -> Manifest:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions}}


def run_pods(cache: Cache, num_running: int) -> None:
    """Set the first training pods of the job to running and ready."""
    pods = sorted(cache.pods(KEY), key=lambda pod: pod["metadata"]["name"])
    for pod in pods[:num_running]:
        if pod["metadata"]["labels"][names.LABEL_COMPONENT] != names.TRAINER:
            continue
        state = {"running": {"startedAt": NOW}}
        status = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "trainer", "state": state}],
        }
        cache.set_pod({**pod, "status": status})
