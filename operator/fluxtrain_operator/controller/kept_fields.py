"""The fields of listed and watched objects that are read: decoding only these takes a quarter of the time.

Labels and annotations are those of a pod's creation, as far as its name and spec tell them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from fluxtrain_operator.controller.creation import created_annotations, created_labels

Manifest = Mapping[str, Any]


class ObjectMetadata(TypedDict, total=False):
    """What is read of the metadata of nodes and supporting objects."""

    name: str
    namespace: str
    uid: str
    resourceVersion: str
    creationTimestamp: Any
    labels: Any
    annotations: Any
    ownerReferences: Any


class ObjectFields(TypedDict, total=False):
    """What is read of a supporting object."""

    kind: str
    metadata: ObjectMetadata


class NodeSpec(TypedDict, total=False):
    """What is read of a node's spec."""

    unschedulable: Any
    taints: Any


class NodeStatus(TypedDict, total=False):
    """What is read of a node's status: not its images, the longest part."""

    conditions: Any
    capacity: Any


class NodeFields(TypedDict, total=False):
    """What ``NodeView.from_object`` reads."""

    metadata: ObjectMetadata
    spec: NodeSpec
    status: NodeStatus


class PodMetadata(ObjectMetadata, total=False):
    """What is read of a pod's metadata."""

    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any
    finalizers: Any


class Variable(TypedDict, total=False):
    """What is read of an environment variable."""

    name: Any
    value: Any


class Container(TypedDict, total=False):
    """What is read of a container: what tells the labels of its pod's creation."""

    name: Any
    env: list[Variable]
    args: Any


class Volume(TypedDict, total=False):
    """What is read of a volume."""

    name: Any
    configMap: Any


class PodSpec(TypedDict, total=False):
    """What is read of a pod's spec."""

    containers: list[Container]
    volumes: list[Volume]

    nodeName: str
    schedulingGates: Any


class PodCondition(TypedDict, total=False):
    """What is read of a pod's condition."""

    type: Any
    status: Any
    reason: Any
    message: Any


class ContainerStatus(TypedDict, total=False):
    """What is read of a container's status."""

    name: Any
    state: Any


class PodStatus(TypedDict, total=False):
    """What is read of a pod's status."""

    phase: Any
    reason: Any
    message: Any
    podIP: Any
    conditions: list[PodCondition]
    initContainerStatuses: list[ContainerStatus]
    containerStatuses: list[ContainerStatus]


class PodFields(TypedDict, total=False):
    """What ``Pod.from_object`` reads."""

    kind: str
    metadata: PodMetadata
    spec: PodSpec
    status: PodStatus


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
    for key, fields in _LISTS:
        if isinstance(items := trimmed.get(key), list):
            trimmed[key] = [_only(item, fields) for item in items]
    return trimmed


_METADATA, _STATUS, _CONDITION, _CONTAINER = (
    tuple(fields.__annotations__)
    for fields in (PodMetadata, PodStatus, PodCondition, ContainerStatus)
)

_LISTS = (
    ("conditions", _CONDITION),
    ("initContainerStatuses", _CONTAINER),
    ("containerStatuses", _CONTAINER),
)


def _only(value: Any, keys: Iterable[str]) -> Any:
    """Return the entries of a mapping with ``keys``; any other value unchanged."""
    return {k: value[k] for k in keys if k in value} if isinstance(value, Mapping) else value


def label(pod: Manifest, key: str) -> str | None:
    """Return the present value of a label of ``pod``; None if it has none."""
    value = (pod["metadata"].get("labels") or {}).get(key)
    return None if value is None else str(value)


def node_of(pod: Manifest) -> str:
    """Return the name of the node of ``pod``; empty if it is not scheduled."""
    return str(pod.get("spec", {}).get("nodeName") or "")
