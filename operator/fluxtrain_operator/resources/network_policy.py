"""The NetworkPolicy: pods of a job reach each other; the operator and Prometheus reach the metrics port."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.network_rules import Destination
from fluxtrain_operator.resources.metadata import supporting_object

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
    """Return the rule of the port with metrics, progress and members."""
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
