"""spec.podTemplate: merged into the pods last, and refused where it would break the contract."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from fluxtrain.contract.resource import GROUP
from fluxtrain.errors import UNSTATED
from fluxtrain_operator import names
from fluxtrain_operator.errors import TemplateError
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.resources.environment import RESERVED

_AT = "spec.podTemplate"
_KEYS = {  # how the items of a list are told apart; other lists are replaced as a whole
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ports": "name",
}
_KINDS: dict[type, str] = {dict: "a mapping", list: "a list", str: "text", int: "a whole number"}
_ONE_SOURCE = (
    "env",
    "volumes",
)  # an item's value comes from one of its fields; another one replaces it
_APPENDED = ("tolerations", "schedulingGates", "topologySpreadConstraints")
_PARTS = {"metadata": {"labels", "annotations"}, "spec": None}
_OF_THE_POD = {
    "hostname": "peers find the pod by it",
    "subdomain": "peers find the pod by it",
    "restartPolicy": "the operator decides about restarts",
    "hostNetwork": "set spec.network.mode",
    "nodeName": "set spec.scheduling.nodeSelector",
    "schedulingGroup": "set spec.scheduling.gang",
}
_OF_THE_CONTAINER = {
    "image": "set spec.image",
    "command": "the operator starts the launcher",
    "args": "the operator starts the launcher",
}
_OUR_VOLUMES = {
    "config": "it holds the resolved config",
    "data": "set spec.storage.data",
    "models": "set spec.storage.models",
    "output": "set spec.storage.output",
}
_OUR_LABELS = (f"{GROUP}/", "app.kubernetes.io/")
_SHARED_SPEC = (  # what the rendezvous pod takes over; not what sizes or places training pods
    "volumes", "imagePullSecrets", "securityContext", "serviceAccountName", "runtimeClassName",
    "tolerations", "dnsConfig", "dnsPolicy", "hostAliases",
)  # fmt: skip
_SHARED_CONTAINER = ("env", "envFrom", "volumeMounts", "imagePullPolicy", "securityContext")


def override_trainer(pod: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return ``pod`` with ``template`` merged in; TemplateError with the path of what may not be."""
    _check(template)
    return _clean(_merge(pod, template, _AT))


def override_rendezvous(pod: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return the rendezvous ``pod`` with what of ``template`` concerns every pod of the job."""
    _check(template)
    spec = template.get("spec", {})
    shared = {key: spec[key] for key in _SHARED_SPEC if key in spec}
    mains = (c for _, c in _items(spec, "containers") if c.get("name") == names.TRAINER)
    main = next(mains, Manifest())
    taken = {key: main[key] for key in _SHARED_CONTAINER if key in main}
    shared["containers"] = [{"name": names.RENDEZVOUS, **taken}]
    kept = {key: value for key, value in template.items() if key == "metadata"}
    return _clean(_merge(pod, {**kept, "spec": shared}, _AT))


def _merge(base: Any, over: Any, path: str, key: str = "") -> Any:
    """Return ``over`` laid on ``base`` as Kubernetes' strategic merge does for pods."""
    if base is not None and type(base) is not type(over):
        raise TemplateError(path, over, f"must be {_KINDS.get(type(base), 'of another kind')}")
    if isinstance(over, dict):
        merged = dict(base or {})
        for name, value in over.items():
            merged[name] = _merge(merged.get(name), value, f"{path}.{name}", name)
        return merged
    if isinstance(over, list) and key in _KEYS:
        return _merge_items(base or [], over, path, key)
    if isinstance(over, list) and key in _APPENDED:
        return [*(base or []), *over]
    return copy.deepcopy(over)


def _merge_items(base: list[Any], over: list[Any], path: str, named: str) -> list[Any]:
    key = _KEYS[named]
    merged = {item[key]: item for item in base}
    for number, item in enumerate(over):
        at = f"{path}[{number}]"
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            raise TemplateError(at, item, f"must be a mapping with {key}")
        old = merged.get(item[key], {})
        replaced = named in _ONE_SOURCE and not (set(old) & set(item)) - {key}
        merged[item[key]] = _merge({} if replaced else old, item, at)
    return list(merged.values())


def _clean(pod: Manifest) -> Manifest:
    """Return ``pod`` without the mappings and lists that say nothing."""
    spec = {key: value for key, value in pod["spec"].items() if value not in ({}, [])}
    containers = [
        {key: value for key, value in container.items() if value not in ({}, [])}
        for container in spec["containers"]
    ]
    return {**pod, "spec": {**spec, "containers": containers}}


def _check(template: Mapping[str, Any]) -> None:
    for path, given, allowed in _problems(template):
        raise TemplateError(f"{_AT}.{path}", given, allowed)


Problem = tuple[str, object, str]
"""Path, what was given, what is allowed."""


def _problems(template: Mapping[str, Any]) -> Iterator[Problem]:
    for part, value in template.items():
        if part not in _PARTS:
            yield part, UNSTATED, "no such field; there are metadata, spec"
        elif not isinstance(value, dict):
            yield part, value, "must be a mapping"
    yield from _metadata_problems(template.get("metadata", {}))
    yield from _spec_problems(template.get("spec", {}))


def _metadata_problems(metadata: Mapping[str, Any]) -> Iterator[Problem]:
    for part, value in metadata.items():
        if part not in ("labels", "annotations"):
            yield f"metadata.{part}", UNSTATED, "no such field; there are labels, annotations"
        elif not isinstance(value, dict):
            yield f"metadata.{part}", value, "must be a mapping"
        else:
            for key in value:
                if key.startswith(_OUR_LABELS):
                    yield f"metadata.{part}[{key}]", UNSTATED, "belongs to the operator"


def _spec_problems(spec: Mapping[str, Any]) -> Iterator[Problem]:
    for key, reason in _OF_THE_POD.items():
        if key in spec:
            yield f"spec.{key}", spec[key], f"belongs to the operator: {reason}"
    for number, volume in _items(spec, "volumes"):
        if volume.get("name") in _OUR_VOLUMES:
            reason = _OUR_VOLUMES[volume["name"]]
            yield f"spec.volumes[{number}]", volume["name"], f"belongs to the operator: {reason}"
    for number, container in _items(spec, "containers"):
        yield from _container_problems(f"spec.containers[{number}]", container)


def _container_problems(path: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    if not isinstance(container.get("name"), str):
        yield f"{path}.name", container.get("name"), f"must be given; ours is {names.TRAINER}"
    if container.get("name") != names.TRAINER:
        return
    for key, reason in _OF_THE_CONTAINER.items():
        if key in container:
            yield f"{path}.{key}", container[key], f"belongs to the operator: {reason}"
    for number, variable in _items(container, "env"):
        if str(variable.get("name", "")).startswith(RESERVED):
            allowed = f"variables that begin with {' or '.join(RESERVED)} belong to the operator"
            yield f"{path}.env[{number}].name", variable["name"], allowed


def _items(of: Mapping[str, Any], key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    found = of.get(key)
    for number, item in enumerate(found if isinstance(found, list) else []):
        if isinstance(item, dict):
            yield number, item
