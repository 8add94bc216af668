"""The fields of a pod that the cache keeps: those in use, a tenth of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Manifest = Mapping[str, Any]

_METADATA = (
    *("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"),
    *("deletionGracePeriodSeconds", "labels", "annotations", "finalizers", "ownerReferences"),
)
_STATUS = ("phase", "reason", "message", "podIP", "conditions", "containerStatuses")
_CONDITION = ("type", "status", "reason", "message")
_CONTAINER = ("name", "state")
"""Fields that are kept of a pod's metadata, of its status, of a condition and of a container status."""


def trimmed(pod: Manifest) -> Manifest:
    """Return the fields of a pod that ``Pod.from_object`` reads."""
    gates = pod.get("spec", {}).get("schedulingGates")
    spec = {"nodeName": node_of(pod), **({"schedulingGates": gates} if gates else {})}
    kind = {"kind": pod["kind"]} if "kind" in pod else {}
    status = {"status": _trimmed_status(pod["status"])} if "status" in pod else {}
    return {**kind, "metadata": _only(pod["metadata"], _METADATA), "spec": spec, **status}


def _trimmed_status(status: Manifest) -> Manifest:
    trimmed: dict[str, Any] = _only(status, _STATUS)
    for key, fields in (("conditions", _CONDITION), ("containerStatuses", _CONTAINER)):
        if isinstance(items := trimmed.get(key), list):
            trimmed[key] = [_only(item, fields) for item in items]
    return trimmed


def _only(value: Any, keys: tuple[str, ...]) -> Any:
    """Return the entries of a mapping with ``keys``; any other value unchanged."""
    return {k: value[k] for k in keys if k in value} if isinstance(value, Mapping) else value


def node_of(pod: Manifest) -> str:
    """Return the name of the node of ``pod``; empty if it is not scheduled."""
    return str(pod.get("spec", {}).get("nodeName") or "")
