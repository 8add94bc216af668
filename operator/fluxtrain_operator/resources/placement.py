"""Affinity and tolerations of the pods."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest


def trainer_affinity(job: Job, excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    """Return the affinity of a training pod: not on ``excluded`` nodes, rather not on ``avoided`` ones.

    Spreading over nodes is preferred, not required: pods of small jobs may share a node.
    """
    result, topology = rendezvous_affinity(job, excluded, avoided), job.spec.scheduling.topology
    if topology is not None:
        result["podAffinity"] = _preferred(50, names.trainer_selector(job.name), topology)
    return result


def rendezvous_affinity(job: Job, excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    """Return the affinity of the rendezvous pod, which prefers nodes without training pods."""
    anti_affinity = _preferred(100, names.trainer_selector(job.name), names.HOSTNAME)
    return {**_not_on(excluded, avoided), "podAntiAffinity": anti_affinity}


def tolerations_of(job: Job) -> list[Manifest]:
    """Return the tolerations of the job's pods."""
    tolerations = job.spec.scheduling.tolerations
    return [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in tolerations]


def _preferred(weight: int, labels: dict[str, str], topology: str) -> Manifest:
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": topology}
    terms = [{"weight": weight, "podAffinityTerm": term}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": terms}


def _not_on(excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    affinity: Manifest = {}
    if excluded:
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [_others(excluded)]
        }
    if avoided:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": _others(avoided)}
        ]
    return {"nodeAffinity": affinity} if affinity else {}


def _others(nodes: tuple[str, ...]) -> Manifest:
    expression = {"key": names.HOSTNAME, "operator": "NotIn", "values": sorted(nodes)}
    return {"matchExpressions": [expression]}
