"""Makers of FluxTrainings and of the state of their pods."""

from __future__ import annotations

import time
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.timestamps import stamp

KEY = ("ns", "job")
NOW = stamp(time.time())
"""A recent time: pods that started long ago without any progress would count as stuck."""


def make_job(name: str = "job", **status: Any) -> Manifest:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {**metadata, "generation": 1, "creationTimestamp": NOW},
        "spec": {"run": {"preset": "micro"}, "nodes": {"min": 1, "max": 4}},
        "status": status,
    }


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
