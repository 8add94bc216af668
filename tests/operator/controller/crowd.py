"""Many jobs that run as they should: what an API server holds of them, made by the planner itself."""

from __future__ import annotations

import time
from typing import Any

from tests.operator.controller.fake_api_server import FakeApiServer

from fluxtrain_operator import names
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import load, plan
from fluxtrain_operator.timestamps import stamp

NAMESPACE = "crowd"
IMAGE = "example.org/trainer:1"
PLURALS = {
    "ConfigMap": "configmaps",
    "Service": "services",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
}


def fill(server: FakeApiServer, num_jobs: int, num_pods: int, num_nodes: int) -> None:
    """Put ``num_jobs`` jobs of ``num_pods`` training pods each on ``num_nodes`` nodes."""
    for index in range(num_nodes):
        server.put("nodes", node(f"node-{index}"))
    for index in range(num_jobs):
        _settle(server, f"job-{index}", num_pods, first_node=index * num_pods, num_nodes=num_nodes)


def _settle(
    server: FakeApiServer, name: str, num_pods: int, first_node: int, num_nodes: int
) -> None:
    """Put a job, its pods that run, and all that is around them; nothing is left to do."""
    now = time.time()
    manifest = server.put("fluxtrainings", job(name, num_pods))
    decided = plan(load(manifest, IMAGE), Observed(), now)
    applied, pods = {}, []
    for number, wanted in enumerate(decided.create):
        wanted["metadata"]["managedFields"] = _MANAGED_FIELDS
        if wanted["kind"] == "Pod":
            node_name = f"node-{(first_node + number) % num_nodes}"
            pods.append(server.put("pods", running(wanted, node_name)))
        else:
            server.put(PLURALS[wanted["kind"]], wanted)
            key = wanted["kind"], wanted["metadata"]["name"]
            applied[key] = wanted["metadata"]["annotations"][names.ANNOTATION_APPLIED]
    for _ in range(3):
        observed = Observed.from_objects(pods, applied=applied)
        status = plan(load(manifest, IMAGE), observed, now).status
        text = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        manifest = server.put("fluxtrainings", {**manifest, "status": text})


def job(name: str, num_pods: int) -> Manifest:
    """Return a job as a person creates it."""
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
    """Return ``pod`` as the API server, the scheduler and a kubelet leave it."""
    began = stamp(time.time())
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
    status: dict[str, Any] = {
        "phase": "Running",
        "hostIP": "192.0.2.1",
        "podIP": "127.0.0.1",  # nobody listens
        "podIPs": [{"ip": "127.0.0.1"}],
        "qosClass": "Burstable",
        "startTime": began,
        "conditions": [
            {"type": name, "status": "True", "lastProbeTime": None, "lastTransitionTime": began}
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
                "state": {"running": {"startedAt": began}},
            }
            for container in pod["spec"]["containers"]
        ],
    }
    metadata = {**pod["metadata"], "creationTimestamp": began}
    return {
        **pod,
        "metadata": metadata,
        "spec": {**pod["spec"], "nodeName": node_name},
        "status": status,
    }


def node(name: str) -> Manifest:
    """Return a node that is ready, with labels and images as nodes have them."""
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
"""Who wrote which field: the longest part of most objects."""
