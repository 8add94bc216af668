"""Why an object of a job cannot be made: its name is taken, or the API server refuses it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.planner.owners import controller

NAME_CONFLICT, LEAVING = "NameConflict", "PredecessorLeaving"
_LEAVING_SECONDS = 2.0
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 60.0
_REFUSALS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
_WEBHOOK = ("admission webhook", "failed calling webhook")  # these answer with a code of their own
_REASONS = {"quota": "QuotaExceeded", "violates PodSecurity": "PodSecurity"}
_WAY_OUT = "delete or rename it, or give the job another name"


@dataclass(frozen=True)
class Blocker:
    """What keeps one object of a job from being made."""

    kind: str
    name: str
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people."""
    due: float = math.inf
    """Unix time at which to try again; infinite where a watch tells that it is gone."""
    tries: int = 0
    """Tries before this one."""
    is_first: bool = False
    """Whether it is a pod that would be no replacement."""

    @property
    def is_taken(self) -> bool:
        """Return whether something else has the name; else the API server refuses."""
        return self.reason in (NAME_CONFLICT, LEAVING)

    def of(self, manifest: Mapping[str, Any]) -> Blocker:
        """Return the same as it concerns the object in ``manifest``."""
        metadata = manifest["metadata"]
        number = metadata["annotations"].get(names.ANNOTATION_REPLACEMENT)
        kind, name = manifest["kind"], metadata["name"]
        return replace(self, kind=kind, name=name, is_first=number == "0")

    def after(self, before: Blocker | None, now: float) -> Blocker:
        """Return the same as it stands ``now``, to be tried later and later where it stood ``before``."""
        tries = before.tries + 1 if before is not None and before.reason == self.reason else 0
        wait = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** min(tries, 10))
        wait = _LEAVING_SECONDS if self.reason == LEAVING else wait
        return replace(self, due=now + wait, tries=tries)


def is_refusal(error: ApiError) -> bool:
    """Return whether the API server understood a request and will not do it; all else is worth a retry."""
    return error.status in _REFUSALS or any(word in error.server_message for word in _WEBHOOK)


def refused(manifest: Mapping[str, Any], error: ApiError) -> Blocker:
    """Return the obstacle that the API server is to the object in ``manifest``."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    other = "PodsRefused" if kind == "Pod" else f"{kind}Refused"
    reason = next((r for word, r in _REASONS.items() if word in error.server_message), other)
    message = f"{kind} {metadata['name']}: {error.server_message or error}"
    return Blocker(kind, metadata["name"], reason, message).of(manifest)


def taken(kind: str, found: Mapping[str, Any], job: str) -> Blocker:
    """Return the obstacle that ``found`` is: it has a name that ``job`` needs, and is not its own.

    One that goes with an earlier job of the same name only needs some time.
    """
    metadata, owner = found["metadata"], controller(found)
    name, whose = metadata["name"], (owner.get("kind"), owner.get("name"))
    if whose == (KIND, job) or "deletionTimestamp" in metadata:
        text = f"{kind} {name} is still there, and about to go"
        return Blocker(kind, name, LEAVING, text)
    ours = (metadata.get("labels") or {}).get(names.LABEL_JOB) == job
    said = " ".join(map(str, whose)) if owner else "nobody"
    said = f"{said}: an earlier job left it" if ours and not owner else said
    text = f"{kind} {name} is in the way, and belongs to {said}; {_WAY_OUT}"
    return Blocker(kind, name, NAME_CONFLICT, text)
