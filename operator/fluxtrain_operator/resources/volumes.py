"""The volumes of a training pod: storage, the config, shared memory and scratch space."""

from __future__ import annotations

import math
import secrets
from pathlib import PurePosixPath
from posixpath import join, normpath

from fluxtrain.contract.process import (
    CONFIG_FILE,
    DATA_PATH,
    ENV_FLUSHED,
    FLUSHED_PATH,
    MODELS_PATH,
    OUTPUT_PATH,
    SNAPSHOTS_PATH,
)
from fluxtrain.contract.resource.fluxtraining import Spec
from fluxtrain.contract.resource.pod_template import (
    FLUSH_CONTAINER,
    FLUSHED_VOLUME,
    KEY_VOLUME,
    Amounts,
    RendezvousResources,
    Volume,
    amount,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.cost import host_sizes
from fluxtrain.parallel.node_memory import loader_bytes, snapshot_bytes, takes_snapshots
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.resources.support import metadata

CONFIG_PATH = f"/etc/fluxtrain/{CONFIG_FILE}"
"""Path of the config in a training pod; FLUXTRAIN_CONFIG is set to it."""
CONFIG_VOLUME = "config"
SCRATCH_PATH = "/tmp"
"""The only writable folder outside of the storage: the root file system is read-only."""
_WRITING_TASKS = ("prepare", "preprocess")
"""Tasks whose result is a data set at /data."""
_RECORDS_BYTES = 1 << 20
"""For the config and the records next to images, and for whole pages."""
_GIB = 1 << 30


def volumes(job: Job) -> list[Manifest]:
    """Return the volumes of a training pod; the name of the revision is filled in later."""
    storage = job.spec.storage
    shared = job.spec.resources.shared_memory or shared_memory(job.config, job.spec)
    return [
        {"name": CONFIG_VOLUME, "configMap": {"name": ""}},
        {"name": "data", **_source(storage.data)},
        {"name": "models", **_source(storage.models)},
        {"name": "output", **_source(storage.output)},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}},
        {"name": "tmp", "emptyDir": {}},
        key_volume(),
        *_snapshots(job),
    ]


def _snapshots(job: Job) -> list[Manifest]:
    """Return the volume of the snapshots, of their size on the fewest nodes, if there are any."""
    if not takes_snapshots(job.config):
        return []
    limit = f"{math.ceil((snapshot_bytes_of(job) + _RECORDS_BYTES) / _GIB)}Gi"
    return [{"name": "snapshots", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]


def mounts(job: Job) -> list[Manifest]:
    """Return the volume mounts of the main container.

    The config is mounted by ``subPath``: the pod runs on if its revision is deleted. Only tasks that make
    data sets write data, and runs that keep encodings or fetched files there.
    """
    storage, makes_data = job.spec.storage, job.config.task in _WRITING_TASKS
    own_folder = {"subPath": f"{job.namespace}/{job.name}"} if storage.isolated else {}
    return [
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_PATH, "subPath": CONFIG_FILE, "readOnly": True},
        _input_mount(job, "data", DATA_PATH, storage.data, makes_data),
        _input_mount(job, "models", MODELS_PATH, storage.models),
        {"name": "output", "mountPath": OUTPUT_PATH, **own_folder},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": SCRATCH_PATH},
        key_mount(),
        *(
            [{"name": "snapshots", "mountPath": SNAPSHOTS_PATH}]
            if takes_snapshots(job.config)
            else []
        ),
    ]


def _input_mount(
    job: Job, name: str, path: str, volume: Volume | None, is_written: bool = False
) -> Manifest:
    """Return the mount of ``volume`` at ``path``, read-only unless the run writes to it."""
    data, claim = job.config.data, volume and volume.persistent_volume_claim
    for kept in filter(None, (data.cache, data.download.folder)):
        folder = PurePosixPath(normpath(join(DATA_PATH, kept)))
        is_written = is_written or folder.is_relative_to(path)
    mount = {"name": name, "mountPath": path}
    return mount if is_written and not (claim and claim.read_only) else {**mount, "readOnly": True}


