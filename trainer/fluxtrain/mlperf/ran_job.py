"""The FluxTraining that ran in a cluster, beside the log that was fetched: its spec, its image by digest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fluxtrain.contract.resource.pod_template import TRAINER
from fluxtrain.errors import DataError
from fluxtrain.mlperf.chain import Head, read_heads

RAN_JOB_FILE = "job.json"
"""In the folder of a fetched run."""
_HEADS = "logHeads"
_DIGEST = "@sha256:"


def ran_job(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spec of ``job``, with the image of its ``pods`` by its digest, and its heads."""
    spec = dict(job["spec"])
    if (image := image_of(pods)) is not None:
        spec["image"] = image
    status = {name: value for name, value in job.get("status", {}).items() if name == _HEADS}
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], "spec": spec, "status": status}


def image_of(pods: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the image that the kubelets started, by its digest; None if pods are gone, or differ."""
    images = {
        str(status.get("imageID", "")).rpartition("://")[2]
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses") or ()
        if status.get("name") == TRAINER
    }
    return images.pop() if len(images) == 1 and all(map(_names_digest, images)) else None


def _names_digest(image: str) -> bool:
    """Return whether ``image`` is REPOSITORY@sha256:DIGEST; of an image without a repository it is not."""
    return _DIGEST in image


def read_ran_job(folder: Path) -> dict[str, Any] | None:
    """Return the job of a fetched run in ``folder``, None without one; raise DataError if it is damaged."""
    path = folder / RAN_JOB_FILE
    try:
        job = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if not isinstance(job, dict) or not isinstance(job.get("spec"), dict):
        raise DataError(f"{path}: is not a FluxTraining")
    return job


def heads_of_job(folder: Path) -> list[Head] | None:
    """Return the heads in the status of the job of a fetched run in ``folder``, None without any."""
    job = read_ran_job(folder)
    status = job.get("status") if job is not None else None
    has_heads = isinstance(status, dict) and status.get(_HEADS)
    return read_heads(job) if job is not None and has_heads else None
