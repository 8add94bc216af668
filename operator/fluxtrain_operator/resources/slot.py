"""The pod of a slot: a revision's pod, at the place that the spec asks for, with what only it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.environment import slot_environment
from fluxtrain_operator.resources.gang import Gang, gang_of
from fluxtrain_operator.resources.placement import keep_off
from fluxtrain_operator.resources.pods import (
    ENDED_ARGUMENT,
    NODES_ARGUMENT,
    PLACES_ARGUMENT,
)
from fluxtrain_operator.resources.queueing import queueing_of
from fluxtrain_operator.resources.revision import PLACEMENT
from fluxtrain_operator.resources.volumes import CONFIG_VOLUME
from fluxtrain_operator.revision import Revision


@dataclass(frozen=True)
class Slot:
    """A training pod to create."""

    index: int
    attempt: int = 1
    group: int = 0
    """The attempt that began its pod group; 0 for its own."""
    replacement: int = 0
    process_restarts: int = 0
    charged_restarts: int = 0
    """Restarts so far that count towards ``maxRestarts``."""
    excluded_nodes: tuple[str, ...] = ()
    """Host names of nodes that are unhealthy."""
    distrusted_nodes: tuple[str, ...] = ()
    """Host names of further nodes to exclude, for their faults, as long as the pod can be scheduled."""
    avoided_nodes: tuple[str, ...] = ()
    """Host names of nodes whose pods are silent, or that have had faults."""


def training_pod(
    job: Job, slot: Slot, gang: Gang | None = None, revision: Revision | None = None
) -> Manifest:
    """Return the pod of ``slot``.

    ``gang`` is the job's unless the cluster does not serve its API; ``revision`` is by default the spec's.
    """
    revision = revision or job.spec_revision
    values = slot_environment(job, slot.attempt, slot.process_restarts, slot.charged_restarts)
    pod = _pod(job, names.TRAINER, revision)
    excluded = *slot.excluded_nodes, *slot.distrusted_nodes
    pod["spec"] = keep_off(pod["spec"], tuple(dict.fromkeys(excluded)), slot.avoided_nodes)
    pod["spec"] |= {
        "hostname": names.pod(job.name, slot.index),
        "containers": [_with_values(c, values) for c in pod["spec"]["containers"]],
        "volumes": [_with_config(volume, revision) for volume in pod["spec"]["volumes"]],
    }
    pod["metadata"]["name"] = pod["spec"]["hostname"]
    pod["metadata"]["annotations"][names.ANNOTATION_REPLACEMENT] = str(slot.replacement)
    if slot.distrusted_nodes:
        text = ",".join(slot.distrusted_nodes)
        pod["metadata"]["annotations"][names.ANNOTATION_DISTRUSTED] = text
    queueing = queueing_of(job)
    pod["metadata"]["annotations"] |= queueing.pod_annotations(job)
    pod["metadata"]["labels"] |= {
        names.LABEL_INDEX: str(slot.index),
        names.LABEL_ATTEMPT: str(slot.attempt),
        **queueing.pod_labels(job, slot.group or slot.attempt),
    }
    (gang or gang_of(job)).configure_pod(pod, job)
    return pod


def rendezvous_pod(
    job: Job,
    excluded_nodes: tuple[str, ...] = (),
    avoided_nodes: tuple[str, ...] = (),
    revision: Revision | None = None,
    ended: tuple[int, int] = (0, 0),
    places: str = "",
    name: str = "",
) -> Manifest:
    """Return the rendezvous pod; ``revision`` is by default the spec's, ``name`` its host name.

    ``ended`` is an attempt and a generation: agents of that and those before it restart their trainers.
    ``places`` are those of nodes, by which it orders ranks.
    """
    pod = _pod(job, names.RENDEZVOUS, revision or job.spec_revision)
    pod["spec"] = keep_off(pod["spec"], excluded_nodes, avoided_nodes)
    pod["metadata"]["name"] = name or names.rendezvous(job.name)
    values = {NODES_ARGUMENT: _nodes(job), PLACES_ARGUMENT: places}
    if ended > (0, 0):
        values[ENDED_ARGUMENT] = f"{ended[0]}:{ended[1]}"
        pod["metadata"]["annotations"][names.ANNOTATION_ENDED] = values[ENDED_ARGUMENT]
    pod["spec"]["containers"] = [_with_arguments(c, values) for c in pod["spec"]["containers"]]
    return pod


def can_restart_in_place(revision: Revision) -> bool:
    """Return whether the rendezvous service of ``revision`` can make agents restart their trainers."""
    return _has_argument(revision, ENDED_ARGUMENT)


def is_told_places(revision: Revision) -> bool:
    """Return whether the rendezvous service of ``revision`` orders ranks by the places of nodes."""
    return _has_argument(revision, PLACES_ARGUMENT)


def _has_argument(revision: Revision, argument: str) -> bool:
    containers = revision.pod_specs[names.RENDEZVOUS]["containers"]
    return any(argument in container.get("args", []) for container in containers)


def _pod(job: Job, component: str, revision: Revision) -> Manifest:
    """Return a copy of the pod that can be changed at its first levels."""
    template = job.pod_templates[component]
    place = {key: template["spec"][key] for key in PLACEMENT if key in template["spec"]}
    metadata = template["metadata"]
    annotations = {
        **metadata["annotations"],
        names.ANNOTATION_SPEC: job.spec_hash,
        names.ANNOTATION_REVISION: revision.name,
        names.ANNOTATION_NODES: _nodes(job),
        names.ANNOTATION_RENDEZVOUS: revision.rendezvous_version,
        names.ANNOTATION_DEFAULT_CONTAINER: component,
    }
    labels = dict(metadata["labels"])
    return {
        **template,
        "metadata": {**metadata, "labels": labels, "annotations": annotations},
        "spec": {**revision.pod_specs[component], **place},
    }


def _with_values(container: Manifest, values: Mapping[str, str]) -> Manifest:
    """Return the training container with ``values`` of those variables that it has; others unchanged."""
    if container["name"] != names.TRAINER:
        return container
    env = [
        {**v, "value": values[v["name"]]} if v["name"] in values else v for v in container["env"]
    ]
    return {**container, "env": env}


def _with_config(volume: Manifest, revision: Revision) -> Manifest:
    if volume["name"] != CONFIG_VOLUME:
        return volume
    return {**volume, "configMap": {"name": revision.name}}


def _with_arguments(container: Manifest, values: Mapping[str, str]) -> Manifest:
    """Return the rendezvous container with ``values`` of those arguments that it has; others unchanged."""
    if container["name"] != names.RENDEZVOUS:
        return container
    return {**container, "args": [a + values.get(a, "") for a in container["args"]]}


def _nodes(job: Job) -> str:
    return f"{job.spec.nodes.min}:{job.spec.nodes.max}"
