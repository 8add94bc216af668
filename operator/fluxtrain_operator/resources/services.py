"""The headless service: DNS names for the rendezvous pod and the training pods, ready or not."""

from __future__ import annotations

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, stamped


def headless_service(job: Job) -> Manifest:
    """Return the service; agents look each other up before any of them is ready."""
    return stamped(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(job, names.service(job.name)),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": names.selector(job.name),
                "ports": [
                    {"name": "rendezvous", "port": RENDEZVOUS_PORT, "protocol": "TCP"},
                    {"name": "metrics", "port": job.metrics_port, "protocol": "TCP"},
                ],
            },
        }
    )
