"""The names, labels and annotations that the operator writes or reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import LABEL_JOB as _LABEL_JOB

Key = tuple[str, str]
"""Namespace and name of a FluxTraining."""

LABEL_JOB = _LABEL_JOB  # in the contract, as ``fluxtrain mlperf package`` selects by it too

FIELD_MANAGER = "fluxtrain-operator"
"""Field manager of the operator's changes."""
MANAGED_BY = "fluxtrain.dev/operator"
"""The value of ``spec.managedBy`` of the jobs that this operator reconciles."""

LABEL_INDEX = f"{GROUP}/node-index"
"""Index of a training pod: the number at the end of its name. Read by the planner."""
LABEL_ATTEMPT = f"{GROUP}/attempt"
"""Attempt that a pod belongs to, counted from 1. Pods of earlier attempts are replaced."""
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
"""``trainer`` or ``rendezvous`` on pods. Read by the planner, selectors and affinities."""
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
"""Always ``fluxtrain-operator``: the label selector of the operator's watches."""

ANNOTATION_SPEC = f"{GROUP}/spec-hash"
"""Hash of the spec for which a pod was created. Read by the planner."""
ANNOTATION_NODES = f"{GROUP}/nodes"
"""``min:max`` of torchrun in this pod. Read by the planner when the job is scaled."""
ANNOTATION_ENDED = f"{GROUP}/ended-generation"
"""``attempt:generation`` of a rendezvous pod; up to it trainers restart in place. Read by the planner."""
ANNOTATION_RENDEZVOUS = f"{GROUP}/rendezvous"
"""`RENDEZVOUS_VERSION` of a pod. Read by the poller of members."""
ANNOTATION_REVISION = f"{GROUP}/revision"
"""Name of the revision of a pod. Read by the planner: only pods of one revision train together."""
ANNOTATION_REPLACEMENT = f"{GROUP}/replacement"
"""Replacement number of a pod, 0 for an initial one; the largest is ``restarts.pod``."""
ANNOTATION_DISTRUSTED = f"{GROUP}/distrusted-nodes"
"""Nodes, separated by commas, that a pod excludes for their faults. Read by the planner, which lifts that."""
ANNOTATION_APPLIED = f"{GROUP}/applied-hash"
"""Hash of an object as it was applied last; it is applied again only if the hash changes."""
ANNOTATION_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

TRAINER, RENDEZVOUS = "trainer", "rendezvous"
"""Components, and the names of the main containers of their pods."""

RENDEZVOUS_VERSION = "2"
"""Version of the messages of agents and rendezvous; pods without it use torch's c10d store."""

KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"
KUEUE_PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
KUEUE_REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
KUEUE_INDEX_LABEL = "kueue.x-k8s.io/pod-group-pod-index-label"
KUEUE_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
KUEUE_ROLE = "kueue.x-k8s.io/role-hash"
KUEUE_FORCE = "kueue.x-k8s.io/safe-to-forcefully-delete"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
"""Labels and annotations that Kueue and the schedulers read."""
KUEUE_GATE = "kueue.x-k8s.io/admission"
KUEUE_FINALIZER = "kueue.x-k8s.io/managed"
"""Gate and finalizer that Kueue sets on the pods of a group. Read by the planner."""

HOSTNAME = "kubernetes.io/hostname"

_MAX_LENGTH = 63


def bounded(base: str, suffix: str = "") -> str:
    """Return ``base`` + ``suffix`` within 63 characters; a long base is cut, and ends in its hash."""
    if len(base) + len(suffix) <= _MAX_LENGTH:
        return base + suffix
    digest = hashlib.sha256(base.encode()).hexdigest()[:8]
    kept = base[: _MAX_LENGTH - len(suffix) - len(digest) - 1].rstrip("-")
    return f"{kept}-{digest}{suffix}"


def pod(job: str, index: int) -> str:
    """Return the name, and host name, of the training pod ``index``; the same in all attempts."""
    return bounded(job, f"-{index}")


def rendezvous(job: str, number: int = 1) -> str:
    """Return the name of the rendezvous pod; the first one is its host name too, whatever its name.

    Another ``number`` is for a pod that is created while finalizers keep others. No training pod of any job
    has such a name.
    """
    return bounded(job, "-rendezvous" if number == 1 else f"-rendezvous{number}")


def is_rendezvous(job: str, pod: str) -> bool:
    """Return whether a rendezvous pod of ``job`` may have the name ``pod``."""
    number = re.search(r"-rendezvous([1-9][0-9]{0,8})?$", pod, re.ASCII)
    return number is not None and pod == rendezvous(job, int(number[1] or 1))


def rendezvous_key(job: str, uid: str) -> str:
    """Return the name of the secret with the job's rendezvous key; an earlier job's has another name."""
    return bounded(job, f"-key-{uid[:8]}")


def service(job: str) -> str:
    """Return the name of the headless service, which must start with a letter."""
    return job if job[0].isalpha() else bounded(f"ft-{job}")


def revision(job: str, content_hash: str) -> str:
    """Return the name of the config map with the revision whose content has ``content_hash``."""
    return bounded(job, f"-{content_hash}")


def legacy_config_map(job: str) -> str:
    """Return the name of the config map that pods without a revision mount.

    To be removed once no job is left that an operator without revisions started.
    """
    return bounded(job, "-config")


def network_policy(job: str) -> str:
    """Return the name of the network policy."""
    return bounded(job, "-network")


def disruption_budget(job: str) -> str:
    """Return the name of the pod disruption budget."""
    return bounded(job, "-nodes")


def pod_group(job: str) -> str:
    """Return the name of the pod group of coscheduling and Volcano."""
    return bounded(job, "-gang")


def native_group(job: str, minimum: int) -> str:
    """Return the name of Kubernetes' own pod group; it is immutable, so its name contains its size."""
    return bounded(job, f"-gang-{minimum}")


def kueue_group(job: str, attempt: int) -> str:
    """Return the name of the pod group of Kueue's that ``attempt`` began."""
    return bounded(job, f"-{attempt}")


def selector(job: str) -> dict[str, str]:
    """Return the labels that select all pods of ``job``."""
    return {LABEL_JOB: job}


def trainer_selector(job: str) -> dict[str, str]:
    """Return the labels that select the training pods of ``job``."""
    return {LABEL_JOB: job, LABEL_COMPONENT: TRAINER}


def as_text(selector: Mapping[str, str]) -> str:
    """Return the labels of ``selector`` as the API server and kubectl read them."""
    return ",".join(f"{key}={value}" for key, value in selector.items())


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
