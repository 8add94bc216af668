"""Deletions, and why pods are deleted: every deletion of a pod has a reason of this table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """A reason to delete a pod; docs/operator.md has the same table."""

    SUSPENDED = "Suspended"
    """The spec suspends the job."""
    SPEC_CHANGED = "SpecChanged"
    """The spec changed what pods run."""
    SCALED = "Scaled"
    """``nodes.max`` changed, and Kueue's group has a fixed size."""
    SCALED_DOWN = "ScaledDown"
    """There are more pods than ``nodes.max``."""
    REVISION_CHANGED = "RevisionChanged"
    """A pod is needed that the others cannot train with."""
    RESUMED = "Resumed"
    """The job is resumed before its earlier pods are gone."""
    JOB_ENDED = "JobEnded"
    """The job is complete or has failed, for example at its deadline."""
    PROGRAM_FAILED = "ProgramFailed"
    """The program failed in other pods, and all restart from the last checkpoint."""
    GROUP_ENDED = "GroupEnded"
    """Kueue evicted the group, or it has too few pods left."""
    PREVIOUS_ATTEMPT = "PreviousAttempt"
    """The pod belongs to an earlier attempt."""
    NO_PROGRESS = "NoProgress"
    """A trainer answers that the job makes no progress."""
    NODE_LOST = "NodeLost"
    """The node of the pod is lost, or its kubelet does not delete the pod."""
    UNHEALTHY_GPU = "UnhealthyGPU"
    """A GPU of the pod's node is unhealthy."""
    UNHEALTHY_NODE = "UnhealthyNode"
    """The pod's node is marked as unhealthy."""
    POD_ENDED = "PodEnded"
    """The pod has ended and steps no more."""
    UNSCHEDULABLE = "Unschedulable"
    """The pod excludes nodes for their faults and cannot be scheduled on any other."""
    LABEL_REMOVED = "LabelRemoved"
    """The pod has lost the label that the operator watches."""
    OUTDATED = "Outdated"
    """The rendezvous pod, which makes no steps, is for another spec, size, revision or restart in place."""


NODE_FAULTS = frozenset({Reason.NODE_LOST, Reason.UNHEALTHY_GPU, Reason.UNHEALTHY_NODE})
"""Inferred from what others report of nodes: limited per minute, over all jobs."""
FAULTS = NODE_FAULTS | {Reason.NO_PROGRESS}
"""Never acted on while the control plane has lost contact with most nodes."""
DISRUPTION_PERCENT = 10
"""Part of all pods that may be deleted per minute for NODE_FAULTS, unless the options say otherwise."""


@dataclass(frozen=True)
class Delete:
    """An object to delete; a pod only if it still has this ``uid``."""

    kind: str
    name: str
    uid: str = ""
    grace_seconds: int | None = None
    """None: the object's own grace period; 0: force deletion."""
    reason: Reason | None = None
    """Why a pod is deleted; None for other kinds."""
