"""The fields of listed and watched objects that are read: decoding only these takes a quarter of the time.

Labels and annotations are those of a pod's creation, as far as its name and spec tell them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import GenericAlias
from typing import Any, TypedDict

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator.base import names
from fluxtrain_operator.planner.observed import controller_of
from fluxtrain_operator.resources.environment import NODES, RUN_ID
from fluxtrain_operator.resources.pods import ENDED_ARGUMENT, NODES_ARGUMENT
from fluxtrain_operator.resources.volumes import CONFIG_VOLUME

Manifest = Mapping[str, Any]


def _kept(fields: Any) -> Any:
    """Return the type of ``fields``: a TypedDict of a mapping's, a list of a list's item."""
    if isinstance(fields, list):
        return GenericAlias(list, (_kept(fields[0]),))
    if not isinstance(fields, dict):
        return fields
    kept = {name: _kept(of) for name, of in fields.items()}
    return TypedDict("Kept", kept, total=False)  # type: ignore[operator]


_METADATA: dict[str, Any] = {
    **dict.fromkeys(("name", "namespace", "uid", "resourceVersion"), str),
    **dict.fromkeys(("creationTimestamp", "labels", "annotations", "ownerReferences"), Any),
}
ObjectFields = _kept(
    {"kind": str, "metadata": _METADATA, "status": {"phase": Any, "conditions": Any}}
)
"""What is read of a supporting object; the status is that of a pod group."""
NodeFields = _kept(
    {
        "metadata": _METADATA,
        "spec": {"unschedulable": Any, "taints": Any},
        "status": {"conditions": Any, "capacity": Any},
    }
)
"""What ``NodeView.from_object`` reads: not its images, the longest part."""
_CONTAINERS = [{"name": Any, "state": Any}]
_POD: dict[str, Any] = {
    "kind": str,
    "metadata": {
        **_METADATA,
        **dict.fromkeys(("deletionTimestamp", "deletionGracePeriodSeconds", "finalizers"), Any),
    },
    "spec": {
        "containers": [
            {
                **dict.fromkeys(("name", "args", "livenessProbe", "startupProbe"), Any),
                "env": [{"name": Any, "value": Any}],
            }
        ],
        "volumes": [{"name": Any, "configMap": Any}],
        "nodeName": str,
        "schedulingGates": Any,
    },
    "status": {
        **dict.fromkeys(("phase", "reason", "message", "podIP"), Any),
        "conditions": [dict.fromkeys(("type", "status", "reason", "message"), Any)],
        "initContainerStatuses": _CONTAINERS,
        "containerStatuses": _CONTAINERS,
    },
}
PodFields = _kept(_POD)
"""What ``Pod.from_object`` reads; of containers what shows the labels of the pod's creation."""


def trimmed(pod: Manifest) -> Manifest:
    """Return the fields of a pod that ``Pod.from_object`` reads, and the keys of its changed labels."""
    gates = pod.get("spec", {}).get("schedulingGates")
    spec = {"nodeName": node_of(pod), **({"schedulingGates": gates} if gates else {})}
    kind = {"kind": pod["kind"]} if "kind" in pod else {}
    status = {"status": _trimmed_status(pod["status"])} if "status" in pod else {}
    labels = created_labels(pod)
    changed = [key for key, value in labels.items() if label(pod, key) != value]
    metadata = {
        **_only(pod["metadata"], _POD["metadata"]),
        "labels": {**(pod["metadata"].get("labels") or {}), **labels},
        "annotations": {**(pod["metadata"].get("annotations") or {}), **created_annotations(pod)},
    }
    shown: dict[str, Any] = {"changedLabels": changed} if changed else {}
    if pod.get("hasProbe") or _has_probe(pod):
        shown["hasProbe"] = True
    return {**kind, "metadata": metadata, "spec": spec, **status, **shown}


def _has_probe(pod: Manifest) -> bool:
    """Return whether the kubelet ends the main container if a probe of it fails."""
    component = label(pod, names.LABEL_COMPONENT) or created_labels(pod).get(names.LABEL_COMPONENT)
    main = _container(pod, component or "")
    return bool(main.get("livenessProbe") or main.get("startupProbe"))


