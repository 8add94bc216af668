"""The network policy: a job's pods talk among each other, anyone may read metrics, nothing else gets in."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, stamped


def network_policy(job: Job) -> Manifest:
    """Return the policy.

    What goes out is left open: data sets and checkpoints may lie anywhere, and names must resolve.
    """
    pods = {"matchLabels": names.selector(job.name)}
    return stamped(
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
