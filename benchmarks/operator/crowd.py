"""Many healthy, running jobs in a fake API server, with the objects that the planner creates for them."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.operator.fake_api_server import FakeApiServer

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import load, plan

NAMESPACE = "crowd"
IMAGE = "example.org/trainer:1"
PLURALS = {
    "ConfigMap": "configmaps",
    "Service": "services",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
}


def fill(server: FakeApiServer, num_jobs: int, num_pods: int, num_nodes: int) -> None:
    """Add ``num_nodes`` nodes, and on them ``num_jobs`` jobs of ``num_pods`` training pods each."""
    for index in range(num_nodes):
        server.put("nodes", node(f"node-{index}"))
    for index in range(num_jobs):
        _add_job(server, f"job-{index}", num_pods, first_node=index * num_pods, num_nodes=num_nodes)


def _add_job(
    server: FakeApiServer, name: str, num_pods: int, first_node: int, num_nodes: int
) -> None:
    """Add a job with its supporting objects and running pods; a reconcile has nothing to do."""
    now = time.time()
    manifest = server.put("fluxtrainings", job(name, num_pods))
    planned = plan(load(manifest, IMAGE), Observed(), now)
    applied, pods = {}, []
    for number, desired in enumerate(planned.create):
        desired["metadata"]["managedFields"] = _MANAGED_FIELDS
        if desired["kind"] == "Pod":
            node_name = f"node-{(first_node + number) % num_nodes}"
            pods.append(server.put("pods", running(desired, node_name)))
        elif desired["kind"] != "Secret":
            server.put(PLURALS[desired["kind"]], desired)
            key = desired["kind"], desired["metadata"]["name"]
            applied[key] = desired["metadata"]["annotations"][names.ANNOTATION_APPLIED]
    for _ in range(3):
        observed = Observed.from_objects(pods, applied=applied)
        status = plan(load(manifest, IMAGE), observed, now).status
        values = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        manifest = server.put("fluxtrainings", {**manifest, "status": values})


def job(name: str, num_pods: int) -> Manifest:
    """Return a job as a user creates it."""
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "generation": 1,
            "creationTimestamp": stamp(time.time()),
            "managedFields": _MANAGED_FIELDS,
        },
        "spec": {
            "nodes": {"min": num_pods, "max": num_pods},
            "gpusPerNode": 1,
            "run": {"preset": "micro"},
        },
    }


def running(pod: Manifest, node_name: str) -> Manifest:
    """Return ``pod`` as scheduled to a node, running and ready."""
    started = stamp(time.time())
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
    status: dict[str, Any] = {
        "phase": "Running",
        "hostIP": "192.0.2.1",
        "podIP": "127.0.0.1",  # without a server
        "podIPs": [{"ip": "127.0.0.1"}],
        "qosClass": "Burstable",
        "startTime": started,
        "conditions": [
            {"type": name, "status": "True", "lastProbeTime": None, "lastTransitionTime": started}
            for name in (*conditions, "PodScheduled")
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container.get("image", IMAGE),
                "imageID": f"example.org/trainer@sha256:{'0' * 64}",
                "containerID": f"containerd://{'0' * 64}",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "lastState": {},
                "state": {"running": {"startedAt": started}},
            }
            for container in pod["spec"]["containers"]
        ],
    }
    metadata = {**pod["metadata"], "creationTimestamp": started}
    return {
        **pod,
        "metadata": metadata,
        "spec": {**pod["spec"], "nodeName": node_name},
        "status": status,
    }


def node(name: str) -> Manifest:
    """Return a ready node with a realistic number of labels and images."""
    pressures = ("MemoryPressure", "DiskPressure", "PIDPressure")
    images = [
        {"names": [f"example.org/image-{index}@sha256:{'0' * 64}"], "sizeBytes": 10**9}
        for index in range(50)
    ]
    labels = {f"example.org/label-{index}": "some-value" for index in range(30)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "managedFields": _MANAGED_FIELDS},
        "spec": {"podCIDR": "198.51.100.0/24"},
        "status": {
            "conditions": [
                *({"type": pressure, "status": "False"} for pressure in pressures),
                {"type": "Ready", "status": "True"},
            ],
            "images": images,
        },
    }


_MANAGED_FIELDS = [
    {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": {
            "f:spec": {
                f'k:{{"name":"a-name-of-usual-length-{index}"}}': {
                    ".": {},
                    "f:name": {},
                    "f:value": {},
                }
                for index in range(12)
            }
        },
    }
    for manager in ("fluxtrain", "kubelet")
]
"""The longest part of most objects."""
