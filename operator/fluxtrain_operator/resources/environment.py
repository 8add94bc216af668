"""The environment of a training pod: torchrun's, the trainer's, and that of RCCL or NCCL."""

from __future__ import annotations

from fluxtrain.contract import process
from fluxtrain.contract.process import gpu_environment
from fluxtrain.contract.resource.fluxtraining import EnvironmentVariable, Network
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.parallel.node_memory import takes_snapshots
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.resources.volumes import (
    CONFIG_PATH,
    KEY_FILE,
    KEY_PATH,
    SCRATCH_PATH,
    flushed_environment,
)

NODES, RUN_ID = process.ENV_NODES, process.ENV_ATTEMPT
"""torchrun's variables with ``min:max`` of the nodes, and with the job's uid and the attempt."""
_PEER_FAILURES = 1
"""Process restarts of a pod beyond the rest of ``maxRestarts``: a lost or drained node makes its peers'
processes fail too. Their agents give that restart back once they have joined without the lost node."""

_AMD = "amd.com/"
"""Prefix of the resources of AMD's device plugin, with any naming strategy."""
_POD_NETWORK = {  # the container runtime's name of a pod's first interface
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}
_CACHES = {  # everything else on the root file system is read-only
    "HOME": SCRATCH_PATH,
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH_PATH}/inductor",
    "USER": "fluxtrain",  # getpass.getuser fails for a uid without a passwd entry
}


def environment(job: Job) -> list[Manifest]:
    """Return the variables of a training pod; those of `slot_environment` are empty.

    ``spec.network`` overrides the operator's ``podDefaults``, and those the defaults for GPUs.
    """
    values = {
        **_CACHES,
        **_defaults(job),
        **_by_name(job.pod_defaults.env),
        **_rdma(job.spec.network),
        **_by_name(job.spec.network.env),
        **_torchrun(job),
        **_trainer(job),
        **flushed_environment(job),
        **dict.fromkeys(slot_environment(job), ""),
    }
    result: list[Manifest] = [{"name": name, "value": values[name]} for name in sorted(values)]
    return [*result, *_of_the_pod(job)]


def _defaults(job: Job) -> dict[str, str]:
    if job.spec.gpus_per_node == 0:
        return {}
    interfaces = _POD_NETWORK if job.spec.network.mode == "Pod" else {}
    return gpu_environment(is_amd=job.spec.gpu_resource.startswith(_AMD)) | interfaces


def _by_name(variables: list[EnvironmentVariable]) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables}


def _rdma(network: Network) -> dict[str, str]:
    devices = ",".join(network.rdma_devices)
    values = {
        "NCCL_IB_HCA": f"={devices}" if devices else None,  # "=": else mlx5_1 is mlx5_10 as well
        "NCCL_IB_GID_INDEX": network.gid_index,
        "NCCL_IB_TC": network.traffic_class,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _of_the_pod(job: Job) -> list[Manifest]:
    """Return the variables that the kubelet fills in; those of the place order the ranks."""
    paths = {process.ENV_ADDRESS: "status.podIP", process.ENV_POD_UID: "metadata.uid"}
    scheduling = job.spec.scheduling
    if label := scheduling.rank_order_label:
        paths[process.ENV_TOPOLOGY] = f"metadata.labels['{label}']"
        paths[process.ENV_NODE_NAME] = "spec.nodeName"
        if scheduling.local_queue is None:
            paths[process.ENV_NODE] = "spec.nodeName"
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]


def slot_environment(
    job: Job, attempt: int = 0, process_restarts: int = 0, charged_restarts: int = 0
) -> dict[str, str]:
    """Return the variables that are not frozen: they differ between attempts, or follow nodes and restart."""
    nodes = job.spec.nodes
    budget = max(0, job.spec.restart.max_restarts - charged_restarts)
    return {
        NODES: f"{nodes.min}:{nodes.max}",
        RUN_ID: f"{job.uid}-{attempt}",
        "PET_MAX_RESTARTS": str(budget if nodes.max == 1 else budget + _PEER_FAILURES),
        process.ENV_PROCESS_RESTARTS: str(process_restarts),
    }


def _torchrun(job: Job) -> dict[str, str]:
    """Return torchrun's arguments that are the same in all attempts."""
    host = f"{names.rendezvous(job.name)}.{names.service(job.name)}"
    return {
        "PET_NPROC_PER_NODE": str(max(1, job.spec.gpus_per_node)),
        "PET_RDZV_ENDPOINT": f"{host}:{process.RENDEZVOUS_PORT}",
        "PET_MONITOR_INTERVAL": "0.5",
        process.ENV_OWN_STORE: "1",
    }


def _trainer(job: Job) -> dict[str, str]:
    gpus, folder = job.spec.gpus_per_node, job.spec.storage.output_folder
    return {
        **({process.ENV_GPUS: str(gpus)} if gpus else {}),
        **({process.ENV_SNAPSHOTS: process.SNAPSHOTS_PATH} if takes_snapshots(job.config) else {}),
        process.ENV_CONFIG: CONFIG_PATH,
        process.ENV_IMAGE: job.image,
        process.ENV_DATA: process.DATA_PATH,
        process.ENV_MODELS: process.MODELS_PATH,
        process.ENV_OUTPUT: f"{process.OUTPUT_PATH}/{folder}" if folder else process.OUTPUT_PATH,
        process.ENV_SHUTDOWN_SECONDS: str(shutdown_seconds(job)),
        process.ENV_RENDEZVOUS_KEY: f"{KEY_PATH}/{KEY_FILE}",
    }


_MIN_SECONDS = 180
"""For the present step, the copy to host memory, the write of a small checkpoint, and the exit."""
_MAX_SECONDS = 3600
_BYTES_PER_SECOND = 250e6
"""A node writes at least as fast: a quarter of what one disk or NFS client of a GPU node does."""
_EXIT_SECONDS = 60
"""Between the end of the trainers' time and that of the pod's."""


def grace_seconds(job: Job) -> int:
    """Return the seconds from SIGTERM to SIGKILL; those of ``spec.podTemplate`` if it sets them."""
    spec = job.spec.pod_template.written.get("spec") or {}
    written = spec.get("terminationGracePeriodSeconds")
    if isinstance(written, int):
        return written
    num_bytes = checkpoint_bytes(job) / job.spec.nodes.min
    return min(_MAX_SECONDS, _MIN_SECONDS + int(num_bytes / _BYTES_PER_SECOND))


def shutdown_seconds(job: Job) -> int:
    """Return the seconds that the launcher gives its trainers; it exits before the pod is killed."""
    grace = grace_seconds(job)
    return max(grace - _EXIT_SECONDS, grace // 2)


def checkpoint_bytes(job: Job) -> int:
    """Return the size of a checkpoint; 0 if the job saves none, or of adapters only."""
    if job.config.task != "train" or job.config.adapter is not None:
        return 0
    num_bytes = job.config.precision.weight_bytes + job.config.optim.state_bytes
    return round(num_bytes * num_block_parameters(job.config.model))


def num_block_parameters(model: ModelConfig) -> int:
    """Return the parameters of all blocks: more than 99 % of a large model's.

    In multiples of hidden_size², a stream of a double block has 6 for the modulation, 4 for the attention
    and two matrices of the MLP; a single block 3 for the modulation, 4 for the attention and its MLP.
    """
    mlp = 2 * model.mlp_ratio
    squares = model.depth * 2 * (10 + mlp) + model.depth_single_blocks * (7 + mlp)
    return round(squares * model.hidden_size**2)
