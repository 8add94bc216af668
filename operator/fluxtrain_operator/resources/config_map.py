"""The config map: the resolved RunConfig, as the trainer reads it."""

from __future__ import annotations

from fluxtrain.contract.launch import CONFIG_FILE
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import supporting_object


def config_map(job: Job) -> Manifest:
    """Return the config map.

    Its hash is the spec's, so that an upgraded operator, which may resolve a preset differently, does not
    change the config of a running job.
    """
    data = {CONFIG_FILE: job.config_json}
    name = names.config_map(job.name)
    return supporting_object(job, "v1", "ConfigMap", name, hashed=job.spec_hash, data=data)
