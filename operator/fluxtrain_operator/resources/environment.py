"""The environment of a training pod: torchrun's, the trainer's, and that of RCCL or NCCL."""

from __future__ import annotations

from fluxtrain.contract import launch
from fluxtrain.contract.gpu_environment import gpu_environment
from fluxtrain.contract.resource.fluxtraining import EnvironmentVariable, Network
from fluxtrain.snapshot_size import takes_snapshots
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.flush_caches import flushed_environment
from fluxtrain_operator.resources.grace import shutdown_seconds
from fluxtrain_operator.resources.secret import KEY_FILE, KEY_PATH
from fluxtrain_operator.resources.volumes import CONFIG_PATH, SCRATCH_PATH

NODES, RUN_ID = launch.ENV_NODES, launch.ENV_ATTEMPT
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
    interfaces = _POD_NETWORK if job.spec.network.mode == "pod" else {}
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
    paths = {launch.ENV_ADDRESS: "status.podIP", launch.ENV_POD_UID: "metadata.uid"}
    scheduling = job.spec.scheduling
    if label := scheduling.rank_order_label:
        paths[launch.ENV_TOPOLOGY] = f"metadata.labels['{label}']"
        paths[launch.ENV_NODE_NAME] = "spec.nodeName"
        if scheduling.queue_name is None:
            paths[launch.ENV_NODE] = "spec.nodeName"
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]


def slot_environment(
    job: Job, attempt: int = 0, process_restarts: int = 0, charged_restarts: int = 0
) -> dict[str, str]:
    """Return the variables that are not frozen: they differ between attempts, or follow nodes and restart.

    torchrun's id ends with the attempt: an older agent that fails closes it, and all later ones are open.
    """
    nodes = job.spec.nodes
    budget = max(0, job.spec.restart.max_restarts - charged_restarts)
    return {
        NODES: f"{nodes.min}:{nodes.max}",
        RUN_ID: f"{job.uid}-{attempt}",
        "PET_MAX_RESTARTS": str(budget if nodes.max == 1 else budget + _PEER_FAILURES),
        launch.ENV_PROCESS_RESTARTS: str(process_restarts),
    }


def _torchrun(job: Job) -> dict[str, str]:
    """Return torchrun's arguments that are the same in all attempts."""
    host = f"{names.rendezvous(job.name)}.{names.service(job.name)}"
    return {
        "PET_NPROC_PER_NODE": str(max(1, job.spec.gpus_per_node)),
        "PET_RDZV_ENDPOINT": f"{host}:{launch.RENDEZVOUS_PORT}",
        "PET_MONITOR_INTERVAL": "0.5",
        launch.ENV_OWN_STORE: "1",
    }


def _trainer(job: Job) -> dict[str, str]:
    gpus, folder = job.spec.gpus_per_node, job.spec.storage.output_folder
    return {
        **({launch.ENV_GPUS: str(gpus)} if gpus else {}),
        **({launch.ENV_SNAPSHOTS: launch.SNAPSHOTS_PATH} if takes_snapshots(job.config) else {}),
        launch.ENV_CONFIG: CONFIG_PATH,
        launch.ENV_IMAGE: job.image,
        launch.ENV_DATA: launch.DATA_PATH,
        launch.ENV_MODELS: launch.MODELS_PATH,
        launch.ENV_OUTPUT: f"{launch.OUTPUT_PATH}/{folder}" if folder else launch.OUTPUT_PATH,
        launch.ENV_SHUTDOWN_SECONDS: str(shutdown_seconds(job)),
        launch.ENV_RENDEZVOUS_KEY: f"{KEY_PATH}/{KEY_FILE}",
    }
