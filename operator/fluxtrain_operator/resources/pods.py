"""Templates of the pods: the training pod with a torchrun agent, and the rendezvous pod."""

from __future__ import annotations

from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.environment import environment
from fluxtrain_operator.resources.flush_caches import (
    flush_container,
    flushed_mount,
    flushed_volume,
)
from fluxtrain_operator.resources.grace import grace_seconds
from fluxtrain_operator.resources.metadata import metadata
from fluxtrain_operator.resources.placement import (
    node_selector_of,
    rendezvous_affinity,
    tolerations_of,
    trainer_affinity,
)
from fluxtrain_operator.resources.requests import resources_of
from fluxtrain_operator.resources.secret import KEY_FILE, KEY_PATH, key_mount, key_volume
from fluxtrain_operator.resources.template import merge_into_rendezvous, merge_into_trainer
from fluxtrain_operator.resources.volumes import SCRATCH_PATH, mounts, volumes

NODES_ARGUMENT = "--nodes="
ENDED_ARGUMENT = "--ended="
PLACES_ARGUMENT = "--places="
"""Arguments of the rendezvous service; the values are filled in later."""
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


def pod_templates(job: Job) -> dict[str, Manifest]:
    """Return the pods by component, without what differs between slots.

    Raises TemplateError for a podTemplate that cannot be merged.
    """
    return {names.TRAINER: _training_pod(job), names.RENDEZVOUS: _rendezvous_pod(job)}


def _training_pod(job: Job) -> Manifest:
    """Return the training pod.

    restartPolicy is Never: the planner handles exits, and kubelet's back-off would grow.
    """
    result: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(job, ""),
        "spec": {
            "subdomain": names.service(job.name),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace_seconds(job),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _POD_SECURITY | _device_groups(job),
            "affinity": trainer_affinity(job),
            "tolerations": tolerations_of(job),
            "nodeSelector": node_selector_of(job),
            "imagePullSecrets": _pull_secrets(job),
            **_init_containers(job),
            "containers": [_trainer(job)],
            "volumes": [*volumes(job), *flushed_volume(job)],
            **_network(job),
            **_priority(job),
        },
    }
    return merge_into_trainer(result, job.spec.pod_template.written)


def _rendezvous_pod(job: Job) -> Manifest:
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
            "affinity": rendezvous_affinity(job),
            "tolerations": tolerations_of(job),
            "imagePullSecrets": _pull_secrets(job),
            "containers": [_rendezvous(job)],
            "volumes": [{"name": "tmp", "emptyDir": {}}, key_volume(job)],
            **_priority(job),
        },
    }
    uses_own_image = job.rendezvous_image not in ("", job.image)
    return merge_into_rendezvous(result, job.spec.pod_template.written, uses_own_image)


def _trainer(job: Job) -> Manifest:
    return {
        "name": names.TRAINER,
        "image": job.image,
        "command": ["fluxtrain", "agent"],
        "env": environment(job),
        **_credentials(job),
        "ports": [{"name": "metrics", "containerPort": job.metrics_port, "protocol": "TCP"}],
        "resources": resources_of(job),
        "volumeMounts": [*mounts(job), *flushed_mount(job)],
        "securityContext": _CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _credentials(job: Job) -> Manifest:
    """Return the sources of variables with credentials, which only the training container gets."""
    names_of_secrets = job.spec.credentials
    return (
        {"envFrom": [{"secretRef": {"name": name}} for name in names_of_secrets]}
        if names_of_secrets
        else {}
    )


def _rendezvous(job: Job) -> Manifest:
    return {
        "name": names.RENDEZVOUS,
        "image": job.rendezvous_image or job.image,
        "command": ["fluxtrain", "rendezvous"],
        "args": [
            NODES_ARGUMENT,
            ENDED_ARGUMENT,
            *([PLACES_ARGUMENT] if job.spec.scheduling.rank_order_label else []),
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


def _init_containers(job: Job) -> Manifest:
    containers = flush_container(job)
    return {"initContainers": containers} if containers else {}


def _pull_secrets(job: Job) -> list[Manifest]:
    return [{"name": name} for name in job.pod_defaults.image_pull_secrets]


def _network(job: Job) -> Manifest:
    if job.spec.network.mode == "pod":
        return {}
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}


def _priority(job: Job) -> Manifest:
    name = job.spec.scheduling.priority_class_name
    return {} if name is None else {"priorityClassName": name}
