"""Affinity and tolerations of the pods."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest

_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def trainer_affinity(job: Job) -> Manifest:
    """Return the affinity of a training pod.

    Spreading over nodes is preferred, not required: pods of small jobs may share a node.
    """
    scheduling, pods = job.spec.scheduling, names.trainer_selector(job.name)
    affinity: Manifest = {}
    if scheduling.topology is not None:
        affinity |= _preferred(50, pods, scheduling.topology)
    if scheduling.required_topology is not None:
        term = _term(pods, scheduling.required_topology)
        affinity[_REQUIRED] = [term]
    result = rendezvous_affinity(job)
    return {**result, "podAffinity": affinity} if affinity else result


def rendezvous_affinity(job: Job) -> Manifest:
    """Return the affinity of the rendezvous pod, which prefers nodes without training pods."""
    anti_affinity = _preferred(100, names.trainer_selector(job.name), names.HOSTNAME)
    return {"podAntiAffinity": anti_affinity}


def keep_off(spec: Manifest, excluded: tuple[str, ...], avoided: tuple[str, ...]) -> Manifest:
    """Return the pod ``spec`` such that it runs on no ``excluded`` node, and rather on no ``avoided`` one."""
    if not excluded and not avoided:
        return spec
    affinity = spec.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    of_nodes = _exclude(of_nodes, excluded) if excluded else of_nodes
    of_nodes = _avoid(of_nodes, avoided) if avoided else of_nodes
    return {**spec, "affinity": {**affinity, "nodeAffinity": of_nodes}}


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
    return {_PREFERRED: terms}


def _term(labels: dict[str, str], topology: str) -> Manifest:
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": topology}


def _exclude(affinity: Manifest, nodes: tuple[str, ...]) -> Manifest:
    """Return a node ``affinity`` that excludes ``nodes`` in each of its terms, any of which may hold."""
    required = affinity.get(_REQUIRED) or {}
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), _others(nodes)]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    return {**affinity, _REQUIRED: {**required, "nodeSelectorTerms": terms}}


def _avoid(affinity: Manifest, nodes: tuple[str, ...]) -> Manifest:
    """Return a node ``affinity`` that prefers other nodes than ``nodes``."""
    term = {"weight": 100, "preference": {"matchExpressions": [_others(nodes)]}}
    return {**affinity, _PREFERRED: [*(affinity.get(_PREFERRED) or []), term]}


def _others(nodes: tuple[str, ...]) -> Manifest:
    return {"key": names.HOSTNAME, "operator": "NotIn", "values": sorted(nodes)}
