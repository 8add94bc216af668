"""Gang scheduling: the scheduler starts at least ``nodes.min`` training pods together, or none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from fluxtrain.contract.resource.fluxtraining import Scheduling
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.base.names import mapping, mappings
from fluxtrain_operator.resources.support import supporting_object

_DEFAULT_QUEUE = "default"


class GroupState(NamedTuple):
    """What a scheduler reports of a pod group."""

    phase: str = ""
    """Empty until the scheduler has seen the group."""
    message: str = ""
    """Why it waits, if it is pending."""


NO_STATE = GroupState()
PENDING = "Pending"


def group_state(manifest: Mapping[str, Any]) -> GroupState:
    """Return the state of the pod group in ``manifest``; that of any other object has no phase."""
    status = mapping(manifest, "status")
    if status.get("phase") != PENDING:
        return GroupState(str(status["phase"])) if status.get("phase") else NO_STATE
    reported = [c for c in mappings(status, "conditions") if c.get("status") == "True"]
    unmet = [c for c in reported if c.get("type") == "Unschedulable"]
    newest = max(unmet, key=lambda c: str(c.get("lastTransitionTime")), default={})
    parts = [str(newest[key]) for key in ("reason", "message") if newest.get(key)]
    return GroupState(PENDING, ": ".join(parts))


POD_GROUP = "PodGroup"
"""Kind of the supporting object of all gangs."""


class Gang:
    """No gang scheduling: the scheduler starts pods one by one."""

    api_version = ""
    """API version of the pod group, which the cluster must serve; empty: there is none."""

    def objects(self, job: Job) -> list[Manifest]:
        """Return the supporting objects, in the order in which they must be created."""
        return []

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        """Make the training ``pod`` a member of the job's pod group."""

    def waits_for(self, job: Job, state: GroupState) -> str:
        """Return what a pod group in ``state`` waits for; empty if it is admitted, or tells nothing."""
        return ""


class Coscheduling(Gang):
    """The coscheduling plugin of kubernetes-sigs/scheduler-plugins."""

    api_version = "scheduling.x-k8s.io/v1alpha1"

    def objects(self, job: Job) -> list[Manifest]:
        name, spec = names.pod_group(job.name), self._spec(job)
        return [supporting_object(job, self.api_version, POD_GROUP, name, spec=spec)]

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        pod["metadata"]["labels"][names.COSCHEDULING_GROUP] = names.pod_group(job.name)

    def _spec(self, job: Job) -> Manifest:
        return {"minMember": job.spec.nodes.min}


class Volcano(Coscheduling):
    """Volcano's scheduler."""

    api_version = "scheduling.volcano.sh/v1beta1"

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        pod["metadata"]["annotations"][names.VOLCANO_GROUP] = names.pod_group(job.name)
        pod["spec"].setdefault("schedulerName", "volcano")

    def waits_for(self, job: Job, state: GroupState) -> str:
        """Return why the group is not in the phase Inqueue yet, in which Volcano schedules its pods."""
        group, queue = names.pod_group(job.name), job.spec.scheduling.queue_name or _DEFAULT_QUEUE
        if not state.phase:
            return f"Volcano's scheduler has not seen the pod group {group}"
        if state.phase != PENDING:
            return ""
        return f"the pod group {group} waits in Volcano's queue {queue}: {state.message or PENDING}"

    def _spec(self, job: Job) -> Manifest:
        """Return the spec, with the defaults too: a merge patch leaves missing fields as they were."""
        scheduling = job.spec.scheduling
        return {
            **super()._spec(job),
            "queue": scheduling.queue_name or _DEFAULT_QUEUE,
            "priorityClassName": scheduling.priority_class_name or "",
        }


class Native(Coscheduling):
    """Kubernetes' own gang scheduling: a pod group without a workload, which would be its template."""

    api_version = "scheduling.k8s.io/v1beta1"

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        pod["spec"]["schedulingGroup"] = {"podGroupName": names.pod_group(job.name)}

    def _spec(self, job: Job) -> Manifest:
        return {"schedulingPolicy": {"gang": {"minCount": job.spec.nodes.min}}}


_GANGS: dict[str, Gang] = {
    "None": Gang(),
    "Coscheduling": Coscheduling(),
    "Volcano": Volcano(),
    "Native": Native(),
}


def gang_of(job: Job) -> Gang:
    return _GANGS[job.spec.scheduling.gang]


