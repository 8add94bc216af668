"""The disruption budget: a drain of nodes leaves an elastic job the nodes that it needs."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, stamped


def disruption_budget(job: Job) -> Manifest | None:
    """Return the budget; None for a job of fixed size, which would block every drain for ever."""
    nodes = job.spec.nodes
    if nodes.min == nodes.max:
        return None
    return stamped(
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
