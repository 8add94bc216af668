"""The PodDisruptionBudget: a drain evicts no pod of an elastic job below ``nodes.min``."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import supporting_object

DISRUPTION_BUDGET = "PodDisruptionBudget"


def disruption_budget(job: Job) -> Manifest | None:
    """Return the budget; None for a job of fixed size, where it would block every drain."""
    nodes = job.spec.nodes
    if nodes.min == nodes.max:
        return None
    selector = {"matchLabels": names.trainer_selector(job.name)}
    spec = {"minAvailable": nodes.min, "selector": selector}
    name = names.disruption_budget(job.name)
    return supporting_object(job, "policy/v1", DISRUPTION_BUDGET, name, spec=spec)
