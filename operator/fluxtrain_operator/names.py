"""Every name, label and annotation that the operator writes or reads, one constant each."""

from __future__ import annotations

import hashlib

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import LABEL_JOB as _LABEL_JOB

Key = tuple[str, str]
"""Namespace and name of a FluxTraining."""

LABEL_JOB = _LABEL_JOB  # in the contract because ``fluxtrain mlperf package`` selects by it too

FIELD_MANAGER = "fluxtrain-operator"
"""Owner of the fields that server-side apply writes; whoever else changes them is overruled."""
MANAGED_BY = "fluxtrain.dev/operator"
"""The value of ``spec.managedBy`` that is ours; other jobs are left alone."""

LABEL_INDEX = f"{GROUP}/node-index"
"""Index of a training pod: the number at the end of its name. Read by the planner."""
LABEL_ATTEMPT = f"{GROUP}/attempt"
"""Life of the gang that a pod belongs to, counted from 1. Pods of an earlier one are replaced."""
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
"""``trainer`` or ``rendezvous`` on pods. Read by the planner, selectors and affinities."""
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
"""Always ``fluxtrain-operator``: the label selector of the operator's watches."""

ANNOTATION_SPEC = f"{GROUP}/spec-hash"
"""Hash of the fields that shape pods, as they were when the pod was made. Read by the planner."""
ANNOTATION_NODES = f"{GROUP}/nodes"
"""``min:max`` as torchrun in this pod knows it. Read by the planner when the job is scaled."""
ANNOTATION_REPLACEMENT = f"{GROUP}/replacement"
"""Number of the replacement that a pod is, 0 for a first one; the largest is ``restarts.pod``."""
ANNOTATION_APPLIED = f"{GROUP}/applied-hash"
"""Hash of an object as the operator last wanted it; an equal one is not applied again."""
ANNOTATION_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

TRAINER, RENDEZVOUS = "trainer", "rendezvous"
"""Components, and the names of the main containers of their pods."""

KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"
KUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
KUEUE_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
KUEUE_ROLE = "kueue.x-k8s.io/role-hash"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
"""Labels and annotations of the schedulers; ours to write, theirs to read."""
KUEUE_GATE = "kueue.x-k8s.io/admission"
KUEUE_FINALIZER = "kueue.x-k8s.io/managed"
"""Kueue's marks on the pods of a group: theirs to set and to remove, read by the planner."""

HOSTNAME = "kubernetes.io/hostname"

_LONGEST = 63


def bounded(base: str, suffix: str = "") -> str:
    """Return ``base`` + ``suffix`` within 63 characters: a long base ends in a hash instead."""
    if len(base) + len(suffix) <= _LONGEST:
        return base + suffix
    digest = hashlib.sha256(base.encode()).hexdigest()[:8]
    kept = base[: _LONGEST - len(suffix) - len(digest) - 1].rstrip("-")
    return f"{kept}-{digest}{suffix}"


def pod(job: str, index: int) -> str:
    """Return the name, and host name, of the training pod ``index``; the same in every life."""
    return bounded(job, f"-{index}")


def rendezvous(job: str) -> str:
    """Return the name, and host name, of the rendezvous pod."""
    return bounded(job, "-rendezvous")


def service(job: str) -> str:
    """Return the headless service's name; Kubernetes wants a letter first there."""
    return job if job[0].isalpha() else bounded(f"ft-{job}")


def config_map(job: str) -> str:
    """Return the name of the config map with the resolved config."""
    return bounded(job, "-config")


def network_policy(job: str) -> str:
    """Return the name of the network policy."""
    return bounded(job, "-network")


def disruption_budget(job: str) -> str:
    """Return the name of the pod disruption budget."""
    return bounded(job, "-nodes")


def pod_group(job: str) -> str:
    """Return the name of the pod group of coscheduling and Volcano, whose size may change."""
    return bounded(job, "-gang")


def native_group(job: str, minimum: int) -> str:
    """Return the name of Kubernetes' own pod group; it cannot change, so its size is in its name."""
    return bounded(job, f"-gang-{minimum}")


def queue_group(job: str, attempt: int) -> str:
    """Return Kueue's name for the pods of one life of the gang."""
    return bounded(job, f"-{attempt}")


def selector(job: str) -> dict[str, str]:
    """Return the labels that every pod of ``job`` carries and no other."""
    return {LABEL_JOB: job}


def trainer_selector(job: str) -> dict[str, str]:
    """Return the labels that the training pods of ``job`` carry and no other."""
    return {LABEL_JOB: job, LABEL_COMPONENT: TRAINER}


def labels(job: str, component: str) -> dict[str, str]:
    """Return the labels of an object of ``job``."""
    return {
        LABEL_NAME: "fluxtrain",
        LABEL_INSTANCE: job,
        LABEL_COMPONENT: component,
        LABEL_PART_OF: "fluxtrain",
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_JOB: job,
    }
