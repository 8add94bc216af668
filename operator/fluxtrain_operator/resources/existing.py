"""Existing objects without an owner: which a backup of the job brought back, and how to remove the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.names import mapping, mappings
from fluxtrain_operator.resources.environment import slot_environment
from fluxtrain_operator.resources.volumes import CONFIG_VOLUME

_SERVICE_DEFAULTS: Mapping[str, object] = {
    "type": "ClusterIP",
    "clusterIPs": ["None"],
    "internalTrafficPolicy": "Cluster",
    "sessionAffinity": "None",
}
_OF_THE_CLUSTER = ("ipFamilies", "ipFamilyPolicy")
"""Fields of a Service that the API server sets from the networks of its cluster."""
_NOT_CONTENT = ("apiVersion", "kind", "metadata", "status")
_MAX_COMMAND = 640
_MIN_RANGE = 8
"""Shorter runs of pods are listed one by one; longer ones become a brace expansion of the shell."""


def is_ownerless(existing: Mapping[str, Any]) -> bool:
    """Return whether an object has no owner of any kind, and is not being deleted."""
    metadata = existing["metadata"]
    return not metadata.get("ownerReferences") and "deletionTimestamp" not in metadata


def is_restored(existing: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Return whether ``existing`` has no owner and exactly the content of ``desired``.

    Labels and annotations count for nothing: whoever may create objects may set them.
    """
    return is_ownerless(existing) and _content(existing) == _content(desired)


def is_restored_pod(existing: Mapping[str, Any], job: Job, revision: Revision) -> bool:
    """Return whether a pod without an owner runs exactly what ``revision`` has for its name.

    All containers of the revision have its images, commands, arguments and variables; others may have been
    injected. A training pod mounts the revision's config map.
    """
    name = str(existing["metadata"].get("name", ""))
    is_rendezvous = names.is_rendezvous(job.name, name)
    is_named = is_rendezvous or names.index_of(job.name, name) is not None
    if not (is_named and is_ownerless(existing)):
        return False
    own = revision.pod_specs[names.RENDEZVOUS if is_rendezvous else names.TRAINER]
    spec = mapping(existing, "spec")
    known = {container.get("name"): container for container in _containers(spec)}
    return (is_rendezvous or _config_map(spec) == revision.name) and all(
        _runs(known.get(desired["name"]), desired, job) for desired in _containers(own)
    )


def removal(namespace: str, objects: Iterable[tuple[str, str]]) -> str:
    """Return the command that deletes ``objects``, which have resources and names.

    It ends before an object that would make it too long for an event; the message then counts the rest.
    """
    command, terms = f"kubectl delete --ignore-not-found -n {namespace}", [*_terms(objects)]
    for index, (term, _) in enumerate(terms):
        if index and len(command) + len(term) >= _MAX_COMMAND:
            num_left = sum(count for _, count in terms[index:])
            return f"{command} (then {num_left} more)"
        command = f"{command} {term}"
    return command


def resource(version: str, kind: str) -> str:
    """Return what kubectl calls ``kind`` of the API ``version``; with the group if others serve it too."""
    group = version.rpartition("/")[0]
    return (
        kind.lower() if "." not in group or kind == "NetworkPolicy" else f"{kind.lower()}.{group}"
    )


def _content(manifest: Mapping[str, Any]) -> Manifest:
    """Return all fields but metadata and status, a Service's without those that the API server adds."""
    content = {key: value for key, value in manifest.items() if key not in _NOT_CONTENT}
    spec = content.get("spec")
    if not isinstance(spec, dict) or spec.get("clusterIP") != "None":
        return content
    kept = {
        key: value
        for key, value in spec.items()
        if key not in _OF_THE_CLUSTER and (key, value) not in _SERVICE_DEFAULTS.items()
    }
    return {**content, "spec": {**kept, "ports": [*map(_port, mappings(spec, "ports"))]}}


def _port(port: Mapping[str, Any]) -> Manifest:
    has_default = port.get("targetPort") == port.get("port")
    return {key: value for key, value in port.items() if not (key == "targetPort" and has_default)}


def _containers(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from mappings(spec, "initContainers")
    yield from mappings(spec, "containers")


def _runs(existing: Mapping[str, Any] | None, desired: Mapping[str, Any], job: Job) -> bool:
    """Return whether a container runs what ``desired`` does, apart from the values of its slot."""
    if existing is None:
        return False
    given, arguments = existing.get("args") or [], desired.get("args") or []
    variables = _values(existing)
    filled_in = slot_environment(job) if desired["name"] == names.TRAINER else {}
    return (
        all(existing.get(key) == desired.get(key) for key in ("image", "command"))
        and len(given) == len(arguments)
        and all(map(_fills_in, given, arguments))
        and all(
            name in filled_in or variables.get(name) == value
            for name, value in _values(desired).items()
        )
    )


def _fills_in(given: str, argument: str) -> bool:
    """Return whether ``given`` is ``argument``, or one like ``--nodes=`` with a value."""
    return given == argument or (argument.endswith("=") and given.startswith(argument))


def _values(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with a value of their own; the API server leaves an empty one out."""
    variables = mappings(container, "env")
    return {
        str(v.get("name")): str(v.get("value") or "") for v in variables if "valueFrom" not in v
    }


def _config_map(spec: Mapping[str, Any]) -> str:
    volumes = (v for v in mappings(spec, "volumes") if v.get("name") == CONFIG_VOLUME)
    return str(mapping(next(volumes, {}), "configMap").get("name", ""))


def _terms(objects: Iterable[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """Yield the arguments of ``kubectl delete``, each with the number of objects that it names."""

    def key(numbered: tuple[int, tuple[str, int | None, str]]) -> tuple[object, ...]:
        place, (stem, number, _) = numbered
        return stem, None if number is None else number - place

    ordered = sorted(map(_split, objects), key=lambda part: (part[1] is not None, part[0], part[1]))
    for (stem, start), run in groupby(enumerate(ordered), key):
        arguments = [argument for _, (_, _, argument) in run]
        if start is None or len(arguments) < _MIN_RANGE:
            yield from ((argument, 1) for argument in arguments)
        else:
            first, last = (int(a.rpartition("-")[2]) for a in (arguments[0], arguments[-1]))
            yield f"{stem}{{{first}..{last}}}", len(arguments)


def _split(given: tuple[str, str]) -> tuple[str, int | None, str]:
    """Return an argument's stem and number, the latter only of a pod that has one, and the argument."""
    kind, name = given
    stem, dash, index = name.rpartition("-")
    if kind != "pod" or not (dash and index.isdecimal() and str(int(index)) == index):
        return f"{kind}/{name}", None, f"{kind}/{name}"
    return f"{kind}/{stem}-", int(index), f"{kind}/{name}"
