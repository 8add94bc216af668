"""Metadata of the objects of a job: labels, owner reference, and the applied hash."""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest, digest


def metadata(job: Job, name: str, component: str = names.TRAINER) -> Manifest:
    """Return the metadata of the object ``name``."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": names.labels(job.name, component),
        "annotations": {},
        "ownerReferences": [owner_reference(job)],
    }


def owner_reference(job: Job) -> Manifest:
    """Return the owner reference, by which Kubernetes deletes the object with its job.

    blockOwnerDeletion is false: it needs the permission to update finalizers.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def with_applied_hash(manifest: Manifest, content: Any = None) -> Manifest:
    """Return ``manifest`` annotated with the hash of ``content``; by default of the manifest."""
    hashed = digest(manifest if content is None else content)
    notes = {**manifest["metadata"]["annotations"], names.ANNOTATION_APPLIED: hashed}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": notes}}
