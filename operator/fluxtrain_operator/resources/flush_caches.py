"""The container that empties a node's page cache before a benchmark run, where the administrator allows it.

It is privileged, as the kernel's switch is the whole node's, and runs the administrator's image if there is
one. It leaves the time in a file, only if the kernel has done it; the trainer logs ``cache_clear`` from that.
"""

from __future__ import annotations

from fluxtrain.contract.launch import ENV_FLUSHED, FLUSHED_PATH
from fluxtrain.contract.resource.pod_template import FLUSH_CONTAINER, FLUSHED_VOLUME
from fluxtrain_operator.job import Job, Manifest

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
    """Return the volume with the time of the flush."""
    return [{"name": FLUSHED_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}}] if flushes(job) else []


def flushed_mount(job: Job) -> list[Manifest]:
    """Return the training container's mount of it, which it cannot write."""
    mount = {"name": FLUSHED_VOLUME, "mountPath": FLUSHED_PATH, "readOnly": True}
    return [mount] if flushes(job) else []


def flushed_environment(job: Job) -> dict[str, str]:
    """Return the variable that names the file."""
    return {ENV_FLUSHED: _FILE} if flushes(job) else {}
