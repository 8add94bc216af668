"""The Kubernetes objects of a job, as pure functions."""

from __future__ import annotations

from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.config_map import config_map
from fluxtrain_operator.resources.disruption import disruption_budget
from fluxtrain_operator.resources.gang import Gang, gang_of
from fluxtrain_operator.resources.network_policy import network_policy
from fluxtrain_operator.resources.pods import Slot, rendezvous_pod, training_pod
from fluxtrain_operator.resources.secret import key_secret
from fluxtrain_operator.resources.services import headless_service

__all__ = ["Slot", "desired", "key_secret", "rendezvous_pod", "supporting", "training_pod"]


def desired(job: Job) -> list[Manifest]:
    """Return all objects of a new ``job``, in the order in which they are created."""
    pods = [training_pod(job, Slot(index)) for index in range(job.spec.nodes.max)]
    return [*supporting(job, gang_of(job)), key_secret(job), rendezvous_pod(job), *pods]


def supporting(job: Job, gang: Gang) -> list[Manifest]:
    """Return all objects of ``job`` but its pods. Never raises TemplateError."""
    manifests = [
        config_map(job),
        headless_service(job),
        network_policy(job),
        disruption_budget(job),
        *gang.objects(job),
    ]
    return [manifest for manifest in manifests if manifest is not None]
