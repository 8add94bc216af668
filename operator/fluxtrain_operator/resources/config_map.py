"""The config map: the resolved RunConfig, as the trainer reads it."""

from __future__ import annotations

from fluxtrain.contract.launch import CONFIG_FILE
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, stamped


def config_map(job: Job) -> Manifest:
    """Return the config map.

    Its hash is that of the person's spec: another version of the operator, which may resolve a preset
    otherwise, leaves the config of a running job alone.
    """
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.config_map(job.name)),
        "data": {CONFIG_FILE: job.config_json},
    }
    return stamped(manifest, job.spec_hash)
