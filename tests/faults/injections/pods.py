"""Faults of pods: deleted and evicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.target import Target


@contextmanager
def pod_deleted(target: Target) -> Iterator[None]:
    delete(target, target.pod_of_rank(0)["metadata"]["name"])
    yield


@contextmanager
def rendezvous_deleted(target: Target) -> Iterator[None]:
    delete(target, target.rendezvous["metadata"]["name"], "--now")
    yield


@contextmanager
def evicted(target: Target) -> Iterator[None]:
    name = target.pod_of_rank(1)["metadata"]["name"]
    namespace = target.jobs.namespace
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    target.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))
    yield


def delete(target: Target, name: str, *options: str) -> None:
    """Ask for the deletion of a pod; do not wait for it."""
    target.kubectl("delete", "pod", name, "--wait=false", *options, target.jobs.here)
