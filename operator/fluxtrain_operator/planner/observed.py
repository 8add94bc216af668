"""Observed: an immutable snapshot of one job's pods, progress and nodes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from sys import intern
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND, Spec
from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Revision
from fluxtrain_operator.base.names import Transition, items, mapping, mappings, seconds
from fluxtrain_operator.base.node_health import KNOWN_MARKS, NO_DISTRUST, Distrust, NodeMarks
from fluxtrain_operator.base.reports import (
    NO_MEMBERS,
    MembersReport,
    Progress,
    read_termination_message,
)
from fluxtrain_operator.resources.scheduling import NO_STATE, GroupState

# Why an object of a job cannot be created: its name is in use, the API server rejects it, or its kind
# is not served.


NAME_CONFLICT, TERMINATING = "NameConflict", "PredecessorTerminating"
NO_POD_GROUPS = "NoPodGroups"
LABEL_REMOVED, RESTORED = "LabelRemoved", "Restored"
PREDECESSOR_KEPT = "PredecessorKept"
_NAME_CONFLICTS = (NAME_CONFLICT, TERMINATING, LABEL_REMOVED, PREDECESSOR_KEPT, RESTORED)
_TERMINATING_SECONDS, _BACKOFF_SECONDS = (2.0, 10.0), (5.0, 60.0)
"""Until the first retry and at most: while an object of the name is being deleted, and else."""
_REJECTIONS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
_WEBHOOK = ("admission webhook", "failed calling webhook")  # webhooks choose their own status code
_REASONS = {"quota": "QuotaExceeded", "violates PodSecurity": "PodSecurity"}
_BRIEF_FINALIZERS = (names.KUEUE_FINALIZER, "foregroundDeletion", "orphan")
"""Of Kueue and of the garbage collector, which remove them themselves."""


@dataclass(frozen=True)
class CreateFailure:
    """Why one object of a job cannot be created."""

    kind: str
    name: str
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people."""
    retry_time: float = math.inf
    """Unix time; infinite if a watch reports when the name is free."""
    retries: int = 0
    is_initial: bool = False
    """Whether it is a pod that replaces no other."""
    uid: str = ""
    """Uid of the pod that has the name and is to be deleted: the job's own, or restored; else empty."""
    owner: str = ""
    """Kind and name of the controller of the object that has the name; empty without one."""

    @property
    def is_name_conflict(self) -> bool:
        """Return whether another object has the name; else the API server rejects the object."""
        return self.reason in _NAME_CONFLICTS

    def for_object(self, manifest: Mapping[str, Any]) -> CreateFailure:
        metadata = manifest["metadata"]
        number = metadata["annotations"].get(names.ANNOTATION_REPLACEMENT)
        kind, name = manifest["kind"], metadata["name"]
        return replace(self, kind=kind, name=name, is_initial=number == "0")

    def with_backoff(self, before: CreateFailure | None, now: float) -> CreateFailure:
        """Return the failure with its retry time, later each time after the same failure ``before``."""
        retries = before.retries + 1 if before is not None and before.reason == self.reason else 0
        is_short = self.reason == TERMINATING
        first, most = _TERMINATING_SECONDS if is_short else _BACKOFF_SECONDS
        wait = min(most, first * 2.0 ** min(retries, 10))
        return replace(self, retry_time=now + wait, retries=retries)


def is_rejection(error: ApiError) -> bool:
    """Return whether the API server rejected the object itself; other errors are temporary."""
    return error.status in _REJECTIONS or any(text in error.server_message for text in _WEBHOOK)