def _source(volume: Volume | None) -> Manifest:
    if volume is None:
        return {"emptyDir": {}}
    return volume.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"fetch"})


GPU_CLAIM = "gpus"
"""Name of a training pod's resource claim."""
CPUS_PER_GPU, MEMORY_PER_GPU_GIB = 2, 8
"""Default requests, without snapshots and weights in host memory. They are small, so that every node with
that many GPUs fits; without any, the pod would be the first to be evicted, and would get no CPU next to pods
that request some."""


def resources_of(job: Job) -> Manifest:
    """Return the requests and limits of the training container, if there are any."""
    resources, devices = job.spec.resources, _devices(job)
    limits = _written(resources.limits)
    requests = {**_defaults(job), **limits, **_written(resources.requests)}
    requested = {name: quantity for name, quantity in requests.items() if amount(quantity)}
    result = {"requests": {**requested, **devices}, "limits": {**limits, **devices}}
    claims = [{"name": GPU_CLAIM}] if job.spec.gpu_claim_template else []
    named = {name: quantities for name, quantities in result.items() if quantities}
    return named | ({"claims": claims} if claims else {})


_RENDEZVOUS = RendezvousResources(
    requests=Amounts(cpu="50m", memory="256Mi"), limits=Amounts(memory="2Gi")
)


def rendezvous_resources_of(job: Job) -> Manifest:
    """Return the requests and limits of the rendezvous container.

    The job's amounts win over ``podDefaults``, and those over ours. An amount that is not overridden gives
    way: a request is at most the limit, and a limit at least the request.
    """
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    for given in (
        _RENDEZVOUS,
        job.pod_defaults.rendezvous.resources,
        job.spec.resources.rendezvous,
    ):
        requested, limited = _written(given.requests), _written(given.limits)
        requests, limits = {**requests, **requested}, {**limits, **limited}
        for name in limits.keys() & requests.keys():
            if amount(requests[name]) > amount(limits[name]):
                requests[name] = limits[name] = (requested if name in requested else limited)[name]
    return {"requests": requests, "limits": limits}


def gpu_claims(job: Job) -> list[Manifest]:
    """Return the resource claims of a training pod: its GPUs, if ``spec.gpuClaimTemplate`` is set."""
    template = job.spec.gpu_claim_template
    return [{"name": GPU_CLAIM, "resourceClaimTemplateName": template}] if template else []


def _devices(job: Job) -> dict[str, str]:
    """Return the GPUs, and an RDMA device for each. Requests and limits of such resources are equal."""
    if job.spec.gpus_per_node == 0:
        return {}
    gpus = None if job.spec.gpu_claim_template else job.spec.gpu_resource
    resources = (gpus, job.spec.network.rdma_resource)
    return {name: str(job.spec.gpus_per_node) for name in resources if name is not None}


def snapshot_bytes_of(job: Job) -> int:
    """Return the most memory that snapshots take in a pod of ``job``."""
    return snapshot_bytes(job.config, job.spec.rank_counts, max(1, job.spec.gpus_per_node))


def _defaults(job: Job) -> dict[str, str]:
    gpus = job.spec.gpus_per_node
    if gpus == 0:
        return {}
    extra = snapshot_bytes_of(job) + gpus * sum(host_sizes(job.config))
    memory = MEMORY_PER_GPU_GIB * gpus + round(extra / _GIB)
    return {"cpu": str(CPUS_PER_GPU * gpus), "memory": f"{memory}Gi"}


def _written(amounts: Amounts) -> dict[str, str]:
    return amounts.model_dump(mode="json", by_alias=True, exclude_none=True)


# The secret with the key that signs the messages between agents and the rendezvous service of a
# job.


KEY_FILE = "key"
KEY_PATH = "/etc/fluxtrain/rendezvous"
"""Mount path in the pods of the job."""


