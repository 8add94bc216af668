"""The volumes of a training pod: storage, the config, shared memory and scratch space."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from posixpath import join, normpath

from fluxtrain.contract.launch import (
    CONFIG_FILE,
    DATA_PATH,
    MODELS_PATH,
    OUTPUT_PATH,
    SNAPSHOTS_PATH,
)
from fluxtrain.contract.resource.storage import Volume
from fluxtrain.snapshot_size import takes_snapshots
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.requests import snapshot_bytes_of
from fluxtrain_operator.resources.secret import key_mount, key_volume
from fluxtrain_operator.resources.shared_memory import shared_memory

CONFIG_PATH = f"/etc/fluxtrain/{CONFIG_FILE}"
"""Path of the config in a training pod; FLUXTRAIN_CONFIG is set to it."""
CONFIG_VOLUME = "config"
SCRATCH_PATH = "/tmp"
"""The only writable folder outside of the storage: the root file system is read-only."""
_WRITING_TASKS = ("prepare", "preprocess")
"""Tasks whose result is a data set at /data."""
_RECORDS_BYTES = 1 << 20
"""For the config and the records beside images, and for whole pages."""
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
        key_volume(job),
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
    return [
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_PATH, "subPath": CONFIG_FILE, "readOnly": True},
        _input_mount(job, "data", DATA_PATH, storage.data, makes_data),
        _input_mount(job, "models", MODELS_PATH, storage.models),
        {"name": "output", "mountPath": OUTPUT_PATH, **_own_folder(job)},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": SCRATCH_PATH},
        key_mount(),
        *(
            [{"name": "snapshots", "mountPath": SNAPSHOTS_PATH}]
            if takes_snapshots(job.config)
            else []
        ),
    ]


def _own_folder(job: Job) -> Manifest:
    return {"subPath": f"{job.namespace}/{job.name}"} if job.spec.storage.isolated else {}


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
    return volume.model_dump(mode="json", by_alias=True, exclude_none=True)
