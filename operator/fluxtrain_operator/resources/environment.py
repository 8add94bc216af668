"""The environment of a training pod: torchrun's, the trainer's, and RCCL's.

Sources of the GPU defaults: AMD's published MLPerf and Primus configurations for MI300X.
"""

from __future__ import annotations

from fluxtrain.contract import launch
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.secret import KEY_FILE, KEY_PATH
from fluxtrain_operator.resources.volumes import CONFIG_PATH, SCRATCH_PATH

_PEER_FAILURES = 10
"""Process restarts of a pod beyond ``maxRestarts``: a lost or drained node makes its peers' processes fail
too, and torchrun counts those failures like the program's own."""

_GPU = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # launches collectives before the compute that they overlap
    "GPU_MAX_HW_QUEUES": "2",
    "HSA_ENABLE_SDMA": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1",
    "NCCL_CHECKS_DISABLE": "1",
    "NCCL_CROSS_NIC": "0",  # each GPU uses the NIC of its rail
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_PXN_DISABLE": "1",
    "TORCH_BLAS_PREFER_HIPBLASLT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a failed collective aborts the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
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


def environment(job: Job, attempt: int, process_restarts: int) -> list[Manifest]:
    """Return the variables of a training pod; ``spec.network.env`` overrides the defaults."""
    values = {
        **_CACHES,
        **_defaults(job),
        **{variable.name: variable.value for variable in job.spec.network.env},
        **_torchrun(job, attempt),
        **_trainer(job, process_restarts),
    }
    fields = {launch.ENV_ADDRESS: "status.podIP", launch.ENV_POD_UID: "metadata.uid"}
    result: list[Manifest] = [{"name": name, "value": values[name]} for name in sorted(values)]
    for name, path in fields.items():
        result.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return result


def _defaults(job: Job) -> dict[str, str]:
    if job.spec.gpus_per_node == 0:
        return {}
    return _GPU | (_POD_NETWORK if job.spec.network.mode == "pod" else {})


def _torchrun(job: Job, attempt: int) -> dict[str, str]:
    """Return torchrun's arguments.

    Its id ends with the attempt: a failed agent closes the attempt, and all later ones are open.
    """
    nodes, budget = job.spec.nodes, job.spec.restart.max_restarts
    host = f"{names.rendezvous(job.name)}.{names.service(job.name)}"
    return {
        "PET_NNODES": f"{nodes.min}:{nodes.max}",
        "PET_NPROC_PER_NODE": str(max(1, job.spec.gpus_per_node)),
        "PET_RDZV_ENDPOINT": f"{host}:{launch.RENDEZVOUS_PORT}",
        "PET_RDZV_ID": f"{job.uid}-{attempt}",
        "PET_MAX_RESTARTS": str(budget if nodes.max == 1 else budget + _PEER_FAILURES),
        "PET_MONITOR_INTERVAL": "0.5",
        # Otherwise the other agents keep connecting to the first node's store after it is lost.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _trainer(job: Job, process_restarts: int) -> dict[str, str]:
    gpus = job.spec.gpus_per_node
    return {
        **({launch.ENV_GPUS: str(gpus)} if gpus else {}),
        launch.ENV_CONFIG: CONFIG_PATH,
        launch.ENV_DATA: launch.DATA_PATH,
        launch.ENV_MODELS: launch.MODELS_PATH,
        launch.ENV_OUTPUT: launch.OUTPUT_PATH,
        launch.ENV_PROCESS_RESTARTS: str(process_restarts),
        launch.ENV_RENDEZVOUS_KEY: f"{KEY_PATH}/{KEY_FILE}",
    }
