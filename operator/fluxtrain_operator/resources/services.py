"""The headless service: DNS names of the rendezvous pod and the training pods."""

from __future__ import annotations

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import supporting_object


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