class PodState(Protocol):
    """What queueing reads of an observed pod."""

    @property
    def finalizers(self) -> tuple[str, ...]: ...

    @property
    def gates(self) -> tuple[str, ...]: ...

    @property
    def deleting(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    @property
    def node(self) -> str: ...


class Queueing:
    """A job without a queue: its pods are created and replaced one by one.

    Whether Kueue manages a pod depends on the pod alone: the queue name of a running job may be removed, and
    Kueue may manage all pods of a namespace.
    """

    has_groups = False
    """Whether the pods of an attempt are admitted together."""

    def pod_labels(self, job: Job, group: int) -> dict[str, str]:
        """Return the labels of a training pod; ``group`` is the attempt that its pod group is named by."""
        return {}

    def pod_annotations(self, job: Job, index: int) -> dict[str, str]:
        return {}

    def fits(self, started_max: int, nodes_max: int) -> bool:
        """Return whether pods of a job of ``started_max`` nodes can train in one of ``nodes_max``."""
        return True

    def is_member(self, pod: PodState) -> bool:
        """Return whether Kueue manages ``pod``: its finalizer keeps the object, even a deleted one."""
        return names.KUEUE_FINALIZER in pod.finalizers

    def keeps_name(self, pod: PodState) -> bool:
        """Return whether Kueue keeps the object of ``pod`` until the group has a replacement for it."""
        return self.is_member(pod) and pod.deleting and (pod.ended or not pod.node)

    def is_never_admitted(self, pod: PodState) -> bool:
        """Return whether ``pod`` was created in a group that had ended: Kueue never admits it."""
        return names.KUEUE_GATE in pod.gates and not self.is_member(pod)


class Kueue(Queueing):
    """A job in one of Kueue's local queues."""

    has_groups = True

    def pod_labels(self, job: Job, group: int) -> dict[str, str]:
        return {
            names.KUEUE_QUEUE: str(job.spec.scheduling.local_queue),
            names.KUEUE_GROUP: names.kueue_group(job.name, group),
        }

    def pod_annotations(self, job: Job, index: int) -> dict[str, str]:
        """Return the group's size and how Kueue treats its pods.

        Not retriable: else Kueue keeps the names, and the quota, of ended pods until they are replaced.
        One role: else pods that exclude different nodes would belong to different pod sets.
        """
        notes = {
            names.KUEUE_COUNT: str(job.spec.nodes.max),
            names.KUEUE_RETRIABLE: "false",
            names.KUEUE_ROLE: names.TRAINER,
        }
        if job.spec.restart.force_delete_on_lost_node:
            notes[names.KUEUE_FORCE] = "true"
        notes |= _topology(job.spec.scheduling)
        if job.spec.scheduling.rank_order_label and index < job.spec.nodes.max:
            notes[names.KUEUE_INDEX_LABEL] = names.LABEL_INDEX  # Kueue refuses a larger index
        return notes

    def fits(self, started_max: int, nodes_max: int) -> bool:
        """Return whether the size is unchanged: a group has a fixed number of pods."""
        return started_max == nodes_max


def _topology(scheduling: Scheduling) -> dict[str, str]:
    """Return the topology that Kueue requires or prefers; it assigns nodes in the order of the index."""
    if label := scheduling.required_topology:
        return {names.KUEUE_REQUIRED_TOPOLOGY: label}
    return {names.KUEUE_PREFERRED_TOPOLOGY: label} if (label := scheduling.topology) else {}


_NO_QUEUE, _KUEUE = Queueing(), Kueue()


def queueing_of(job: Job) -> Queueing:
    return _NO_QUEUE if job.spec.scheduling.local_queue is None else _KUEUE


_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def trainer_affinity(job: Job) -> Manifest:
    """Return the affinity of a training pod.

    Spreading over nodes is preferred, not required: pods of small jobs may share a node.
    """
    scheduling, pods = job.spec.scheduling, names.trainer_selector(job.name)
    affinity: Manifest = {}
    if scheduling.topology is not None:
        affinity |= _preferred(50, pods, scheduling.topology)
    if scheduling.required_topology is not None:
        term = _term(pods, scheduling.required_topology)
        affinity[REQUIRED] = [term]
    result = rendezvous_affinity(job)
    return {**result, "podAffinity": affinity} if affinity else result


def rendezvous_affinity(job: Job) -> Manifest:
    """Return the affinity of the rendezvous pod, which prefers nodes without training pods."""
    anti_affinity = _preferred(100, names.trainer_selector(job.name), names.HOSTNAME)
    return {"podAntiAffinity": anti_affinity}


def keep_off(spec: Manifest, excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    """Return the pod ``spec`` such that it runs on no ``excluded`` node, and rather on no ``avoided`` one."""
    if not excluded and not avoided:
        return spec
    affinity = spec.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    of_nodes = _exclude(of_nodes, excluded) if excluded else of_nodes
    of_nodes = _avoid(of_nodes, avoided) if avoided else of_nodes
    return {**spec, "affinity": {**affinity, "nodeAffinity": of_nodes}}


def tolerations_of(job: Job) -> list[Manifest]:
    """Return the tolerations of the job's pods: the operator's ``podDefaults`` and the job's own."""
    defaults, own = job.pod_defaults.tolerations, job.spec.scheduling.tolerations
    tolerations = [*(t for t in defaults if t not in own), *own]
    return [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in tolerations]


def node_selector_of(job: Job) -> dict[str, str]:
    """Return the node selector of the job's pods; the job's values win over ``podDefaults``."""
    return {**job.pod_defaults.node_selector, **job.spec.scheduling.node_selector}


def _preferred(weight: int, labels: dict[str, str], topology: str) -> Manifest:
    terms = [{"weight": weight, "podAffinityTerm": _term(labels, topology)}]
    return {_PREFERRED: terms}


def _term(labels: dict[str, str], topology: str) -> Manifest:
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": topology}


def _exclude(affinity: Manifest, nodes: tuple[str, ...]) -> Manifest:
    """Return a node ``affinity`` that excludes ``nodes`` in each of its terms, any of which may hold."""
    required = affinity.get(REQUIRED) or {}
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), _others(nodes)]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    return {**affinity, REQUIRED: {**required, "nodeSelectorTerms": terms}}


def _avoid(affinity: Manifest, nodes: tuple[str, ...]) -> Manifest:
    """Return a node ``affinity`` that prefers other nodes than ``nodes``."""
    term = {"weight": 100, "preference": {"matchExpressions": [_others(nodes)]}}
    return {**affinity, _PREFERRED: [*(affinity.get(_PREFERRED) or []), term]}


def _others(nodes: tuple[str, ...]) -> Manifest:
    return {"key": names.HOSTNAME, "operator": "NotIn", "values": sorted(nodes)}
