"""The headless service: DNS names of the rendezvous pod and the training pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.process import RENDEZVOUS_PORT
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.names import digest
from fluxtrain_operator.base.settings import Destination


def headless_service(job: Job) -> Manifest:
    """Return the service; it publishes pods that are not ready, as agents resolve each other at start."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(job.name),
        "ports": [
            {"name": "rendezvous", "port": RENDEZVOUS_PORT, "protocol": "TCP"},
            {"name": "metrics", "port": job.metrics_port, "protocol": "TCP"},
        ],
    }
    return supporting_object(job, "v1", "Service", names.service(job.name), spec=spec)


_DNS_PORTS = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
_EVERY_POD: Manifest = {"namespaceSelector": {}}


def network_policy(job: Job) -> Manifest:
    """Return the policy of all pods of ``job``.

    Ranks choose their ports (RCCL, gloo, torch's store), so pods of the job reach each other at all of
    them. The port of the rendezvous is among these: nobody else reaches it.
    """
    pods = {"podSelector": {"matchLabels": names.selector(job.name)}}
    spec = {
        **pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [pods]}, _metrics(job)],
    }
    if job.network_rules.egress == "restricted":
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": _egress(job, pods)}
    name = names.network_policy(job.name)
    return supporting_object(job, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _metrics(job: Job) -> Manifest:
    rules = job.network_rules
    operator = [_EVERY_POD] if rules.operator is None else [p.manifest() for p in rules.operator]
    others = [peer.manifest() for peer in rules.metrics_from]
    peers = operator + [peer for peer in others if peer not in operator]
    return {"from": peers, "ports": [{"port": job.metrics_port, "protocol": "TCP"}]}


def _egress(job: Job, pods: Manifest) -> list[Manifest]:
    """Return the rules of egress; an empty list of peers would be all, so it becomes no rule."""
    rules = job.network_rules
    name_servers = [{"to": [peer.manifest() for peer in rules.dns], "ports": _DNS_PORTS}]
    return [
        {"to": [pods]},
        *(name_servers if rules.dns else []),
        *(_to(destination) for destination in rules.egress_to),
    ]


def _to(destination: Destination) -> Manifest:
    ports = [{"port": port, "protocol": "TCP"} for port in destination.ports]
    return {"to": [destination.manifest()], **({"ports": ports} if ports else {})}


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


def metadata(job: Job, name: str, component: str = names.TRAINER) -> Manifest:
    """Return the metadata of the object ``name``; Kubernetes deletes it with its owner, the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": names.labels(job.name, component),
        "annotations": {},
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": False,  # it needs the permission to update finalizers
            }
        ],
    }


def supporting_object(
    job: Job, version: str, kind: str, name: str, *, hashed: str = "", **content: Any
) -> Manifest:
    """Return an object of ``job``, annotated with the hash of ``hashed``; by default of the object."""
    annotated = metadata(job, name)
    manifest = {"apiVersion": version, "kind": kind, "metadata": annotated, **content}
    annotated["annotations"] = {names.ANNOTATION_APPLIED: digest(hashed or manifest)}
    return manifest


PLACEMENT = (
    *("affinity", "nodeSelector", "tolerations", "topologySpreadConstraints", "schedulerName"),
    *("schedulingGates", "priorityClassName"),
)
"""Fields of a pod's spec that are not part of the revision: where it may run, and when."""


def revision_of(job: Job, pod_templates: Mapping[str, Manifest]) -> Revision:
    """Return the revision of the spec. Raises ConfigError if no config map can hold it."""
    specs = {
        component: {key: value for key, value in pod["spec"].items() if key not in PLACEMENT}
        for component, pod in pod_templates.items()
    }
    return Revision.of(job.name, job.spec_hash, job.config_json, specs)


def revision_config_map(job: Job, revision: Revision) -> Manifest:
    name, data = revision.name, dict(revision.data)
    return supporting_object(job, "v1", "ConfigMap", name, hashed=name, immutable=True, data=data)
