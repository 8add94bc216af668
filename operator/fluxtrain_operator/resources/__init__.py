"""The Kubernetes objects of a job, as pure functions."""

from __future__ import annotations

from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.resources.pods import (
    Slot,
    pod_templates,
    rendezvous_pod,
    training_pod,
)
from fluxtrain_operator.resources.scheduling import Gang, gang_of
from fluxtrain_operator.resources.support import (
    DISRUPTION_BUDGET,
    disruption_budget,
    headless_service,
    network_policy,
    revision_config_map,
    revision_of,
)
from fluxtrain_operator.resources.volumes import key_secret

__all__ = [
    "DISRUPTION_BUDGET",
    "Slot",
    "desired",
    "key_secret",
    "pod_templates",
    "rendezvous_pod",
    "revision_of",
    "supporting",
    "training_pod",
]


def desired(job: Job) -> list[Manifest]:
    """Return all objects of a new ``job``, in the order in which they are created."""
    pods = [training_pod(job, Slot(index)) for index in range(job.spec.nodes.max)]
    support = supporting(job, gang_of(job), job.spec_revision)
    return [*support, key_secret(job), rendezvous_pod(job), *pods]


def supporting(job: Job, gang: Gang, revision: Revision) -> list[Manifest]:
    """Return all objects of ``job`` but its pods. Never raises TemplateError."""
    manifests = [
        revision_config_map(job, revision),
        headless_service(job),
        network_policy(job),
        disruption_budget(job),
        *gang.objects(job),
    ]
    return [manifest for manifest in manifests if manifest is not None]
