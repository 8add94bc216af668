"""Queueing: Kueue admits all pods of an attempt together, as one pod group."""

from __future__ import annotations

from typing import Protocol

from fluxtrain.contract.resource.fluxtraining import Scheduling
from fluxtrain_operator import names
from fluxtrain_operator.job import Job


class PodState(Protocol):
    """What queueing reads of an observed pod."""

    @property
    def finalizers(self) -> tuple[str, ...]:
        """Return its finalizers."""

    @property
    def gates(self) -> tuple[str, ...]:
        """Return its scheduling gates."""

    @property
    def deleting(self) -> bool:
        """Return whether it has a deletion timestamp."""

    @property
    def ended(self) -> bool:
        """Return whether its main process has exited."""

    @property
    def node(self) -> str:
        """Return the name of its node; empty if it is not scheduled."""


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

    def pod_annotations(self, job: Job) -> dict[str, str]:
        """Return the annotations of a training pod."""
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
        """Return the queue and the pod group."""
        return {
            names.KUEUE_QUEUE: str(job.spec.scheduling.queue_name),
            names.KUEUE_GROUP: names.kueue_group(job.name, group),
        }

    def pod_annotations(self, job: Job) -> dict[str, str]:
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
        return {**notes, **_topology(job.spec.scheduling)}

    def fits(self, started_max: int, nodes_max: int) -> bool:
        """Return whether the size is unchanged: a group has a fixed number of pods."""
        return started_max == nodes_max


def _topology(scheduling: Scheduling) -> dict[str, str]:
    """Return the topology that Kueue requires or prefers; it assigns nodes in the order of the index."""
    if scheduling.required_topology is not None:
        topology = {names.KUEUE_REQUIRED_TOPOLOGY: scheduling.required_topology}
    elif scheduling.topology is not None:
        topology = {names.KUEUE_PREFERRED_TOPOLOGY: scheduling.topology}
    else:
        return {}
    return {**topology, names.KUEUE_INDEX_LABEL: names.LABEL_INDEX}


_NO_QUEUE, _KUEUE = Queueing(), Kueue()


def queueing_of(job: Job) -> Queueing:
    """Return how the pods of ``job`` are queued."""
    return _NO_QUEUE if job.spec.scheduling.queue_name is None else _KUEUE
