"""Faults of pods: deleted and evicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.end_to_end.stage import wait_for
from tests.faults.target import Target

REFUSED_STEPS = 20


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


def lose_unreplaced(target: Target) -> None:
    """Delete a pod; fail if another takes its place while an operator would try again."""
    victim = target.pod_of_rank(2)["metadata"]["name"]
    delete(target, victim)
    wait_for(lambda: victim not in target.pods, "the pod is gone", seconds=60)
    target.wait_for_steps(REFUSED_STEPS)
    assert victim not in target.pods, "the pod was replaced"


def delete(target: Target, name: str, *options: str) -> None:
    """Ask for the deletion of a pod; do not wait for it."""
    target.kubectl("delete", "pod", name, "--wait=false", *options, target.jobs.here)
