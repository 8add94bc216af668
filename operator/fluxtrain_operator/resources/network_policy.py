"""The NetworkPolicy: pods of a job reach each other, all pods reach the metrics; no other ingress."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, with_applied_hash


def network_policy(job: Job) -> Manifest:
    """Return the policy.

    Egress is unrestricted: DNS, data sets and checkpoints may be anywhere.
    """
    pods = {"matchLabels": names.selector(job.name)}
    return with_applied_hash(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(job, names.network_policy(job.name)),
            "spec": {
                "podSelector": pods,
                "policyTypes": ["Ingress"],
                "ingress": [
                    {"from": [{"podSelector": pods}]},
                    {
                        "from": [{"namespaceSelector": {}}],
                        "ports": [{"port": job.metrics_port, "protocol": "TCP"}],
                    },
                ],
            },
        }
    )
