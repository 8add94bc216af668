"""The PodDisruptionBudget: a drain evicts no pod of an elastic job below ``nodes.min``."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, with_applied_hash


def disruption_budget(job: Job) -> Manifest | None:
    """Return the budget; None for a job of fixed size, where it would block every drain."""
    nodes = job.spec.nodes
    if nodes.min == nodes.max:
        return None
    return with_applied_hash(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(job, names.disruption_budget(job.name)),
            "spec": {
                "minAvailable": nodes.min,
                "selector": {"matchLabels": names.trainer_selector(job.name)},
            },
        }
    )
