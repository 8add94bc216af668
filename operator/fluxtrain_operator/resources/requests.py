"""The resources of the training container: CPU, memory, GPUs and RDMA devices."""

from __future__ import annotations

from fluxtrain.contract.resource.resources import Amounts, amount
from fluxtrain.model.offloaded_blocks import host_sizes
from fluxtrain.snapshot_size import snapshot_bytes
from fluxtrain_operator.job import Job, Manifest

CPUS_PER_GPU, MEMORY_PER_GPU_GIB = 2, 8
"""Default requests, without snapshots and weights in host memory. They are small, so that every node with
that many GPUs fits; without any, the pod would be the first to be evicted, and would get no CPU beside pods
that request some."""
_GIB = 1 << 30


def resources_of(job: Job) -> Manifest:
    """Return the requests and limits of the training container, if there are any."""
    resources, devices = job.spec.resources, _devices(job)
    limits = _written(resources.limits)
    requests = {**_defaults(job), **limits, **_written(resources.requests)}
    requested = {name: quantity for name, quantity in requests.items() if amount(quantity)}
    result = {"requests": {**requested, **devices}, "limits": {**limits, **devices}}
    return {name: quantities for name, quantities in result.items() if quantities}


def _devices(job: Job) -> dict[str, str]:
    """Return the GPUs, and an RDMA device for each. Requests and limits of such resources are equal."""
    if job.spec.gpus_per_node == 0:
        return {}
    resources = (job.spec.gpu_resource, job.spec.network.rdma_resource)
    return {name: str(job.spec.gpus_per_node) for name in resources if name is not None}


def snapshot_bytes_of(job: Job) -> int:
    """Return the most memory that snapshots take in a pod of ``job``."""
    return snapshot_bytes(job.config, job.spec.rank_counts, max(1, job.spec.gpus_per_node))


def _defaults(job: Job) -> dict[str, str]:
    gpus = job.spec.gpus_per_node
    if gpus == 0:
        return {}
    beside = snapshot_bytes_of(job) + gpus * sum(host_sizes(job.config))
    memory = MEMORY_PER_GPU_GIB * gpus + round(beside / _GIB)
    return {"cpu": str(CPUS_PER_GPU * gpus), "memory": f"{memory}Gi"}


def _written(amounts: Amounts) -> dict[str, str]:
    return amounts.model_dump(mode="json", by_alias=True, exclude_none=True)
