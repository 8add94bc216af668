"""Metadata of the objects of a job: labels, owner reference, and the applied hash."""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION
from fluxtrain_operator import names
from fluxtrain_operator.digest import digest
from fluxtrain_operator.job import Job, Manifest


def metadata(job: Job, name: str, component: str = names.TRAINER) -> Manifest:
    """Return the metadata of the object ``name``; Kubernetes deletes it with its owner, the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": names.labels(job.name, component),
        "annotations": {},
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": False,  # it needs the permission to update finalizers
            }
        ],
    }


def supporting_object(
    job: Job, version: str, kind: str, name: str, *, hashed: str = "", **content: Any
) -> Manifest:
    """Return an object of ``job``, annotated with the hash of ``hashed``; by default of the object."""
    annotated = metadata(job, name)
    manifest = {"apiVersion": version, "kind": kind, "metadata": annotated, **content}
    annotated["annotations"] = {names.ANNOTATION_APPLIED: digest(hashed or manifest)}
    return manifest