def key_secret(job: Job) -> Manifest:
    """Return the secret without its key, which is drawn when it is created.

    The operator may create secrets, but not read them: an existing one is kept. It is not immutable: kubelets
    would not notice that it was deleted and created again.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, names.rendezvous_key(job.name, job.uid), names.RENDEZVOUS),
        "type": "Opaque",
    }


def with_new_key(manifest: Manifest) -> Manifest:
    """Return the secret ``manifest`` with a new random key of 256 bits."""
    return {**manifest, "stringData": {KEY_FILE: secrets.token_hex(32)}}


def key_volume() -> Manifest:
    """Return the volume with the key; the secret is filled in later, as its name has the job's uid."""
    return {"name": KEY_VOLUME, "secret": {"secretName": "", "defaultMode": 0o440}}


def with_key(volume: Manifest, job: Job) -> Manifest:
    """Return ``volume`` with the secret of ``job``, if it is that of the key; else unchanged."""
    if volume["name"] != KEY_VOLUME:
        return volume
    name = names.rendezvous_key(job.name, job.uid)
    return {**volume, "secret": {**volume["secret"], "secretName": name}}


def key_mount() -> Manifest:
    return {"name": KEY_VOLUME, "mountPath": KEY_PATH, "readOnly": True}


# The size of /dev/shm: the batches of the data loaders, and RCCL's or NCCL's buffers.
#
# Only a limit: memory that is not used is not taken.


_SMALLEST = _GIB
_COLLECTIVES = _GIB // 2
"""For each GPU: 4 MiB for each of 32 channels in both directions to two neighbours, if GPUs exchange data
through shared memory."""


def shared_memory(config: RunConfig, spec: Spec) -> str:
    """Return the size of a pod's /dev/shm as a quantity, rounded up to a GiB."""
    loaded = loader_bytes(config, spec.rank_counts[0]) * max(1, spec.gpus_per_node)
    size = max(_SMALLEST, loaded + _COLLECTIVES * spec.gpus_per_node)
    return f"{math.ceil(size / _GIB)}Gi"


# The container that empties a node's page cache before a benchmark run, where the administrator
# allows it.
#
# It is privileged, as the kernel's switch is the whole node's, and runs the administrator's image
# if there is one. It leaves the time in a file, only if the kernel has done it; the trainer logs
# ``cache_clear`` from that.


_FILE = f"{FLUSHED_PATH}/time"
_COMMAND = f"sync && echo 3 > /proc/sys/vm/drop_caches && date +%s > {_FILE}"


def flushes(job: Job) -> bool:
    """Return whether the pods of ``job`` flush their nodes' page caches: benchmark runs, if it is allowed."""
    is_benchmark = job.config.task == "train" and job.config.logging.mlperf.division != "open"
    return job.pod_defaults.flush_caches and is_benchmark


def flush_container(job: Job) -> list[Manifest]:
    """Return the init container, none for a job that does not flush."""
    if not flushes(job):
        return []
    container = {
        "name": FLUSH_CONTAINER,
        "image": job.rendezvous_image or job.image,
        "command": ["/bin/sh", "-c", _COMMAND],
        "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "privileged": True,
            "runAsUser": 0,
            "runAsNonRoot": False,
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": FLUSHED_VOLUME, "mountPath": FLUSHED_PATH}],
    }
    return [container]


def flushed_volume(job: Job) -> list[Manifest]:
    return [{"name": FLUSHED_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}}] if flushes(job) else []


def flushed_mount(job: Job) -> list[Manifest]:
    """Return the training container's mount of it, which it cannot write."""
    mount = {"name": FLUSHED_VOLUME, "mountPath": FLUSHED_PATH, "readOnly": True}
    return [mount] if flushes(job) else []


def flushed_environment(job: Job) -> dict[str, str]:
    return {ENV_FLUSHED: _FILE} if flushes(job) else {}
