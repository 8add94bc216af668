"""Fake nodes, simulated by KWOK: their pods become Running without containers.

For scale tests: a machine of two cores simulates hundreds of them.
"""

from __future__ import annotations

from cluster import processes
from cluster.console import wait_until
from cluster.kubectl import Manifest, kubectl
from cluster.layout import BRIDGE_ADDRESS, FAKE_POD_RANGE, KUBECONFIG, STATE
from cluster.nodes import fake_gpus
from cluster.programs import binaries

PROCESS = "kwok"
ANNOTATION = {"kwok.x-k8s.io/node": "fake"}
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
"""Keeps pods without a toleration away."""

STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-complete.yaml",
    "pod/fast/pod-delete.yaml",
)
"""KWOK's rules for fake nodes and pods, from its Go module."""

READY_SECONDS = 300
CPUS_PER_GPU, GIB_PER_GPU = 16, 256
"""Of a fake node: its pods' requests must fit."""


def start(count: int, num_gpus: int = fake_gpus.NUM_GPUS) -> list[str]:
    """Start KWOK, add fake nodes up to ``count``, wait until they are ready; return their names."""
    if not processes.is_running(PROCESS):
        _start_kwok()
    names = [f"fake-{index}" for index in range(count)]
    existing = set(_names(ready_only=False))
    new = [_manifest(name, num_gpus) for name in names if name not in existing]
    if new:
        kubectl.create(*new)
    wait_until(
        lambda: set(names) <= set(_names()),
        f"{count} fake nodes ready",
        seconds=READY_SECONDS,
        every=0.5,
    )
    return names


def stop() -> None:
    """Remove all fake nodes and stop KWOK; Kubernetes collects their pods within a minute."""
    kubectl("delete", "nodes", "--selector=type=fake")
    processes.stop([PROCESS])


def _start_kwok() -> None:
    config = STATE / "kwok.yaml"
    files = [binaries.path("kwok-stage") / stage for stage in STAGES]
    config.write_text("\n---\n".join(file.read_text() for file in files))
    flags = [
        f"--kubeconfig={KUBECONFIG}",
        f"--config={config}",
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        f"--node-ip={BRIDGE_ADDRESS}",
        f"--cidr={FAKE_POD_RANGE}",
        "--node-lease-duration-seconds=140",  # renewed every 35 s; a node is not ready after 50
    ]
    processes.start(PROCESS, [binaries.path("kwok"), *flags])


def _manifest(name: str, num_gpus: int) -> Manifest:
    resources = {
        "cpu": str(num_gpus * CPUS_PER_GPU),
        "memory": f"{num_gpus * GIB_PER_GPU}Gi",
        "pods": str(max(110, 2 * num_gpus)),
        fake_gpus.RESOURCE: str(num_gpus),
    }
    labels = {**fake_gpus.LABELS, "type": "fake", "kubernetes.io/hostname": name}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": ANNOTATION, "labels": labels},
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": resources, "capacity": resources},
    }


def _names(*, ready_only: bool = True) -> list[str]:
    nodes = kubectl.get("nodes", "--selector=type=fake")["items"]
    return [
        item["metadata"]["name"]
        for item in nodes
        if not ready_only
        or any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in item["status"].get("conditions", [])
        )
    ]
