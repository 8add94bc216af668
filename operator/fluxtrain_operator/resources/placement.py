"""Affinity and tolerations of the pods."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest


def trainer_affinity(job: Job, excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    """Return the affinity of a training pod: not on ``excluded`` nodes, rather not on ``avoided`` ones.

    Spreading over nodes is preferred, not required: pods of small jobs may share a node.
    """
    scheduling, pods = job.spec.scheduling, names.trainer_selector(job.name)
    affinity: Manifest = {}
    if scheduling.topology is not None:
        affinity |= _preferred(50, pods, scheduling.topology)
    if scheduling.required_topology is not None:
        term = _term(pods, scheduling.required_topology)
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = [term]
    result = rendezvous_affinity(job, excluded, avoided)
    return {**result, "podAffinity": affinity} if affinity else result


def rendezvous_affinity(job: Job, excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    """Return the affinity of the rendezvous pod, which prefers nodes without training pods."""
    anti_affinity = _preferred(100, names.trainer_selector(job.name), names.HOSTNAME)
    return {**_not_on(excluded, avoided), "podAntiAffinity": anti_affinity}


def tolerations_of(job: Job) -> list[Manifest]:
    """Return the tolerations of the job's pods: the operator's ``podDefaults`` and the job's own."""
    defaults, own = job.pod_defaults.tolerations, job.spec.scheduling.tolerations
    tolerations = [*(t for t in defaults if t not in own), *own]
    return [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in tolerations]


def node_selector_of(job: Job) -> dict[str, str]:
    """Return the node selector of the training pods; the job's values win over ``podDefaults``."""
    return {**job.pod_defaults.node_selector, **job.spec.scheduling.node_selector}


def _preferred(weight: int, labels: dict[str, str], topology: str) -> Manifest:
    terms = [{"weight": weight, "podAffinityTerm": _term(labels, topology)}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": terms}


def _term(labels: dict[str, str], topology: str) -> Manifest:
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": topology}


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
