"""spec.podTemplate, merged into the pods last; the contract has refused what is not a person's to set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.errors import TemplateError
from fluxtrain_operator.job import Manifest

_AT = "spec.podTemplate"
_KEYS = {  # how the items of a list are told apart; other lists are replaced as a whole
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ports": "containerPort",
}
_KINDS: dict[type, str] = {dict: "a mapping", list: "a list", str: "text", int: "a whole number"}
_ONE_SOURCE = (
    "env",
    "volumes",
)  # an item's value comes from one of its fields; another one replaces it
_APPENDED = ("tolerations", "schedulingGates", "topologySpreadConstraints")
_SHARED_SPEC = (  # what the rendezvous pod takes over; not what sizes or places training pods
    "volumes", "imagePullSecrets", "securityContext", "serviceAccountName", "runtimeClassName",
    "tolerations", "dnsConfig", "dnsPolicy", "hostAliases",
)  # fmt: skip
_OF_TRAINING_PODS = ("shm", "tmp")
"""Volumes whose other source is for training pods alone: a claim may hold this pod to their node."""
_SHARED_CONTAINER = ("env", "envFrom", "volumeMounts", "imagePullPolicy", "securityContext")


def check(template: Any, path: str = _AT, key: str = "") -> None:
    """Raise TemplateError, with the path, for an item that does not say which one of its list it is."""
    if isinstance(template, dict):
        for name, value in template.items():
            check(value, f"{path}.{name}", name)
    elif isinstance(template, list) and key in _KEYS:
        for number, item in enumerate(template):
            at, named = f"{path}[{number}]", _KEYS[key]
            if not isinstance(item, dict) or not isinstance(item.get(named), str | int):
                raise TemplateError(at, item, f"must be a mapping with {named}")
            check(item, at)


def override_trainer(pod: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return ``pod`` with ``template`` merged in; TemplateError with the path of what no pod has."""
    return _clean(_merge(pod, template, _AT))


def override_rendezvous(pod: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return the rendezvous ``pod`` with what of ``template`` concerns every pod of the job."""
    spec = template.get("spec", {})
    shared = {key: spec[key] for key in _SHARED_SPEC if key in spec}
    if "volumes" in shared:
        shared["volumes"] = [v for v in shared["volumes"] if v["name"] not in _OF_TRAINING_PODS]
    mains = (c for c in spec.get("containers", []) if c["name"] == names.TRAINER)
    main = next(mains, Manifest())
    taken = {key: main[key] for key in _SHARED_CONTAINER if key in main}
    shared["containers"] = [{"name": names.RENDEZVOUS, **taken}]
    kept = {key: value for key, value in template.items() if key == "metadata"}
    return _clean(_merge(pod, {**kept, "spec": shared}, _AT))


def _merge(base: Any, over: Any, path: str, key: str = "") -> Any:
    """Return ``over`` laid on ``base`` as Kubernetes' strategic merge does for pods.

    What the base has not is not copied: all pods of a job share it, and nobody changes a manifest.
    """
    if base is None:
        return over
    if type(base) is not type(over):
        raise TemplateError(path, over, f"must be {_KINDS.get(type(base), 'of another kind')}")
    if isinstance(over, dict):
        merged = dict(base)
        for name, value in over.items():
            known = name in merged
            merged[name] = _merge(merged[name], value, f"{path}.{name}", name) if known else value
        return merged
    if isinstance(over, list) and key in _KEYS:
        return _merge_items(base, over, path, key)
    if isinstance(over, list) and key in _APPENDED:
        return [*base, *over]
    return over


def _merge_items(base: list[Any], over: list[Any], path: str, named: str) -> list[Any]:
    key = _KEYS[named]
    merged = {item[key]: item for item in base}
    for number, item in enumerate(over):
        old = merged.get(item[key])
        replaced = old and named in _ONE_SOURCE and not (set(old) & set(item)) - {key}
        merged[item[key]] = _merge(None if replaced else old, item, f"{path}[{number}]")
    return list(merged.values())


def _clean(pod: Manifest) -> Manifest:
    """Return ``pod`` without the mappings and lists that say nothing."""
    spec = {key: value for key, value in pod["spec"].items() if value not in ({}, [])}
    containers = [
        {key: value for key, value in container.items() if value not in ({}, [])}
        for container in spec["containers"]
    ]
    return {**pod, "spec": {**spec, "containers": containers}}
