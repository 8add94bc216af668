"""The names, labels and annotations that the operator writes or reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.resource.fluxtraining import LABEL_JOB as _LABEL_JOB
from fluxtrain.errors import UNSET, ConfigError

Key = tuple[str, str]
"""Namespace and name of a FluxTraining."""

LABEL_JOB = _LABEL_JOB  # in the contract, as ``fluxtrain mlperf package`` selects by it too
"""On every object of a job: the operator watches what has it, whatever its value."""

FIELD_MANAGER = "fluxtrain-operator"
MANAGED_BY = "fluxtrain.dev/operator"
"""The value of ``spec.managedBy`` of the jobs that this operator reconciles."""

CLAIM, CLAIM_SECONDS = "fluxtrain-jobs", 180
"""The Lease of a namespace that says which release reconciles its jobs, and when another may take it."""

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
"""Information only: a policy engine may set another value than ``fluxtrain-operator``."""

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
KUEUE_GATES = (KUEUE_GATE, "kueue.x-k8s.io/topology")
KUEUE_FINALIZER = "kueue.x-k8s.io/managed"
"""Gates and finalizer that Kueue sets on the pods of a group. Read by the planner."""

HOSTNAME = "kubernetes.io/hostname"

_MAX_LENGTH = 63


def bounded(base: str, suffix: str = "") -> str:
    """Return ``base`` + ``suffix`` within 63 characters; a long base is cut, and ends in its hash."""
    if len(base) + len(suffix) <= _MAX_LENGTH:
        return base + suffix
    digest = hashlib.sha256(base.encode()).hexdigest()[:8]
    kept = base[: _MAX_LENGTH - len(suffix) - len(digest) - 1].rstrip("-")
    return f"{kept}-{digest}{suffix}"


def short_uid(uid: str) -> str:
    """Return the end of ``uid``, 12 characters, by which a status names a pod."""
    return uid[-12:]


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


def index_of(job: str, pod: str) -> int | None:
    """Return the index of the training pod of ``job`` that has the name ``pod``; None if none has."""
    index = pod.rpartition("-")[2]
    return int(index) if index.isdecimal() and pod == bounded(job, f"-{int(index)}") else None


def rendezvous_key(job: str, uid: str) -> str:
    """Return the name of the secret with the job's rendezvous key; an earlier job's has another name."""
    return bounded(job, f"-key-{uid[:8]}")


def service(job: str) -> str:
    """Return the name of the headless service, which must start with a letter."""
    return job if job[0].isalpha() else bounded(f"ft-{job}")


def revision(job: str, content_hash: str) -> str:
    """Return the name of the config map with the revision whose content has ``content_hash``."""
    return bounded(job, f"-{content_hash}")


def network_policy(job: str) -> str:
    return bounded(job, "-network")


def disruption_budget(job: str) -> str:
    return bounded(job, "-nodes")


def pod_group(job: str) -> str:
    """Return the name of the pod group of coscheduling, Volcano and Kubernetes itself."""
    return bounded(job, "-gang")


def kueue_group(job: str, attempt: int) -> str:
    """Return the name of the pod group of Kueue's that ``attempt`` began."""
    return bounded(job, f"-{attempt}")


def selector(job: str) -> dict[str, str]:
    return {LABEL_JOB: job}


def trainer_selector(job: str) -> dict[str, str]:
    return {LABEL_JOB: job, LABEL_COMPONENT: TRAINER}


def as_text(selector: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in selector.items())


def labels(job: str, component: str) -> dict[str, str]:
    return {
        LABEL_NAME: "fluxtrain",
        LABEL_INSTANCE: job,
        LABEL_COMPONENT: component,
        LABEL_PART_OF: "fluxtrain",
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_JOB: job,
    }


def stamp(seconds: float) -> str:
    """Return Unix ``seconds`` as a timestamp, truncated to seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: object) -> float | None:
    """Return the Unix seconds of a timestamp; None if ``text`` is not one."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def duration(seconds: float) -> str:
    """Return ``seconds`` in its two largest units, such as 3d4h, 2h10m, 5m30s or 0s; rounded down."""
    rest = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return "".join(parts) or "0s"


def digest(value: object) -> str:
    """Return a short hash of the JSON ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# When pods and nodes changed, by the operator's clock: the clocks of two machines may differ by
# hours.
#
# A kubelet reports times by the clock of its node. Only differences of such times are used.


class Transition(NamedTuple):
    """The newest change of which a node has reported the time."""

    reported: float
    """Unix time by the clock of the node."""
    time: float
    """Unix time by the operator's clock."""

    @property
    def shift(self) -> float:
        """Return the seconds to add to other times by the clock of the node."""
        return self.time - self.reported


def transition(
    reported: float, before: Transition | None, *, is_watched: bool, earliest: float, now: float
) -> Transition:
    """Return the transition at ``reported``, which is that of ``before`` if it has the same time.

    One that ``is_watched``, as the object was known without it, happens ``now``. Of any other it is only
    known that it happened between ``earliest`` and ``now``.
    """
    if before is not None and before.reported == reported:
        return before
    time = now if is_watched else min(max(earliest, reported), now)
    return Transition(reported, float(int(time)))  # whole seconds, as Kubernetes' own times


# Entries of manifests, which may have any type: those of another type than expected are left out.


def mapping(of: Mapping[Any, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at ``key``; an empty one for anything else."""
    value = of.get(key)
    return value if isinstance(value, Mapping) else {}


def mappings(of: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [item for item in items(of, key) if isinstance(item, Mapping)]


def items(of: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at ``key``; an empty one for anything else."""
    value = of.get(key)
    return value if isinstance(value, list) else []


RECURSION_LIMIT = 12_000
"""Python's recursion limit while the operator runs: the API server accepts JSON nested 10 000 deep."""
MAX_DEPTH = 32
"""Nesting of mappings and lists in a spec; a pod's deepest field, a selector in an affinity, is at 13."""
MAX_BYTES = {"spec": 256 << 10, "spec.podTemplate": 64 << 10}
"""Size of a part of the resource as JSON. Kubernetes accepts 1.5 MiB, but each pod has a copy."""
_MAX_PATH_DEPTH = 4


def require_bounded(value: Any, at: str) -> None:
    """Raise ConfigError if ``value``, found at the path ``at``, is too deep or too large; iterative."""
    max_bytes, size = MAX_BYTES[at], 0
    stack = [(value, at, 1)]
    while stack:
        item, path, depth = stack.pop()
        if depth > MAX_DEPTH + 1:
            raise ConfigError(path, UNSET, f"must be nested at most {MAX_DEPTH} deep")
        size += _own_size(item)
        if size > max_bytes:
            raise ConfigError(at, UNSET, f"must be at most {max_bytes >> 10} KiB as JSON")
        stack += ((child, _path(path, key, depth), depth + 1) for key, child in _children(item))


def _own_size(value: Any) -> int:
    """Return the length of ``value`` as JSON without its children."""
    if isinstance(value, dict):
        return sum(len(str(key)) + 5 for key in value)
    return len(value) + 2 if isinstance(value, list | str) else 8


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _path(path: str, key: object, depth: int) -> str:
    if depth > _MAX_PATH_DEPTH:
        return path
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