def _trimmed_status(status: Manifest) -> Manifest:
    trimmed: dict[str, Any] = _only(status, _POD["status"])
    for key, fields in _POD["status"].items():
        if isinstance(fields, list) and isinstance(items := trimmed.get(key), list):
            trimmed[key] = [_only(item, fields[0]) for item in items]
    return trimmed


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


# Labels and annotations of a job's pod as it was created, from its name and spec.
#
# Whoever may patch pods can change labels and annotations later, but neither name nor spec.
# Decisions rest on what cannot be changed; what name and spec do not tell, such as those of other
# operators, stays as it is.


def job_of(pod: Manifest) -> str | None:
    """Return the name of the job that created ``pod``; None if none did."""
    job, component, _ = _place(pod)
    return job if component else None


def created_labels(pod: Manifest) -> dict[str, str]:
    """Return the labels that name and spec tell; none of a pod that no job has created."""
    job, component, index = _place(pod)
    if not component:
        return {}
    labels = {names.LABEL_JOB: job, names.LABEL_COMPONENT: component}
    if component == names.RENDEZVOUS:
        return labels
    attempt = (_variable(pod, RUN_ID) or "").rpartition("-")[2]
    return labels | {
        names.LABEL_INDEX: index,
        **({names.LABEL_ATTEMPT: attempt} if attempt.isdecimal() else {}),
    }


def created_annotations(pod: Manifest) -> dict[str, str]:
    """Return the annotations that the spec shows; none of a pod that no job has created."""
    _, component, _ = _place(pod)
    if component == names.RENDEZVOUS:
        shown = {
            names.ANNOTATION_NODES: _argument(pod, NODES_ARGUMENT),
            names.ANNOTATION_ENDED: _argument(pod, ENDED_ARGUMENT),
        }
    elif component == names.TRAINER:
        shown = {
            names.ANNOTATION_NODES: _variable(pod, NODES),
            names.ANNOTATION_REVISION: _config_map(pod),
        }
    else:
        shown = {}
    return {key: value for key, value in shown.items() if value is not None}


def _place(pod: Manifest) -> tuple[str, str, str]:
    """Return job, component and index of ``pod``, the latter two empty if its name is none of that job's."""
    owner, name = controller_of(pod), str(pod["metadata"].get("name", ""))
    job, (_, _, index) = str(owner.get("name", "")), name.rpartition("-")
    if owner.get("kind") != KIND or not job:
        return job, "", ""
    if names.is_rendezvous(job, name):
        return job, names.RENDEZVOUS, ""
    is_training = index.isdecimal() and name == names.pod(job, int(index))
    return job, names.TRAINER if is_training else "", index


def _variable(pod: Manifest, name: str) -> str | None:
    """Return the value of a variable of the training container, the last one of that name; None without."""
    variables = reversed(_container(pod, names.TRAINER).get("env") or [])
    return next(
        (str(v["value"]) for v in variables if v.get("name") == name and "value" in v), None
    )


def _argument(pod: Manifest, key: str) -> str | None:
    """Return the value of the argument ``key`` of the rendezvous service; None if it has none."""
    arguments: list[str] = _container(pod, names.RENDEZVOUS).get("args") or []
    return next((a.removeprefix(key) for a in arguments if a.startswith(key)), None)


def _config_map(pod: Manifest) -> str | None:
    """Return the name of the config map that is mounted as the config; None if there is none."""
    volumes = (v for v in _items(pod, "volumes") if v.get("name") == CONFIG_VOLUME)
    volume = next(volumes, {})
    return (volume.get("configMap") or {}).get("name")


def _container(pod: Manifest, name: str) -> Mapping[str, Any]:
    containers = (c for c in _items(pod, "containers") if c.get("name") == name)
    return next(containers, {})


def _items(pod: Manifest, key: str) -> Iterator[Mapping[str, Any]]:
    yield from (pod.get("spec") or {}).get(key) or []
