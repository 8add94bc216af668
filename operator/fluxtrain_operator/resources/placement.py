"""Where pods run, and where they would rather: spread over nodes, within a topology, off bad nodes."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest


def trainer_affinity(job: Job, avoid: tuple[str, ...]) -> Manifest:
    """Return the affinity of a training pod.

    Spreading is a wish: pods with whole nodes of GPUs cannot share one anyway, and small jobs may.
    """
    result = _off(avoid)
    result["podAntiAffinity"] = _wish(100, names.trainer_selector(job.name), names.HOSTNAME)
    topology = job.spec.scheduling.topology
    if topology is not None:
        result["podAffinity"] = _wish(50, names.trainer_selector(job.name), topology)
    return result


def rendezvous_affinity(job: Job, avoid: tuple[str, ...]) -> Manifest:
    """Return the affinity of the rendezvous pod: a lost training node should not take it along."""
    away = _wish(100, names.trainer_selector(job.name), names.HOSTNAME)
    return {**_off(avoid), "podAntiAffinity": away}


def tolerations(job: Job) -> list[Manifest]:
    """Return the taints that the job's pods tolerate."""
    given = job.spec.scheduling.tolerations
    return [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in given]


def _wish(weight: int, labels: dict[str, str], topology: str) -> Manifest:
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": topology}
    preferred = [{"weight": weight, "podAffinityTerm": term}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}


def _off(nodes: tuple[str, ...]) -> Manifest:
    if not nodes:
        return {}
    expression = {"key": names.HOSTNAME, "operator": "NotIn", "values": sorted(nodes)}
    term = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}
