"""The NetworkPolicy: pods of a job reach each other, all pods reach the metrics; no other ingress."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import supporting_object


def network_policy(job: Job) -> Manifest:
    """Return the policy.

    Egress is unrestricted: DNS, data sets and checkpoints may be anywhere.
    """
    pods = {"matchLabels": names.selector(job.name)}
    metrics = {"port": job.metrics_port, "protocol": "TCP"}
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": pods}]},
            {"from": [{"namespaceSelector": {}}], "ports": [metrics]},
        ],
    }
    name = names.network_policy(job.name)
    return supporting_object(job, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)
