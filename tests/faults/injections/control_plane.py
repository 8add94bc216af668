"""Faults of the control plane: restarts, a quota, what is asked of the job itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cluster import control_plane, processes
from cluster.console import wait_until
from tests.end_to_end.stage import suspend, wait_for
from tests.faults.injections.pods import delete
from tests.faults.target import Target

DOWN_SECONDS = 10.0
READY_SECONDS = 60
MANY = 5


@contextmanager
def api_server_restarted(target: Target) -> Iterator[None]:
    processes.stop(["kube-apiserver"])
    time.sleep(DOWN_SECONDS)
    control_plane.start_api_server()
    wait_until(target.kubectl.is_ready, "the API server is ready", seconds=READY_SECONDS)
    yield


@contextmanager
def etcd_restarted(target: Target) -> Iterator[None]:
    processes.stop(["etcd"])
    time.sleep(DOWN_SECONDS)
    control_plane.start_etcd()
    wait_until(target.kubectl.is_ready, "the API server is ready", seconds=READY_SECONDS)
    yield


@contextmanager
def quota_shrunk(target: Target) -> Iterator[None]:
    """Allow no further pod, and delete one: it cannot be replaced until the quota is gone."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "shrunk"},
        "spec": {"hard": {"pods": "1"}},
    }
    victim = target.pod_of_rank(2)["metadata"]["name"]
    target.kubectl.apply(quota, namespace=target.jobs.namespace)
    try:
        delete(target, victim)
        wait_for(lambda: victim not in target.pods, "the pod is gone", seconds=60)
        target.wait_for_steps(20)
        assert victim not in target.pods, "the pod was replaced despite the quota"
        yield
    finally:
        target.kubectl("delete", "resourcequota", "shrunk", target.jobs.here)


@contextmanager
def suspended(target: Target) -> Iterator[None]:
    suspend(target.kubectl, target.jobs.namespace, target.name, True)
    wait_for(
        lambda: target.phase == "Suspended" and not target.pods, target.debug_text, seconds=200
    )
    suspend(target.kubectl, target.jobs.namespace, target.name, False)
    yield


@contextmanager
def scaled(target: Target) -> Iterator[None]:
    """Scale to 2, to 5 and back; 5 pods share the nodes."""
    before = target.wanted
    try:
        for count in (before - 1, MANY, before):
            target.wanted = count
            target.jobs.scale(target.name, count)
            target.wait_until_steady()
        yield
    finally:
        target.wanted = before
