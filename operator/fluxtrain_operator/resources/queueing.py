"""Queueing: Kueue admits all pods of an attempt together, as one pod group."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job


def pod_labels(job: Job, attempt: int) -> dict[str, str]:
    """Return the labels of a training pod: the queue and the pod group, which is that of the attempt."""
    if not _is_queued(job):
        return {}
    return {
        names.KUEUE_QUEUE: str(job.spec.scheduling.queue_name),
        names.KUEUE_GROUP: names.kueue_group(job.name, attempt),
    }


def pod_annotations(job: Job) -> dict[str, str]:
    """Return the annotations of a training pod: the group's size and how Kueue treats its pods.

    Not retriable: else Kueue keeps the names, and the quota, of ended pods until they are replaced.
    One role: else pods that exclude different nodes would belong to different pod sets.
    """
    if not _is_queued(job):
        return {}
    notes = {
        names.KUEUE_COUNT: str(job.spec.nodes.max),
        names.KUEUE_RETRIABLE: "false",
        names.KUEUE_ROLE: names.TRAINER,
    }
    topology = job.spec.scheduling.topology
    return notes if topology is None else {**notes, names.KUEUE_TOPOLOGY: topology}


def fits(job: Job, started_max: int) -> bool:
    """Return whether agents started for ``started_max`` nodes can train with ``nodes.max``.

    Agents that were started for fewer never complete a rendezvous of more. A group of Kueue has a fixed
    number of pods.
    """
    nodes_max = job.spec.nodes.max
    return started_max == nodes_max if _is_queued(job) else started_max >= nodes_max


def min_pods(job: Job, has_lost_members: bool) -> int:
    """Return the active pods below which Kueue's group has ended and the job needs another one.

    A group ends with its last pod, or below ``nodes.min`` if it cannot replace lost pods.
    """
    if not _is_queued(job):
        return 0
    return job.spec.nodes.min if has_lost_members else 1


def _is_queued(job: Job) -> bool:
    return job.spec.scheduling.queue_name is not None
