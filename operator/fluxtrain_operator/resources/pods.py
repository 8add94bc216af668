"""The pods: a training pod with a torchrun agent for each node, and the rendezvous pod."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.environment import environment
from fluxtrain_operator.resources.gang import Gang, gang_of
from fluxtrain_operator.resources.grace import grace_seconds
from fluxtrain_operator.resources.metadata import metadata
from fluxtrain_operator.resources.placement import (
    node_selector_of,
    rendezvous_affinity,
    tolerations_of,
    trainer_affinity,
)
from fluxtrain_operator.resources.queueing import queueing_of
from fluxtrain_operator.resources.requests import resources_of
from fluxtrain_operator.resources.secret import KEY_FILE, KEY_PATH, key_mount, key_volume
from fluxtrain_operator.resources.template import merge_into_rendezvous, merge_into_trainer
from fluxtrain_operator.resources.volumes import SCRATCH_PATH, mounts, volumes

_USER = 1000  # the user of our images; set here as other images need not have one
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True)
class Slot:
    """A training pod to create."""

    index: int
    attempt: int = 1
    replacement: int = 0
    process_restarts: int = 0
    charged_restarts: int = 0
    """Restarts so far that count towards ``maxRestarts``."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes with unhealthy GPUs."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes whose pods are silent."""


def training_pod(job: Job, slot: Slot, gang: Gang | None = None) -> Manifest:
    """Return the pod of ``slot``; ``gang`` is the job's unless the cluster does not serve its API.

    Raises TemplateError for a podTemplate that cannot be merged. restartPolicy is Never: the planner handles
    exits, and kubelet's back-off would grow.
    """
    name = names.pod(job.name, slot.index)
    result: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(job, name),
        "spec": {
            "hostname": name,
            "subdomain": names.service(job.name),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace_seconds(job),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _POD_SECURITY | _device_groups(job),
            "affinity": trainer_affinity(job, slot.excluded_nodes, slot.avoided_nodes),
            "tolerations": tolerations_of(job),
            "nodeSelector": node_selector_of(job),
            "imagePullSecrets": _pull_secrets(job),
            "containers": [_trainer(job, slot)],
            "volumes": volumes(job),
            **_network(job),
            **_priority(job),
        },
    }
    _annotate(result, job, slot)
    (gang or gang_of(job)).configure_pod(result, job)
    return merge_into_trainer(result, job.spec.pod_template.written)


def rendezvous_pod(
    job: Job, excluded_nodes: tuple[str, ...] = (), avoided_nodes: tuple[str, ...] = ()
) -> Manifest:
    """Return the pod of the rendezvous service; kubelet restarts its container in place."""
    name = names.rendezvous(job.name)
    result: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(job, name, names.RENDEZVOUS),
        "spec": {
            "hostname": name,
            "subdomain": names.service(job.name),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _POD_SECURITY,
            "affinity": rendezvous_affinity(job, excluded_nodes, avoided_nodes),
            "tolerations": tolerations_of(job),
            "imagePullSecrets": _pull_secrets(job),
            "containers": [_rendezvous(job)],
            "volumes": [{"name": "tmp", "emptyDir": {}}, key_volume(job)],
            **_priority(job),
        },
    }
    notes = result["metadata"]["annotations"]
    notes[names.ANNOTATION_SPEC] = job.spec_hash
    notes[names.ANNOTATION_NODES] = _nodes(job)
    notes[names.ANNOTATION_RENDEZVOUS] = names.RENDEZVOUS_VERSION
    notes[names.ANNOTATION_DEFAULT_CONTAINER] = names.RENDEZVOUS
    uses_own_image = job.rendezvous_image not in ("", job.image)
    return merge_into_rendezvous(result, job.spec.pod_template.written, uses_own_image)


def _trainer(job: Job, slot: Slot) -> Manifest:
    return {
        "name": names.TRAINER,
        "image": job.image,
        "command": ["fluxtrain", "agent"],
        "env": environment(job, slot.attempt, slot.process_restarts, slot.charged_restarts),
        "ports": [{"name": "metrics", "containerPort": job.metrics_port, "protocol": "TCP"}],
        "resources": resources_of(job),
        "volumeMounts": mounts(job),
        "securityContext": _CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _rendezvous(job: Job) -> Manifest:
    return {
        "name": names.RENDEZVOUS,
        "image": job.rendezvous_image or job.image,
        "command": ["fluxtrain", "rendezvous"],
        "args": [
            f"--nodes={_nodes(job)}",
            f"--key={KEY_PATH}/{KEY_FILE}",
            f"--members-port={job.metrics_port}",
        ],
        "env": [{"name": "HOME", "value": SCRATCH_PATH}],
        "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": SCRATCH_PATH}, key_mount()],
        "securityContext": _CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _device_groups(job: Job) -> Manifest:
    """Return the supplemental groups of the nodes' device files for a pod with GPUs."""
    groups = job.pod_defaults.supplemental_groups
    return {"supplementalGroups": groups} if job.spec.gpus_per_node and groups else {}


def _pull_secrets(job: Job) -> list[Manifest]:
    return [{"name": name} for name in job.pod_defaults.image_pull_secrets]


def _nodes(job: Job) -> str:
    return f"{job.spec.nodes.min}:{job.spec.nodes.max}"


def _network(job: Job) -> Manifest:
    if job.spec.network.mode == "pod":
        return {}
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}


def _priority(job: Job) -> Manifest:
    name = job.spec.scheduling.priority_class_name
    return {} if name is None else {"priorityClassName": name}


def _annotate(pod: Manifest, job: Job, slot: Slot) -> None:
    queueing = queueing_of(job)
    labels, notes = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    labels[names.LABEL_INDEX] = str(slot.index)
    labels[names.LABEL_ATTEMPT] = str(slot.attempt)
    notes[names.ANNOTATION_SPEC] = job.spec_hash
    notes[names.ANNOTATION_NODES] = _nodes(job)
    notes[names.ANNOTATION_RENDEZVOUS] = names.RENDEZVOUS_VERSION
    notes[names.ANNOTATION_REPLACEMENT] = str(slot.replacement)
    notes[names.ANNOTATION_DEFAULT_CONTAINER] = names.TRAINER
    labels.update(queueing.pod_labels(job, slot.attempt))
    notes.update(queueing.pod_annotations(job))
