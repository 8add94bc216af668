"""The config map of a revision: immutable, and named by its content."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import supporting_object
from fluxtrain_operator.revision import Revision

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
    """Return the config map with ``revision``.

    It lacks the label of the job: an operator without revisions would delete it as superfluous.
    """
    name, data = revision.name, dict(revision.data)
    manifest = supporting_object(
        job, "v1", "ConfigMap", name, hashed=name, immutable=True, data=data
    )
    del manifest["metadata"]["labels"][names.LABEL_JOB]
    return manifest
