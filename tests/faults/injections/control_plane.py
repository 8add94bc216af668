"""Faults of the control plane: restarts, a quota, what is asked of the job itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cluster import control_plane, processes
from cluster.console import wait_until
from tests.end_to_end.stage import suspend, wait_for
from tests.faults.injections.pods import lose_unreplaced
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
    with _under_quota(target, {"pods": "1"}):
        yield


@contextmanager
def limits_demanded(target: Target) -> Iterator[None]:
    """Demand limits of every new pod, and delete one: it is refused until the quota is gone."""
    with _under_quota(target, {"limits.cpu": "64"}):
        yield


@contextmanager
def _under_quota(target: Target, hard: dict[str, str]) -> Iterator[None]:
    metadata, spec = {"name": "quota"}, {"hard": hard}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec}
    target.kubectl.apply(quota, namespace=target.jobs.namespace)
    try:
        lose_unreplaced(target)
        yield
    finally:
        target.kubectl("delete", "resourcequota", "quota", target.jobs.here)


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