def rejected(manifest: Mapping[str, Any], error: ApiError) -> CreateFailure:
    """Return the failure of an object that the API server rejects with ``error``."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    default = "PodsRefused" if kind == "Pod" else f"{kind}Refused"
    reason = next((r for text, r in _REASONS.items() if text in error.server_message), default)
    message = f"{kind} {metadata['name']}: {error.server_message or error}"
    return CreateFailure(kind, metadata["name"], reason, message).for_object(manifest)


def no_pod_group(manifest: Mapping[str, Any], why: str) -> CreateFailure:
    """Return the failure of an object of gang scheduling whose kind cannot be used: ``why``."""
    kind, name, version = manifest["kind"], manifest["metadata"]["name"], manifest["apiVersion"]
    message = f"spec.scheduling.gang needs {kind} {name} of {version}, but {why}"
    return CreateFailure(kind, name, NO_POD_GROUPS, message)


def unwatched(existing: Mapping[str, Any]) -> CreateFailure | None:
    """Return the failure that a job's own pod causes which its watch cannot find; None if it can."""
    metadata = existing["metadata"]
    if names.LABEL_JOB in (metadata.get("labels") or {}):
        return None
    name, label = metadata["name"], names.LABEL_JOB
    if "deletionTimestamp" in metadata:
        message = f"Pod {name}, which has lost its label {label}, is being deleted"
        return CreateFailure("Pod", name, TERMINATING, message)
    message = f"Pod {name} has lost its label {label} and is replaced"
    return CreateFailure("Pod", name, LABEL_REMOVED, message, uid=str(metadata.get("uid", "")))


def restored(pod: Mapping[str, Any]) -> CreateFailure:
    """Return the failure that a pod without an owner causes which runs what a pod of the job would."""
    name, uid = pod["metadata"]["name"], str(pod["metadata"].get("uid", ""))
    message = f"Pod {name}, which a backup brought back without its owner, is replaced"
    return CreateFailure("Pod", name, RESTORED, message, uid=uid)


def name_conflict(kind: str, existing: Mapping[str, Any], job: str) -> CreateFailure:
    """Return the failure that ``existing`` causes: it has a name that ``job`` needs.

    An object of a deleted job with the same name is about to be garbage collected.
    """
    metadata, owner = existing["metadata"], controller_of(existing)
    name, controller = metadata["name"], (owner.get("kind"), owner.get("name"))
    if finalizers := _keeping_finalizers(existing):
        message = f"{kind} {name} is deleted, and kept by {', '.join(finalizers)}"
        return CreateFailure(kind, name, PREDECESSOR_KEPT, message)
    if controller == (KIND, job) or "deletionTimestamp" in metadata:
        message = f"{kind} {name} of an earlier job is being deleted"
        return CreateFailure(kind, name, TERMINATING, message)
    has_label = (metadata.get("labels") or {}).get(names.LABEL_JOB) == job
    owned_by = " ".join(map(str, controller)) if owner else ""
    state = f"belongs to {owned_by}" if owner else "has no owner"
    if has_label and not owner:
        state = f"{state}: an earlier job left it"
    message = f"{kind} {name} already exists and {state}"
    return CreateFailure(kind, name, NAME_CONFLICT, message, owner=owned_by)


def _keeping_finalizers(existing: Mapping[str, Any]) -> list[str]:
    """Return the finalizers of others that keep a deleted object; none of a pod that may still run."""
    metadata = existing["metadata"]
    phase, node = (
        mapping(existing, "status").get("phase"),
        mapping(existing, "spec").get("nodeName"),
    )
    runs = existing.get("kind", "Pod") == "Pod" and node and phase not in ("Succeeded", "Failed")
    if "deletionTimestamp" not in metadata or runs:
        return []
    return [str(name) for name in items(metadata, "finalizers") if name not in _BRIEF_FINALIZERS]


