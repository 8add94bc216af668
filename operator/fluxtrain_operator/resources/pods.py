"""Templates of the pods: the training pod with a torchrun agent, and the rendezvous pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxtrain.contract.process import RENDEZVOUS_PORT
from fluxtrain.contract.resource.pod_template import FETCH_CONTAINER, FLUSHED_VOLUME, KEY_VOLUME
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.resources.environment import environment, grace_seconds, slot_environment
from fluxtrain_operator.resources.scheduling import (
    Gang,
    gang_of,
    keep_off,
    node_selector_of,
    queueing_of,
    rendezvous_affinity,
    tolerations_of,
    trainer_affinity,
)
from fluxtrain_operator.resources.support import PLACEMENT, metadata
from fluxtrain_operator.resources.template import merge_into_rendezvous, merge_into_trainer
from fluxtrain_operator.resources.volumes import (
    CONFIG_VOLUME,
    KEY_FILE,
    KEY_PATH,
    SCRATCH_PATH,
    flush_container,
    flushed_mount,
    flushed_volume,
    gpu_claims,
    key_mount,
    key_volume,
    mounts,
    rendezvous_resources_of,
    resources_of,
    volumes,
    with_key,
)

NODES_ARGUMENT = "--nodes="
ENDED_ARGUMENT = "--ended="
PLACES_ARGUMENT = "--places="
"""Arguments of the rendezvous service; the values are filled in later."""
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

    restartPolicy is Never: the planner handles exits, and kubelet's back-off would grow. Pods with GPUs have
    the groups of the nodes' device files.
    """
    groups = job.pod_defaults.supplemental_groups if job.spec.gpus_per_node else []
    flushes = flush_container(job)
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
            "securityContext": {
                **_pod_security(job),
                **({"supplementalGroups": groups} if groups else {}),
            },
            "affinity": trainer_affinity(job),
            "tolerations": tolerations_of(job),
            "nodeSelector": node_selector_of(job),
            "imagePullSecrets": _pull_secrets(job),
            **({"initContainers": flushes} if flushes else {}),
            "containers": [_trainer(job)],
            "volumes": [*volumes(job), *flushed_volume(job)],
            "resourceClaims": gpu_claims(job),
            **_network(job),
            **_priority(job),
        },
    }
    return _with_fetch(merge_into_trainer(result, job.spec.pod_template.written), job)


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
            "securityContext": _pod_security(job),
            "affinity": rendezvous_affinity(job),
            "tolerations": tolerations_of(job),
            "nodeSelector": node_selector_of(job),
            "imagePullSecrets": _pull_secrets(job),
            "containers": [_rendezvous(job)],
            "volumes": [{"name": "tmp", "emptyDir": {}}, key_volume()],
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


_OF_THE_TRAINER = (
    *("image", "imagePullPolicy", "env", "envFrom", "securityContext", "terminationMessagePolicy"),
)
_NOT_FETCHED = ("data", "output", "shm", "snapshots", KEY_VOLUME, FLUSHED_VOLUME)


def _with_fetch(pod: Manifest, job: Job) -> Manifest:
    """Return the training ``pod`` with the init container that fetches the run's models, if it does.

    It has the training container's variables and mounts, also those of ``podTemplate``, such as a proxy's
    certificates; it writes to the models, and reaches neither data nor output.
    """
    models = job.spec.storage.models
    if models is None or models.fetch is None:
        return pod
    trainer = next(c for c in pod["spec"]["containers"] if c["name"] == names.TRAINER)
    mounted = [mount for mount in trainer["volumeMounts"] if mount["name"] not in _NOT_FETCHED]
    writable = [
        {k: v for k, v in m.items() if k != "readOnly"} if m["name"] == "models" else m
        for m in mounted
    ]
    container = {
        "name": FETCH_CONTAINER,
        **{key: trainer[key] for key in _OF_THE_TRAINER if key in trainer},
        "command": ["fluxtrain", "fetch-models", models.fetch],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "8Gi"}},
        "volumeMounts": writable,
    }
    before = [container, *pod["spec"].get("initContainers", [])]
    return {**pod, "spec": {**pod["spec"], "initContainers": before}}


def _credentials(job: Job) -> Manifest:
    """Return the sources of variables with credentials, which no other program of the job gets."""
    secrets = [{"secretRef": {"name": name}} for name in job.spec.credentials]
    return {"envFrom": secrets} if secrets else {}


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
        "resources": rendezvous_resources_of(job),
        "volumeMounts": [{"name": "tmp", "mountPath": SCRATCH_PATH}, key_mount()],
        "securityContext": _CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pod_security(job: Job) -> Manifest:
    return job.pod_defaults.security_context or {}


def _pull_secrets(job: Job) -> list[Manifest]:
    return [{"name": name} for name in job.pod_defaults.image_pull_secrets]


def _network(job: Job) -> Manifest:
    if job.spec.network.mode == "Pod":
        return {}
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}


def _priority(job: Job) -> Manifest:
    name = job.spec.scheduling.priority_class_name
    return {} if name is None else {"priorityClassName": name}


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
    pod["metadata"]["annotations"] |= queueing.pod_annotations(job, slot.index)
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

    Its resources are not those of the revision: changed defaults help a job whose pod a quota refuses.
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
    changes = {"resources": rendezvous_resources_of(job)}
    containers = (_with_arguments(c, values, changes) for c in pod["spec"]["containers"])
    pod["spec"]["containers"] = [*containers]
    return pod


def receives_topology(revision: Revision) -> bool:
    """Return whether the rendezvous service of ``revision`` orders ranks by the topology labels of nodes."""
    containers = revision.pod_specs[names.RENDEZVOUS]["containers"]
    return any(PLACES_ARGUMENT in container.get("args", []) for container in containers)


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
    labels, spec = dict(metadata["labels"]), revision.pod_specs[component]
    keyed = [with_key(volume, job) for volume in spec["volumes"]]
    return {
        **template,
        "metadata": {**metadata, "labels": labels, "annotations": annotations},
        "spec": {**spec, **place, "volumes": keyed},
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


def _with_arguments(container: Manifest, values: Mapping[str, str], changes: Manifest) -> Manifest:
    """Return the rendezvous container with ``changes`` and ``values`` of those arguments that it has."""
    if container["name"] != names.RENDEZVOUS:
        return container
    return {**container, **changes, "args": [a + values.get(a, "") for a in container["args"]]}


def _nodes(job: Job) -> str:
    return f"{job.spec.nodes.min}:{job.spec.nodes.max}"
