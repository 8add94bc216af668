"""The pods: one torchrun agent for each node, and the small one that holds the rendezvous store."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources import pod_group
from fluxtrain_operator.resources.environment import environment
from fluxtrain_operator.resources.metadata import metadata
from fluxtrain_operator.resources.placement import (
    rendezvous_affinity,
    tolerations,
    trainer_affinity,
)
from fluxtrain_operator.resources.template import override_rendezvous, override_trainer
from fluxtrain_operator.resources.volumes import SCRATCH_PATH, mounts, volumes

GRACE_SECONDS = 180
"""From SIGTERM to SIGKILL: the launcher gives its trainers 120 s for the checkpoint."""
_USER = 1000  # the user of our images; named here so that other images need not name one


@dataclass(frozen=True)
class Slot:
    """A place for a training pod, and what the pod must know of the job's past."""

    index: int
    attempt: int = 1
    replacement: int = 0
    process_restarts: int = 0
    avoid: tuple[str, ...] = ()
    """Nodes that are ready and yet no good."""


def training_pod(job: Job, slot: Slot, gang: str) -> Manifest:
    """Return the pod of ``slot``, podTemplate merged in; TemplateError where that cannot be.

    restartPolicy Never: what an exit means is the planner's to judge, and kubelet's back-off grows.
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
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _pod_security() | _device_groups(job),
            "affinity": trainer_affinity(job, slot.avoid),
            "tolerations": tolerations(job),
            "nodeSelector": dict(job.spec.scheduling.node_selector),
            "containers": [_trainer(job, slot)],
            "volumes": volumes(job),
            **_network(job),
            **_priority(job),
        },
    }
    _annotate(result, job, slot)
    pod_group.join(result, job, gang)
    return override_trainer(result, job.spec.pod_template.written)


def rendezvous_pod(job: Job, avoid: tuple[str, ...] = ()) -> Manifest:
    """Return the pod that holds the store; kubelet restarts it in place, its name and address kept."""
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
            "securityContext": _pod_security(),
            "affinity": rendezvous_affinity(job, avoid),
            "tolerations": tolerations(job),
            "containers": [_rendezvous(job)],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            **_priority(job),
        },
    }
    notes = result["metadata"]["annotations"]
    notes[names.ANNOTATION_SPEC] = job.spec_hash
    notes[names.ANNOTATION_DEFAULT_CONTAINER] = names.RENDEZVOUS
    return override_rendezvous(result, job.spec.pod_template.written)


def _trainer(job: Job, slot: Slot) -> Manifest:
    return {
        "name": names.TRAINER,
        "image": job.image,
        "command": ["fluxtrain", "agent"],
        "env": environment(job, slot.attempt, slot.process_restarts),
        "ports": [{"name": "metrics", "containerPort": job.metrics_port, "protocol": "TCP"}],
        "resources": _devices(job),
        "volumeMounts": mounts(job),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _rendezvous(job: Job) -> Manifest:
    return {
        "name": names.RENDEZVOUS,
        "image": job.image,
        "command": ["fluxtrain", "rendezvous"],
        "env": [{"name": "HOME", "value": SCRATCH_PATH}],
        "ports": [
            {"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": SCRATCH_PATH}],
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _devices(job: Job) -> Manifest:
    """Return requests and limits, equal as extended resources must be: GPUs, and a NIC for each."""
    if job.spec.gpus_per_node == 0:
        return {}
    found = [job.spec.gpu_resource, job.spec.network.rdma_resource]
    counts = {name: str(job.spec.gpus_per_node) for name in found if name is not None}
    return {"requests": counts, "limits": dict(counts)}


def _device_groups(job: Job) -> Manifest:
    """Return the groups that the nodes' device files belong to, for pods that have such devices."""
    if job.spec.gpus_per_node == 0 or not job.device_groups:
        return {}
    return {"supplementalGroups": list(job.device_groups)}


def _network(job: Job) -> Manifest:
    if job.spec.network.mode == "pod":
        return {}
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}


def _priority(job: Job) -> Manifest:
    name = job.spec.scheduling.priority_class_name
    return {} if name is None else {"priorityClassName": name}


def _pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _annotate(pod: Manifest, job: Job, slot: Slot) -> None:
    nodes, scheduling = job.spec.nodes, job.spec.scheduling
    labels, notes = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    labels[names.LABEL_INDEX] = str(slot.index)
    labels[names.LABEL_ATTEMPT] = str(slot.attempt)
    notes[names.ANNOTATION_SPEC] = job.spec_hash
    notes[names.ANNOTATION_NODES] = f"{nodes.min}:{nodes.max}"
    notes[names.ANNOTATION_REPLACEMENT] = str(slot.replacement)
    notes[names.ANNOTATION_DEFAULT_CONTAINER] = names.TRAINER
    if scheduling.queue_name is not None:
        labels[names.KUEUE_QUEUE] = scheduling.queue_name
        labels[names.KUEUE_GROUP] = names.queue_group(job.name, slot.attempt)
        notes.update(_in_group(job))


def _in_group(job: Job) -> dict[str, str]:
    """Return what Kueue reads of each pod of a group: it admits all of them together, or none.

    Not retriable: the group is over with its last pod. Kueue would hold the names, and the quota, of pods
    that ended until there were others in their stead. One role: pods that avoid different nodes are alike.
    """
    notes = {
        names.KUEUE_COUNT: str(job.spec.nodes.max),
        names.KUEUE_RETRIABLE: "false",
        names.KUEUE_ROLE: names.TRAINER,
    }
    topology = job.spec.scheduling.topology
    return notes if topology is None else {**notes, names.KUEUE_TOPOLOGY: topology}
