"""The fields of a pod that the cache keeps: those in use, a tenth of the memory.

Labels and annotations are those of its creation, as far as its name and spec tell them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain_operator.controller.creation import created_annotations, created_labels

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
    """Return the fields of a pod that ``Pod.from_object`` reads, and the keys of its changed labels."""
    gates = pod.get("spec", {}).get("schedulingGates")
    spec = {"nodeName": node_of(pod), **({"schedulingGates": gates} if gates else {})}
    kind = {"kind": pod["kind"]} if "kind" in pod else {}
    status = {"status": _trimmed_status(pod["status"])} if "status" in pod else {}
    labels = created_labels(pod)
    changed = [key for key, value in labels.items() if label(pod, key) != value]
    metadata = {
        **_only(pod["metadata"], _METADATA),
        "labels": {**(pod["metadata"].get("labels") or {}), **labels},
        "annotations": {**(pod["metadata"].get("annotations") or {}), **created_annotations(pod)},
    }
    told = {"changedLabels": changed} if changed else {}
    return {**kind, "metadata": metadata, "spec": spec, **status, **told}


def _trimmed_status(status: Manifest) -> Manifest:
    trimmed: dict[str, Any] = _only(status, _STATUS)
    for key, fields in (("conditions", _CONDITION), ("containerStatuses", _CONTAINER)):
        if isinstance(items := trimmed.get(key), list):
            trimmed[key] = [_only(item, fields) for item in items]
    return trimmed


def _only(value: Any, keys: tuple[str, ...]) -> Any:
    """Return the entries of a mapping with ``keys``; any other value unchanged."""
    return {k: value[k] for k in keys if k in value} if isinstance(value, Mapping) else value


def label(pod: Manifest, key: str) -> str | None:
    """Return the present value of a label of ``pod``; None if it has none."""
    value = (pod["metadata"].get("labels") or {}).get(key)
    return None if value is None else str(value)


def node_of(pod: Manifest) -> str:
    """Return the name of the node of ``pod``; empty if it is not scheduled."""
    return str(pod.get("spec", {}).get("nodeName") or "")
