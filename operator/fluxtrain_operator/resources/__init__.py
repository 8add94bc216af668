"""From a job to the Kubernetes objects that it needs; one kind per file, pure functions."""

from __future__ import annotations

from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.config_map import config_map
from fluxtrain_operator.resources.disruption import disruption_budget
from fluxtrain_operator.resources.network_policy import network_policy
from fluxtrain_operator.resources.pod_group import pod_groups
from fluxtrain_operator.resources.pods import Slot, rendezvous_pod, training_pod
from fluxtrain_operator.resources.services import headless_service

__all__ = ["Slot", "desired", "rendezvous_pod", "supporting", "training_pod"]


def desired(job: Job) -> list[Manifest]:
    """Return everything that a new ``job`` has, in the order in which it is created."""
    gang = job.spec.scheduling.gang
    pods = [training_pod(job, Slot(index), gang) for index in range(job.spec.nodes.max)]
    return [*supporting(job, gang), rendezvous_pod(job), *pods]


def supporting(job: Job, gang: str) -> list[Manifest]:
    """Return the objects around the pods; TemplateError never, as none of them is a pod."""
    found = [
        config_map(job),
        headless_service(job),
        network_policy(job),
        disruption_budget(job),
        *pod_groups(job, gang),
    ]
    return [manifest for manifest in found if manifest is not None]
