"""Fake AMD GPUs: their capacity and the labels of AMD's node labeller, without devices.

The scheduler counts them, so a pod that requests more than a node has stays pending.
"""

from __future__ import annotations

import json

from cluster import processes
from cluster.commands import Arguments
from cluster.kubectl import kubectl
from cluster.layout import KUBECONFIG, Node
from cluster.programs import binaries

DRIVER = "gpu.amd.com"
RESOURCE = "amd.com/gpu"
NUM_GPUS = 8

LABELS = {
    "amd.com/gpu.family": "AI",
    "amd.com/gpu.device-id": "74a1",
    "amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM",
    "amd.com/gpu.vram": "192G",
    "amd.com/gpu.cu-count": "304",
    "amd.com/gpu.simd-count": "1216",
    "amd.com/gpu.compute-memory-partition": "spx_nps1",
}
"""The labels of a node with eight MI300X in SPX mode."""


def label_flag() -> str:
    """Return the labels as a kubelet flag value."""
    return ",".join(f"{key}={value}" for key, value in LABELS.items())


def set_capacity(node_name: str, count: int = NUM_GPUS, resource: str = RESOURCE) -> None:
    """Set the node's GPU capacity; its kubelet keeps unknown resources."""
    key = resource.replace("~", "~0").replace("/", "~1")  # RFC 6901
    patch = [
        {"op": "add", "path": f"/status/{part}/{key}", "value": str(count)}
        for part in ("capacity", "allocatable")
    ]
    options = ["--subresource=status", "--type=json", f"--patch={json.dumps(patch)}"]
    kubectl("patch", "node", node_name, *options)


def offer_to_claims(node: Node, count: int = NUM_GPUS) -> None:
    """Let a driver of resource claims offer ``count`` GPUs of ``node``; its containers get no device."""
    flags = [
        f"--kubeconfig={KUBECONFIG}",
        f"--kubelet={node.folder / 'kubelet'}",
        f"--driver={DRIVER}",
    ]
    program = binaries.build("dra") / "fake-gpu-driver"
    argv: Arguments = [program, f"--node={node.name}", f"--count={count}", *flags]
    processes.start(node.process(program.name), argv)
