"""Why an object of a job cannot be created: its name is in use, or the API server rejects it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.mappings import items, mapping
from fluxtrain_operator.planner.owner_references import controller_of

NAME_CONFLICT, TERMINATING = "NameConflict", "PredecessorTerminating"
LABEL_REMOVED = "LabelRemoved"
PREDECESSOR_KEPT = "PredecessorKept"
_TERMINATING_SECONDS = 2.0
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 5.0, 60.0
_REJECTIONS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
_WEBHOOK = ("admission webhook", "failed calling webhook")  # webhooks choose their own status code
_REASONS = {"quota": "QuotaExceeded", "violates PodSecurity": "PodSecurity"}
_BRIEF_FINALIZERS = (names.KUEUE_FINALIZER, "foregroundDeletion", "orphan")
"""Of Kueue and of the garbage collector, which remove them themselves."""
_REMEDY = "delete or rename it, or give the job another name"


@dataclass(frozen=True)
class CreateFailure:
    """Why one object of a job cannot be created."""

    kind: str
    name: str
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people."""
    retry_time: float = math.inf
    """Unix time; infinite if a watch reports when the name is free."""
    retries: int = 0
    is_initial: bool = False
    """Whether it is a pod that replaces no other."""
    uid: str = ""
    """Uid of the job's own pod that has the name and must be deleted; empty for objects of others."""

    @property
    def is_name_conflict(self) -> bool:
        """Return whether another object has the name; else the API server rejects the object."""
        return self.reason in (NAME_CONFLICT, TERMINATING, LABEL_REMOVED, PREDECESSOR_KEPT)

    def for_object(self, manifest: Mapping[str, Any]) -> CreateFailure:
        """Return the same failure of the object in ``manifest``."""
        metadata = manifest["metadata"]
        number = metadata["annotations"].get(names.ANNOTATION_REPLACEMENT)
        kind, name = manifest["kind"], metadata["name"]
        return replace(self, kind=kind, name=name, is_initial=number == "0")

    def with_backoff(self, before: CreateFailure | None, now: float) -> CreateFailure:
        """Return the failure with its retry time, later each time after the same failure ``before``."""
        retries = before.retries + 1 if before is not None and before.reason == self.reason else 0
        wait = min(_MAX_BACKOFF_SECONDS, _MIN_BACKOFF_SECONDS * 2.0 ** min(retries, 10))
        wait = _TERMINATING_SECONDS if self.reason == TERMINATING else wait
        return replace(self, retry_time=now + wait, retries=retries)


def is_rejection(error: ApiError) -> bool:
    """Return whether the API server rejected the object itself; other errors are temporary."""
    return error.status in _REJECTIONS or any(text in error.server_message for text in _WEBHOOK)


def rejected(manifest: Mapping[str, Any], error: ApiError) -> CreateFailure:
    """Return the failure of an object that the API server rejects with ``error``."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    default = "PodsRefused" if kind == "Pod" else f"{kind}Refused"
    reason = next((r for text, r in _REASONS.items() if text in error.server_message), default)
    message = f"{kind} {metadata['name']}: {error.server_message or error}"
    return CreateFailure(kind, metadata["name"], reason, message).for_object(manifest)


def unwatched(existing: Mapping[str, Any]) -> CreateFailure | None:
    """Return the failure that a job's own pod causes which its watch cannot find; None if it can."""
    metadata = existing["metadata"]
    if (metadata.get("labels") or {}).get(names.LABEL_MANAGED_BY) == names.FIELD_MANAGER:
        return None
    name, label = metadata["name"], f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
    if "deletionTimestamp" in metadata:
        message = f"Pod {name}, which has lost its label {label}, is being deleted"
        return CreateFailure("Pod", name, TERMINATING, message)
    message = f"Pod {name} has lost its label {label} and is replaced"
    return CreateFailure("Pod", name, LABEL_REMOVED, message, uid=str(metadata.get("uid", "")))


def name_conflict(kind: str, existing: Mapping[str, Any], job: str) -> CreateFailure:
    """Return the failure that ``existing`` causes: it has a name that ``job`` needs.

    An object of a deleted job with the same name is about to be garbage collected.
    """
    metadata, owner = existing["metadata"], controller_of(existing)
    name, controller = metadata["name"], (owner.get("kind"), owner.get("name"))
    if finalizers := _keeping_finalizers(existing):
        message = f"{kind} {name} is deleted, and kept by {', '.join(finalizers)}"
        return CreateFailure(kind, name, PREDECESSOR_KEPT, message)
    if controller == (KIND, job) or "deletionTimestamp" in metadata:
        message = f"{kind} {name} of an earlier job is being deleted"
        return CreateFailure(kind, name, TERMINATING, message)
    has_label = (metadata.get("labels") or {}).get(names.LABEL_JOB) == job
    state = f"belongs to {' '.join(map(str, controller))}" if owner else "has no owner"
    if has_label and not owner:
        state = f"{state}: an earlier job left it"
    message = f"{kind} {name} already exists and {state}; {_REMEDY}"
    return CreateFailure(kind, name, NAME_CONFLICT, message)


def _keeping_finalizers(existing: Mapping[str, Any]) -> list[str]:
    """Return the finalizers of others that keep a deleted object; none of a pod that may still run."""
    metadata = existing["metadata"]
    phase, node = (
        mapping(existing, "status").get("phase"),
        mapping(existing, "spec").get("nodeName"),
    )
    runs = existing.get("kind", "Pod") == "Pod" and node and phase not in ("Succeeded", "Failed")
    if "deletionTimestamp" not in metadata or runs:
        return []
    return [str(name) for name in items(metadata, "finalizers") if name not in _BRIEF_FINALIZERS]
