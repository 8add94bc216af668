"""The secret with the key that signs the messages between agents and the rendezvous service of a job."""

from __future__ import annotations

import secrets

from fluxtrain.contract.resource.pod_template import KEY_VOLUME
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata

KEY_FILE = "key"
KEY_PATH = "/etc/fluxtrain/rendezvous"
"""Mount path in the pods of the job."""


def key_secret(job: Job) -> Manifest:
    """Return the secret without its key, which is drawn when it is created.

    The operator may create secrets, but not read them: an existing one is kept. It is not immutable: kubelets
    would not notice that it was deleted and created again.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, names.rendezvous_key(job.name, job.uid), names.RENDEZVOUS),
        "type": "Opaque",
    }


def with_new_key(manifest: Manifest) -> Manifest:
    """Return the secret ``manifest`` with a new random key of 256 bits."""
    return {**manifest, "stringData": {KEY_FILE: secrets.token_hex(32)}}


def key_volume(job: Job) -> Manifest:
    """Return the volume with the key."""
    name = names.rendezvous_key(job.name, job.uid)
    return {"name": KEY_VOLUME, "secret": {"secretName": name, "defaultMode": 0o440}}


def key_mount() -> Manifest:
    """Return the mount of `key_volume`."""
    return {"name": KEY_VOLUME, "mountPath": KEY_PATH, "readOnly": True}
