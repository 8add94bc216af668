"""What every object of a job carries: labels, its owner, and the hash of what was wanted."""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest, digest


def metadata(job: Job, name: str, component: str = names.TRAINER) -> Manifest:
    """Return the metadata of an object called ``name``."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": names.labels(job.name, component),
        "annotations": {},
        "ownerReferences": [owner(job)],
    }


def owner(job: Job) -> Manifest:
    """Return the reference by which Kubernetes deletes the object with its job.

    It does not block the job's deletion: that would need the right to write finalizers.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def stamped(manifest: Manifest, content: Any = None) -> Manifest:
    """Return ``manifest`` with the hash of itself, or of ``content``, in its annotations."""
    hashed = digest(manifest if content is None else content)
    notes = {**manifest["metadata"]["annotations"], names.ANNOTATION_APPLIED: hashed}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": notes}}
