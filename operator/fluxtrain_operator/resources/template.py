"""Merges spec.podTemplate into the pods; the contract has rejected the fields that the operator sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import TemplateError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import mapping
from fluxtrain_operator.resources.scheduling import REQUIRED

_AT = "spec.podTemplate"
_MERGE_KEYS = {  # as in a strategic merge patch; other lists are replaced
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "ports": "containerPort",
}
_KINDS: dict[type, str] = {dict: "a mapping", list: "a list", str: "text", int: "a whole number"}
_UNIONS = ("env", "volumes")
"""Lists whose items have one of several sources: another source replaces the item."""
_APPENDED = ("envFrom", "tolerations", "schedulingGates", "topologySpreadConstraints")
_RENDEZVOUS_SPEC = (  # also for the rendezvous pod; not what sizes or spreads training pods
    "volumes", "imagePullSecrets", "securityContext", "serviceAccountName", "runtimeClassName",
    "nodeSelector", "tolerations", "priorityClassName", "preemptionPolicy", "os", "dnsConfig", "dnsPolicy",
    "hostAliases",
)  # fmt: skip
_TRAINER_VOLUMES = ("shm", "snapshots", "tmp")
"""Volumes that are not merged into the rendezvous pod: a claim could bind it to a training node."""
_RENDEZVOUS_CONTAINER = ("env", "envFrom", "volumeMounts", "imagePullPolicy", "securityContext")
_OF_THE_IMAGE = ("volumes", "env", "envFrom", "volumeMounts", "imagePullPolicy")
"""What is not merged into a rendezvous pod that runs another image than the job's."""


_SECRET_SOURCES = ("secret", "secretRef", "secretKeyRef", "csi", "serviceAccountToken")
"""Fields of variables and volumes whose content is secret; CSI volumes are of stores of secrets."""


def require_merge_keys(template: Any, path: str = _AT, key: str = "") -> None:
    """Raise TemplateError, with the path, for a list item without its merge key, or a directive.

    Directives such as ``$patch`` would have no effect.
    """
    if isinstance(template, dict):
        for name, value in template.items():
            if name.startswith("$"):
                text = "must be left out: directives of strategic merge patches are not supported"
                raise TemplateError(f"{path}.{name}", value, text)
            require_merge_keys(value, f"{path}.{name}", name)
    elif isinstance(template, list) and key in _MERGE_KEYS:
        for number, item in enumerate(template):
            at, merge_key = f"{path}[{number}]", _MERGE_KEYS[key]
            if not isinstance(item, dict) or not isinstance(item.get(merge_key), str | int):
                raise TemplateError(at, item, f"must be a mapping with {merge_key}")
            require_merge_keys(item, at)


def merge_into_trainer(pod: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return ``pod`` with ``template`` merged in. Raises TemplateError, with the path, for a wrong type."""
    return _without_empty(_merge(pod, template, _AT))


def merge_into_rendezvous(
    pod: Manifest, template: Mapping[str, Any], uses_own_image: bool = False
) -> Manifest:
    """Return the rendezvous ``pod`` with the parts of ``template`` that apply to all pods of the job."""
    spec = template.get("spec", {})
    left_out = _OF_THE_IMAGE if uses_own_image else ()
    shared = {key: spec[key] for key in _RENDEZVOUS_SPEC if key in spec and key not in left_out}
    required = mapping(mapping(spec, "affinity"), "nodeAffinity").get(REQUIRED)
    if required:  # the part of the affinity that says on which nodes training pods can run
        shared["affinity"] = {"nodeAffinity": {REQUIRED: required}}
    if "volumes" in shared:
        shared["volumes"] = [v for v in shared["volumes"] if v["name"] not in _TRAINER_VOLUMES]
    trainers = (c for c in spec.get("containers", []) if c["name"] == names.TRAINER)
    trainer = next(trainers, Manifest())
    keys = (key for key in _RENDEZVOUS_CONTAINER if key in trainer and key not in left_out)
    container = {key: trainer[key] for key in keys}
    _remove_secrets(shared, container)
    shared["containers"] = [{"name": names.RENDEZVOUS, **container}]
    metadata = {key: value for key, value in template.items() if key == "metadata"}
    return _without_empty(_merge(pod, {**metadata, "spec": shared}, _AT))


def _remove_secrets(spec: Manifest, container: Manifest) -> None:
    """Remove the sources of Secrets from ``spec`` and ``container``, and the mounts of removed volumes."""
    secret = {v["name"] for v in spec.get("volumes", []) if _has_secret(v)}
    removed: dict[str, Callable[[Any], bool]] = {
        "env": lambda variable: _has_secret(variable.get("valueFrom", {})),
        "envFrom": _has_secret,
        "volumeMounts": lambda mount: mount.get("name") in secret,
    }
    for key, is_removed in removed.items():
        if key in container:
            container[key] = [item for item in container[key] if not is_removed(item)]
    if secret:
        spec["volumes"] = [v for v in spec["volumes"] if v["name"] not in secret]


def _has_secret(source: Any) -> bool:
    """Return whether ``source``, of a variable or a volume, gives a pod a Secret or a token."""
    if not isinstance(source, Mapping):
        return False
    sources = mapping(source, "projected").get("sources") or ()
    return any(key in source for key in _SECRET_SOURCES) or any(map(_has_secret, sources))


def _merge(base: Any, over: Any, path: str, key: str = "") -> Any:
    """Return ``over`` merged into ``base`` like a strategic merge patch of a pod.

    Null removes what a security context has, such as a user that the cluster chooses.
    Values that only ``over`` has are not copied: manifests are never changed in place.
    """
    if base is None:
        return over
    if type(base) is not type(over):
        raise TemplateError(path, over, f"must be {_KINDS.get(type(base), 'of another kind')}")
    if isinstance(over, dict):
        merged = dict(base)
        for name, value in over.items():
            if value is None and key == "securityContext":
                merged.pop(name, None)
                continue
            exists = name in merged
            merged[name] = _merge(merged[name], value, f"{path}.{name}", name) if exists else value
        return merged
    if isinstance(over, list) and key in _MERGE_KEYS:
        return _merge_items(base, over, path, key)
    if isinstance(over, list) and key in _APPENDED:
        return [*base, *over]
    return over


def _merge_items(base: list[Any], over: list[Any], path: str, field: str) -> list[Any]:
    key = _MERGE_KEYS[field]
    merged = {item[key]: item for item in base}
    for number, item in enumerate(over):
        old = merged.get(item[key])
        replaced = old and field in _UNIONS and not (set(old) & set(item)) - {key}
        merged[item[key]] = _merge(None if replaced else old, item, f"{path}[{number}]")
    return list(merged.values())


def _without_empty(pod: Manifest) -> Manifest:
    """Return ``pod`` without empty mappings and lists."""

    def filled(part: Manifest) -> Manifest:
        return {key: value for key, value in part.items() if value not in ({}, [])}

    spec = filled(pod["spec"])
    return {**pod, "spec": {**spec, "containers": [*map(filled, spec["containers"])]}}
