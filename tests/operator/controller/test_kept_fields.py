"""Decoding only the fields in use changes nothing that is read of pods, nodes and supporting objects."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from benchmarks import crowd
from benchmarks.fake_api_server import FakeApiServer

from fluxtrain_operator.controller.cache import Applied
from fluxtrain_operator.controller.kept_fields import NodeFields, ObjectFields, PodFields, trimmed
from fluxtrain_operator.planner.observed import NodeView, Pod, controller_of

GPU_NODE: dict[str, Any] = {
    "metadata": {
        "name": "n1",
        "uid": "u",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"kubernetes.io/hostname": "other", "metricsexporter.amd.com.gpu.0.state": "x"},
    },
    "spec": {
        "unschedulable": True,
        "taints": [{"key": "amd-gpu-unhealthy", "value": "1", "effect": "NoSchedule"}],
    },
    "status": {
        "capacity": {"amd.com/gpu": "8"},
        "conditions": [
            {"type": "KernelDeadlock", "status": "True", "reason": "Hung"},
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
        "images": [{"names": ["a"]}],
    },
}


@pytest.fixture(scope="module")
def server() -> FakeApiServer:
    server = FakeApiServer()
    crowd.fill(server, num_jobs=1, num_pods=3, num_nodes=2)
    return server


def decoded(manifest: Any, fields: Any) -> Any:
    return msgspec.json.decode(json.dumps(manifest), type=fields)


def failed(pod: dict[str, Any]) -> dict[str, Any]:
    """Return ``pod`` with each kind of field that is read."""
    metadata = {
        **pod["metadata"],
        "kind": "Pod",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "finalizers": ["a/b"],
    }
    ended = {
        "exitCode": 3,
        "reason": "Error",
        "message": "{}",
        "finishedAt": "2026-01-01T00:00:00Z",
    }
    statuses = [
        {**status, "state": {"terminated": ended}} for status in pod["status"]["containerStatuses"]
    ]
    init = [{"name": "fetch", "image": "i", "state": {"terminated": ended}}]
    told = {"initContainerStatuses": init, "containerStatuses": statuses}
    status = {**pod["status"], "reason": "Evicted", "message": "m", **told}
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    spec = {**pod["spec"], "schedulingGates": gates}
    return {**pod, "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def test_of_a_pod_the_same_is_kept_whether_it_was_decoded_in_part_or_trimmed(
    server: FakeApiServer,
) -> None:
    pods = list(server.of("pods").objects.values())
    for pod in [*pods, *map(failed, pods)]:
        assert trimmed(decoded(pod, PodFields)) == trimmed(pod)
        assert Pod.from_object(decoded(pod, PodFields)) == Pod.from_object(pod)
        assert len(json.dumps(decoded(pod, PodFields))) < len(json.dumps(pod)) / 2


def test_the_view_of_a_node_is_the_same(server: FakeApiServer) -> None:
    for node in [*server.of("nodes").objects.values(), GPU_NODE, {"metadata": {"name": "new"}}]:
        assert NodeView.from_object(decoded(node, NodeFields)) == NodeView.from_object(node)
    assert "images" not in decoded(GPU_NODE, NodeFields)["status"]
    view = NodeView.from_object(decoded(GPU_NODE, NodeFields))
    assert view.unhealthy
    assert view.problem


def test_owner_and_hash_of_a_supporting_object_are_the_same(server: FakeApiServer) -> None:
    (service,) = server.of("services").objects.values()
    kept = decoded(service, ObjectFields)
    assert Applied.from_object(kept) == Applied.from_object(service)
    assert controller_of(kept) == controller_of(service)
    assert "spec" not in kept