def controller_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the controller's owner reference; empty if the object has none."""
    references = manifest["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


def is_controlled_by(manifest: Mapping[str, Any], uid: object) -> bool:
    return bool(uid) and controller_of(manifest).get("uid") == uid


TRANSITION = "transition"
"""Key under which the cache keeps the newest transition of a pod, next to its metadata and status."""
_INIT_CONTAINER = "initContainer"
_KUEUE_STOP = "TerminationTarget"
"""Condition that Kueue sets to True before it deletes a pod of a group."""
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
"""Key of the name in the state of an init container."""
_GPU_RESOURCES = ("amd.com/", "nvidia.com/gpu")
_GPU_LABELS = ("amd.com/gpu.", "nvidia.com/gpu.")
"""Of AMD's node labeller and NVIDIA's feature discovery, which run without a device plugin too."""
_CREATING = ("ContainerCreating", "PodInitializing", "SchedulingGated")
"""Why a pod waits that is no problem."""
_MAX_NUMBER = 10**9
"""Of an annotation, which people can change: counts in the status are bounded."""


@dataclass(frozen=True)
class Pod:
    """One pod of the job: what the planner reads of it."""

    name: str
    uid: str
    index: int = 0
    attempt: int = 1
    replacement: int = 0
    spec_hash: str = ""
    nodes: tuple[int, int] = (1, 1)
    ended_generation: tuple[int, int] = (0, 0)
    """Attempt and generation up to which a rendezvous pod ends generations."""
    revision: str = ""
    phase: str = "Pending"
    ready: bool = False
    node: str = ""
    deleting: bool = False
    deletion_deadline: float | None = None
    forced: bool = False
    """Whether it was force deleted; if it still exists, it has a finalizer."""
    gated: bool = False
    gates: tuple[str, ...] = ()
    """Names of the remaining scheduling gates."""
    finalizers: tuple[str, ...] = ()
    waiting: str = ""
    exit_code: int | None = None
    """Of the main container, or of the init container that failed."""
    init_container: str = ""
    """Name of the init container that failed, so that the main one never ran."""
    reason: str = ""
    message: str = ""
    final_progress: Progress | None = None
    """Progress in the termination message, if rank 0 ran in this pod."""
    process_restarts: int = 0
    """Restarts of its processes, in the termination message, and of those before it."""
    created: float = 0.0
    started: float | None = None
    """Unix time by the operator's clock; of a pod that has ended, as long before ``finished`` as it ran."""
    finished: float | None = None
    """Unix time by the operator's clock."""
    disruption: str = ""
    """Reason of the condition by which the infrastructure announces the pod's end; empty without it."""
    disruption_message: str = ""
    queue_stop: str = ""
    """Why Kueue stops the pod; empty if it does not."""
    has_probe: bool = False
    """Whether the kubelet ends the main container if a liveness or startup probe fails."""
    excludes_nodes: bool = False
    changed_labels: tuple[str, ...] = ()
    """Keys of labels that somebody has changed since its creation."""
    rendezvous_version: str = ""
    """Version of the messages of its service, if it is the rendezvous pod."""

    @property
    def ended(self) -> bool:
        """Return whether its main process has exited; sidecars may still run."""
        return self.exit_code is not None or self.phase in ("Succeeded", "Failed")

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 or (self.exit_code is None and self.phase == "Succeeded")

    @property
    def running(self) -> bool:
        return self.phase == "Running" and self.started is not None and not self.ended

    @property
    def kept_by(self) -> tuple[str, ...]:
        """Return the finalizers of others that keep the object of a deleted pod that runs no longer.

        One that was force deleted, as on a lost node, counts as gone. Not Kueue's, which it removes itself.
        """
        if not self.deleting or not (self.ended or self.forced or not self.node):
            return ()
        return tuple(name for name in self.finalizers if name != names.KUEUE_FINALIZER)

    @property
    def unschedulable(self) -> bool:
        """Return whether the scheduler has found no node for it."""
        return self.waiting.startswith("Unschedulable")

    @property
    def wait_reason(self) -> tuple[str, str]:
        """Return reason and message of what the scheduler or kubelet reports of it while it waits."""
        reason, _, message = self.waiting.partition(": ")
        is_valid = reason.isalnum() and reason[0].isalpha()
        return reason if is_valid else "PodsPending", f"{self.name}: {message or reason}"

    @property
    def cannot_start(self) -> bool:
        """Return whether it waits for more than the creation of its containers, or at a gate."""
        is_waiting = bool(self.waiting) and not self.running
        return is_waiting and self.wait_reason[0] not in _CREATING

    @staticmethod
    def from_object(manifest: Mapping[str, Any]) -> Pod:
        """Return the pod in ``manifest``; missing or malformed fields have their defaults."""
        metadata, status = mapping(manifest, "metadata"), mapping(manifest, "status")
        spec = mapping(manifest, "spec")
        labels, notes = mapping(metadata, "labels"), mapping(metadata, "annotations")
        conditions = {c.get("type"): c for c in mappings(status, "conditions")}
        scheduled = mapping(conditions, "PodScheduled")
        disruption = mapping(conditions, "DisruptionTarget")
        state = _state(labels, status)
        waiting, terminated = mapping(state, "waiting"), mapping(state, "terminated")
        final = read_termination_message(terminated.get("message"))
        started, finished = _reported_times(state)
        newest = manifest.get(TRANSITION)
        shift = newest.shift if isinstance(newest, Transition) else 0.0
        return Pod(
            name=str(metadata.get("name", "")),
            uid=str(metadata.get("uid", "")),
            index=_number(labels.get(names.LABEL_INDEX)),
            attempt=_number(labels.get(names.LABEL_ATTEMPT)),
            replacement=_number(notes.get(names.ANNOTATION_REPLACEMENT)),
            spec_hash=str(notes.get(names.ANNOTATION_SPEC, "")),
            nodes=_range(notes.get(names.ANNOTATION_NODES)),
            ended_generation=_pair(notes.get(names.ANNOTATION_ENDED)),
            revision=str(notes.get(names.ANNOTATION_REVISION, "")),
            phase=str(status.get("phase", "Pending")),
            ready=mapping(conditions, "Ready").get("status") == "True",
            node=str(spec.get("nodeName") or ""),
            deleting="deletionTimestamp" in metadata,
            deletion_deadline=seconds(metadata.get("deletionTimestamp")),
            forced=metadata.get("deletionGracePeriodSeconds") == 0,
            gated=scheduled.get("reason") == "SchedulingGated",
            gates=tuple(str(gate.get("name")) for gate in mappings(spec, "schedulingGates")),
            finalizers=tuple(map(str, items(metadata, "finalizers"))),
            waiting=_waiting_reason(scheduled, waiting),
            exit_code=terminated.get("exitCode"),
            init_container=str(state.get(_INIT_CONTAINER, "")),
            reason=str(status.get("reason") or terminated.get("reason") or ""),
            message=(final.text if not status.get("reason") else "")
            or _text(status.get("message"))
            or final.text,
            final_progress=final.progress and final.progress.ended_at(finished),
            process_restarts=final.process_restarts,
            created=seconds(metadata.get("creationTimestamp")) or 0.0,
            started=None if started is None else started + shift,
            finished=None if finished is None else finished + shift,
            disruption=_true_reason(disruption, "Disrupted"),
            disruption_message=_disruption_message(disruption, status),
            queue_stop=_true_reason(mapping(conditions, _KUEUE_STOP), "GroupEnded"),
            has_probe=manifest.get("hasProbe") is True,
            excludes_nodes=bool(notes.get(names.ANNOTATION_DISTRUSTED)),
            changed_labels=tuple(map(str, items(manifest, "changedLabels"))),
            rendezvous_version=str(notes.get(names.ANNOTATION_RENDEZVOUS, "")),
        )


@dataclass(frozen=True)
class NodeView:
    """A node: what the planner reads of it."""

    name: str
    ready: bool = True
    unhealthy: str = ""
    """Why its GPUs are unhealthy; empty if they are healthy."""
    unhealthy_since: float = 0.0
    """Unix time since which the operator has seen that they are; 0 if unknown."""
    problem: str = ""
    """Why the whole node is unhealthy; empty if it is healthy."""
    problem_since: float = 0.0
    """Unix time since which the operator has seen that it is; 0 if unknown."""
    since: float = 0.0
    """Unix time of the last change of ``ready``, by the operator's clock in the cache; 0 if unknown."""
    reported_since: float = 0.0
    """``since`` by the clock of whoever reported it."""
    has_gpus: bool = False
    """Whether it offers GPUs as a known resource or, to drivers of resource claims, has labels of GPUs."""
    resources: frozenset[str] = frozenset()
    """Extended resources that it offers, such as ``amd.com/gpu``."""
    gone: bool = False
    """Whether the node was deleted while it had pods."""
    cordoned: bool = False
    """Whether an administrator has marked it as unschedulable."""
    created: float = 0.0
    """Unix time of its creation; a node that is deleted and registers again is a new one."""
    hostname: str = ""
    """Its label kubernetes.io/hostname, which may differ from its name; empty if they are equal."""
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    """All its labels: jobs name those by which ranks are ordered. No job is planned again for them."""

    @staticmethod
    def from_object(manifest: Mapping[str, Any], marks: NodeMarks = KNOWN_MARKS) -> NodeView:
        """Return the node in ``manifest``; a new one without conditions is not ready."""
        metadata, status = mapping(manifest, "metadata"), mapping(manifest, "status")
        conditions = {c.get("type"): c for c in mappings(status, "conditions")}
        ready = mapping(conditions, "Ready")
        since = seconds(ready.get("lastTransitionTime")) or 0.0
        name, labels = metadata.get("name", ""), mapping(metadata, "labels")
        capacity = {str(key): str(count) for key, count in mapping(status, "capacity").items()}
        hostname = labels.get(names.HOSTNAME)
        return NodeView(
            name=str(name),
            ready=ready.get("status") == "True",
            unhealthy=marks.of_gpus(manifest),
            problem=marks.of_node(manifest),
            cordoned=mapping(manifest, "spec").get("unschedulable") is True,
            created=seconds(metadata.get("creationTimestamp")) or 0.0,
            hostname=str(hostname) if hostname and hostname != name else "",
            since=since,
            reported_since=since,
            has_gpus=_has_gpus(capacity, map(str, labels)),
            resources=frozenset(
                intern(k) for k, count in capacity.items() if "/" in k and count != "0"
            ),
            labels={intern(str(key)): intern(str(value)) for key, value in labels.items()},
        )


def nodes_for(nodes: Iterable[NodeView], spec: Spec) -> list[NodeView]:
    """Return the nodes with the GPUs of a job; all, if none shows that it has any.

    Only a device plugin adds them to the capacity, a driver of resource claims does not.
    """
    every = list(nodes)
    if spec.gpus_per_node == 0:
        return every
    named = [node for node in every if spec.gpu_resource in node.resources]
    if not named or spec.gpu_claim_template is not None:
        named = [node for node in every if node.has_gpus]
    return named or every


@dataclass(frozen=True)
class Observed:
    """The observed state of one job."""

    pods: tuple[Pod, ...] = ()
    """Training pods, of all attempts."""
    rendezvous: Pod | None = None
    kept_rendezvous: tuple[Pod, ...] = ()
    """Earlier rendezvous pods, which finalizers of others keep."""
    final_pod: Pod | None = None
    """The last pod that reported rank 0's progress when it ended, and is gone."""
    gone: tuple[Pod, ...] = ()
    """Pods that are gone, of which the watch has told that they were disrupted, or stopped by Kueue."""
    progress: Progress | None = None
    """Rank 0's answer at /progress; None if it did not answer."""
    any_progress: Progress | None = None
    """Answer of any rank, rank 0's if it answered; None if no trainer answered."""
    heard: MembersReport = NO_MEMBERS
    """Which pods the rendezvous service hears of."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """Nodes by name; a missing one counts as healthy."""
    distrust: Distrust = NO_DISTRUST
    """Which nodes have had faults lately."""
    predecessors: Mapping[str, str] = field(default_factory=dict)
    """Phases of the existing jobs of ``startAfter``; empty for a job without a phase."""
    cycle: tuple[str, ...] = ()
    """Jobs that wait for one another by ``startAfter``, from this one to itself; empty without a cycle."""
    is_awaited: bool = False
    """Whether a job that this one lets start may not have seen its end yet."""
    applied: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Applied hashes of the supporting objects, by kind and name."""
    revision: Revision | None = None
    """The stored revision of the status, if it was read."""
    disruptions_left: int | None = None
    """How many pods of all jobs may still be replaced this minute for faults of nodes; None: any number."""
    create_failures: tuple[CreateFailure, ...] = ()
    """Why objects of the job cannot be created."""
    group_state: GroupState = NO_STATE
    """What the scheduler reports of the job's pod group."""

    @staticmethod
    def from_objects(
        pods: Iterable[Mapping[str, Any]],
        final_pod: Mapping[str, Any] | None = None,
        gone: Iterable[Mapping[str, Any]] = (),
        **others: Any,
    ) -> Observed:
        """Return the snapshot with ``pods`` grouped by their component label."""
        by_component: dict[str, list[Pod]] = {names.TRAINER: [], names.RENDEZVOUS: []}
        for manifest in pods:
            labels = mapping(mapping(manifest, "metadata"), "labels")
            component = labels.get(names.LABEL_COMPONENT)
            if component in by_component:
                by_component[component].append(Pod.from_object(manifest))
        trainers = tuple(sorted(by_component[names.TRAINER], key=lambda pod: pod.index))
        kept = tuple(pod for pod in by_component[names.RENDEZVOUS] if pod.kept_by)
        left = [pod for pod in by_component[names.RENDEZVOUS] if not pod.kept_by]
        final = Pod.from_object(final_pod) if final_pod is not None else None
        return Observed(
            pods=trainers,
            rendezvous=min(left, key=lambda pod: (pod.deleting, pod.created), default=None),
            kept_rendezvous=kept,
            final_pod=final,
            gone=tuple(map(Pod.from_object, gone)),
            **others,
        )

    def node_of(self, pod: Pod) -> NodeView:
        return self.nodes.get(pod.node) or NodeView(pod.node)


def newest_time(pod: Mapping[str, Any]) -> float | None:
    """Return when the main container ended, else when it started, by its node's clock; None if neither."""
    state = _state(mapping(mapping(pod, "metadata"), "labels"), mapping(pod, "status"))
    started, finished = _reported_times(state)
    return started if finished is None else finished


def _reported_times(state: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return when a container started and ended, by its node's clock; None if it is not reported."""
    running, terminated = mapping(state, "running"), mapping(state, "terminated")
    started = seconds(running.get("startedAt") or terminated.get("startedAt"))
    return started or None, seconds(terminated.get("finishedAt")) or None


def _state(labels: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the main container; if it never ran, that of the init container that failed."""
    state = _main_container(labels, status)
    if status.get("phase") != "Failed" or state.get("running") or state.get("terminated"):
        return state
    ends = [
        {"terminated": end, _INIT_CONTAINER: container.get("name")}
        for container in mappings(status, "initContainerStatuses")
        if (end := mapping(mapping(container, "state"), "terminated")).get("exitCode")
    ]  # the first one, as sidecars are stopped after it
    return min(ends, key=lambda end: str(end["terminated"].get("finishedAt")), default=state)


def _main_container(labels: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the main container, which has the name of the pod's component."""
    name = labels.get(names.LABEL_COMPONENT)
    for container in mappings(status, "containerStatuses"):
        if container.get("name") == name:
            return mapping(container, "state")
    return {}


def _true_reason(condition: Mapping[str, Any], default: str) -> str:
    """Return the reason of a condition that is True, as a name in CamelCase; empty if it is not True."""
    if condition.get("status") != "True":
        return ""
    reason = condition.get("reason")
    is_valid = isinstance(reason, str) and _REASON.fullmatch(reason)
    return str(reason) if is_valid else default


def _disruption_message(condition: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return what the kubelet, or else whoever disrupted the pod, says about it."""
    reason = str(status.get("reason") or "")
    message = _text(status.get("message")) if reason else ""
    told = message or _text(condition.get("message")) or "evicted or preempted"
    return f"{reason}: {told}" if reason else told


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _waiting_reason(scheduled: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    state = scheduled if scheduled.get("status") == "False" else waiting
    parts = [str(state.get(key)) for key in ("reason", "message") if state.get(key)]
    return ": ".join(parts)


def _has_gpus(capacity: Mapping[str, str], labels: Iterable[str]) -> bool:
    """Return whether a node has a positive number of GPUs, or without any such number their labels."""
    counts = [count for name, count in capacity.items() if name.startswith(_GPU_RESOURCES)]
    if counts:
        return any(count != "0" for count in counts)
    return any(label.startswith(_GPU_LABELS) for label in labels)


def _number(text: object) -> int:
    """Return the number in ``text``, at most _MAX_NUMBER; 0 if it is none."""
    if not isinstance(text, str) or not text.isdecimal():
        return 0
    return min(int(text[:20]), _MAX_NUMBER)


def _pair(text: object) -> tuple[int, int]:
    first, _, second = str(text).partition(":")
    return _number(first), _number(second)


def _range(text: object) -> tuple[int, int]:
    smallest, largest = _pair(text)
    return smallest or 1, largest or 1
