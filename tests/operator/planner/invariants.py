"""What holds for every plan: deletions have a true reason, and objects of others change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tests.operator.jobs import KEY, OWNER, make_training

from fluxtrain.contract.process import SAVE, STEP
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller import kept_fields
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.guard import NODE_FAULTS, Reason
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import Plan
from fluxtrain_operator.planner.situation import Report
from fluxtrain_operator.planner.status import finished

_NO_PROGRESS_SECONDS: dict[str, float] = {STEP: 60.0, SAVE: 3600.0}
"""By phase. No step takes longer in these histories, and no budget of the watchdog is shorter."""
_REPAIR_SECONDS = 300.0
"""While the rendezvous pod is replaced, the watchdog waits for so much longer."""
_ROUNDING_SECONDS = 1.0
_NOT_OURS: tuple[list[Manifest], ...] = (
    [],
    [{**OWNER, "uid": "uid-before"}],
    [{**OWNER, "controller": False}],
    [{"kind": "Deployment", "name": "shop", "uid": "shop", "controller": True}],
)
"""Owner references of objects that are not the job's, whatever their labels are."""


_OWN_REASONS = {*NODE_FAULTS, Reason.POD_ENDED, Reason.SCALED_DOWN, Reason.PREVIOUS_ATTEMPT}
"""Why single pods are deleted, whatever happens to the others."""


class Deletion(NamedTuple):
    """A pod that a plan deletes while it may step, and what the plan was made from."""

    pod: Pod
    job: Job
    observed: Observed
    result: Plan
    now: float


def _never(deletion: Deletion) -> bool:
    return False


def _needs_all_pods(deletion: Deletion) -> bool:
    """Return whether the program failed, and more than once or so that the others cannot go on."""
    observed, attempt = deletion.observed, deletion.job.status.attempt
    ended = [p for p in observed.pods if p.ended and not p.succeeded and p.attempt == attempt]
    failed_before = deletion.job.status.pod_replacement is not None
    others = [p for p in observed.pods if p.running and not p.deleting and p.attempt == attempt]
    mixed = any(p.revision != deletion.result.status.revision for p in others)
    unknown = observed.heard.attempt is None
    lost = any(p.uid in observed.heard.silent or not observed.nodes[p.node].ready for p in others)
    has_gpus = deletion.job.spec.gpus_per_node > 0
    nodes = [observed.nodes[p.node] for p in others]
    marked = any(node.problem or (has_gpus and node.unhealthy) for node in nodes)
    return failed_before or (bool(ended) and (len(ended) > 1 or mixed or unknown or lost or marked))


def _has_no_progress(deletion: Deletion) -> bool:
    answer, service = deletion.observed.any_progress, deletion.observed.rendezvous
    if answer is None:
        return False
    silent = answer.seconds_since_progress
    if silent is None:
        last = Report(answer, deletion.now).last_step_time
        silent = deletion.now - last if last is not None else 0.0
    is_up = service is not None and service.running and not service.deleting
    limit = _NO_PROGRESS_SECONDS[answer.phase or STEP] + (0.0 if is_up else _REPAIR_SECONDS)
    return silent > limit - _ROUNDING_SECONDS


def _is_node_lost(deletion: Deletion) -> bool:
    silent = deletion.pod.uid in deletion.observed.heard.silent
    return silent or not deletion.observed.nodes[deletion.pod.node].ready


def _is_excess(deletion: Deletion) -> bool:
    running = [pod for pod in deletion.observed.pods if not pod.ended and not pod.deleting]
    return len(running) > deletion.job.spec.nodes.max


def _has_unhealthy_gpu(deletion: Deletion) -> bool:
    """Return whether the job needs GPUs, those of the node are marked, and most others are not."""
    nodes = deletion.observed.nodes
    num_marked = sum(bool(node.unhealthy) for node in nodes.values())
    is_marked = bool(nodes[deletion.pod.node].unhealthy)
    return is_marked and deletion.job.spec.gpus_per_node > 0 and num_marked <= len(nodes) / 2


def _has_group_of_other_size(deletion: Deletion) -> bool:
    size = deletion.job.spec.nodes.max
    is_queued = deletion.job.spec.scheduling.queue_name is not None
    return is_queued and any(pod.nodes[1] != size for pod in deletion.observed.pods)


def _has_group_ended(deletion: Deletion) -> bool:
    """Return whether a job in a queue has fewer than ``nodes.min`` pods that train or will."""
    nodes, attempt = deletion.observed.nodes, deletion.job.status.attempt
    left = [
        pod
        for pod in deletion.observed.pods
        if not (pod.ended or pod.deleting or pod.uid in deletion.observed.heard.silent)
        and pod.attempt == attempt
        and not (pod.node and _is_faulty(nodes[pod.node]))
    ]
    is_queued = deletion.job.spec.scheduling.queue_name is not None
    return is_queued and len(left) < deletion.job.spec.nodes.min


def _is_faulty(node: NodeView) -> bool:
    return not node.ready or bool(node.problem or node.unhealthy)


HOLDS: dict[Reason, Callable[[Deletion], bool]] = {
    Reason.SUSPENDED: lambda d: d.job.spec.lifecycle.suspend,
    Reason.SPEC_CHANGED: lambda d: any(p.spec_hash != d.job.spec_hash for p in d.observed.pods),
    Reason.SCALED: _has_group_of_other_size,
    Reason.SCALED_DOWN: _is_excess,
    Reason.REVISION_CHANGED: lambda d: any(
        pod.revision != d.result.status.revision for pod in d.observed.pods
    ),
    Reason.RESUMED: lambda d: d.job.status.phase == "Suspended",
    Reason.JOB_ENDED: lambda d: finished(d.result.status),
    Reason.PROGRAM_FAILED: _needs_all_pods,
    Reason.GROUP_ENDED: _has_group_ended,
    Reason.PREVIOUS_ATTEMPT: lambda d: d.pod.attempt < d.job.status.attempt,
    Reason.NO_PROGRESS: _has_no_progress,
    Reason.NODE_LOST: _is_node_lost,
    Reason.UNHEALTHY_GPU: _has_unhealthy_gpu,
    Reason.UNHEALTHY_NODE: lambda d: bool(d.observed.nodes[d.pod.node].problem),
    Reason.POD_ENDED: _never,
    Reason.UNSCHEDULABLE: _never,
    Reason.LABEL_REMOVED: _never,
    Reason.RESTORED: _never,
    Reason.OUTDATED: _never,
}
"""Whether a reason is true of a pod that may step."""


def check_reasons(job: Job, observed: Observed, result: Plan, now: float) -> None:
    """Check the reason of every deletion of a pod that may step."""
    pods = {pod.uid: pod for pod in observed.pods if pod.running and not pod.deleting}
    for act in result.delete:
        if (pod := pods.get(act.uid)) is not None:
            assert act.reason is not None, "a pod that steps is deleted without a reason"
            deletion = Deletion(pod, job, observed, result, now)
            assert HOLDS[act.reason](deletion), f"{act.reason} is not true of a pod that steps"


def check_restart_in_place(result: Plan) -> None:
    """Check that a restart in place deletes no training pod but for other reasons."""
    if result.decision is not None and result.decision.in_place_restart is not None:
        pods = [delete for delete in result.delete if delete.kind == "Pod"]
        training = [delete for delete in pods if not names.is_rendezvous("job", delete.name)]
        left = [delete for delete in training if delete.reason not in _OWN_REASONS]
        assert not left, "a restart in place deletes a training pod"


def check_faults(observed: Observed, result: Plan) -> None:
    """Check that few nodes are excluded for faults, and that no pod has more than one fault."""
    usable = [node for node in observed.nodes.values() if node.ready and not node.problem]
    for manifest in result.create:
        notes = manifest["metadata"].get("annotations") or {}
        excluded = notes.get(names.ANNOTATION_DISTRUSTED)
        count = len(excluded.split(",")) if excluded else 0
        assert count <= len(usable) // 5, "more nodes are excluded for faults than a fifth"
    pods = [fault.pod for fault in result.status.node_faults if fault.reason != "NoProgress"]
    assert len(pods) == len(set(pods)), "a fault of a pod counts twice"


def with_look_alikes(observed: Observed, number: int, now: float) -> Observed:
    """Return ``observed`` as read ``now`` from a cache with pods of others that look like the job's."""
    cache = Cache(clock=lambda: now)
    cache.set_job(make_training())
    stores = [*observed.kept_rendezvous, *([observed.rendezvous] if observed.rendezvous else [])]
    pods = [*observed.pods, *stores]
    for pod in pods:
        cache.set_pod(as_manifest(pod, [OWNER]))
    for count, owners in enumerate(_NOT_OURS):
        cache.set_pod(as_manifest(_look_alike(number + count), owners))
    read = Observed.from_objects(cache.pods(KEY))
    kept = read.kept_rendezvous
    return replace(observed, pods=read.pods, rendezvous=read.rendezvous, kept_rendezvous=kept)


def _look_alike(number: int) -> Pod:
    """Return a pod of any state, with a later attempt half of the time."""
    code = (None, 0, 1, 3)[number % 4]
    phase = "Running" if code is None else "Succeeded" if code == 0 else "Failed"
    attempt, index = (1, 999_999)[number // 4 % 2], number // 8 % 5
    name = f"stranger-{number}" if number % 3 else f"{names.rendezvous('job')}-{number}"
    pod = Pod(name, name, index, attempt, replacement=99, phase=phase, exit_code=code)
    return replace(pod, node="a", started=1.0, finished=None if code is None else 2.0)


def with_changes(pod: Pod, changes: dict[str, dict[str, str | None]]) -> Pod:
    """Return the job's ``pod`` as it is read after ``changes`` of labels and annotations; None removes."""
    manifest = as_manifest(pod, [OWNER])
    for field, values in changes.items():
        merged = {**manifest["metadata"][field], **values}
        manifest["metadata"][field] = {k: v for k, v in merged.items() if v is not None}
    return Pod.from_object(kept_fields.trimmed(manifest))


def as_manifest(pod: Pod, owners: list[Manifest]) -> Manifest:
    """Return the pod as the API server returns it."""
    component = names.RENDEZVOUS if "rendezvous" in pod.name else names.TRAINER
    metadata: dict[str, Any] = {
        "name": pod.name,
        "namespace": KEY[0],
        "uid": pod.uid,
        "ownerReferences": owners,
        "creationTimestamp": stamp(pod.created),
        "labels": {
            **names.labels("job", component),
            names.LABEL_INDEX: str(pod.index),
            names.LABEL_ATTEMPT: str(pod.attempt),
        },
        "annotations": {
            names.ANNOTATION_SPEC: pod.spec_hash,
            names.ANNOTATION_REVISION: pod.revision,
            names.ANNOTATION_NODES: f"{pod.nodes[0]}:{pod.nodes[1]}",
            names.ANNOTATION_REPLACEMENT: str(pod.replacement),
            names.ANNOTATION_ENDED: f"{pod.ended_generation[0]}:{pod.ended_generation[1]}",
            names.ANNOTATION_RENDEZVOUS: pod.rendezvous_version,
            **({names.ANNOTATION_DISTRUSTED: "a"} if pod.excludes_nodes else {}),
        },
    }
    for key in pod.changed_labels:
        del metadata["labels"][key]
    if pod.deletion_deadline is not None:
        metadata["deletionTimestamp"] = stamp(pod.deletion_deadline)
    if pod.forced:
        metadata["deletionGracePeriodSeconds"] = 0
    if pod.finalizers:
        metadata["finalizers"] = list(pod.finalizers)
    state: Manifest = {}
    if pod.ended:
        times = {"startedAt": stamp(pod.started or 0.0), "finishedAt": stamp(pod.finished or 0.0)}
        state = {"terminated": {"exitCode": pod.exit_code, **times}}
    elif pod.started is not None:
        state = {"running": {"startedAt": stamp(pod.started)}}
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    ready = {"type": "Ready", "status": str(pod.ready)}
    status = {
        "phase": pod.phase,
        "reason": pod.reason,
        "conditions": [ready, *([gated] if pod.gated else []), *_disruption(pod)],
        "containerStatuses": [{"name": component, "state": state}],
    }
    return {"metadata": metadata, "spec": _spec(pod, component), "status": status}


def _disruption(pod: Pod) -> list[Manifest]:
    if not pod.disruption:
        return []
    message = pod.disruption_message.removeprefix(f"{pod.reason}: ")
    told = {"reason": pod.disruption, "message": message}
    return [{"type": "DisruptionTarget", "status": "True", **told}]


def _spec(pod: Pod, component: str) -> Manifest:
    """Return what nobody can change after the pod's creation."""
    nodes, (attempt, generation) = f"{pod.nodes[0]}:{pod.nodes[1]}", pod.ended_generation
    variables = {"PET_NNODES": nodes, "PET_RDZV_ID": f"uid-job-{pod.attempt}"}
    ended = f"{attempt}:{generation}" if attempt else ""
    container: Manifest = {"name": component, "args": [f"--nodes={nodes}", f"--ended={ended}"]}
    if component == names.TRAINER:
        env = [{"name": name, "value": value} for name, value in variables.items()]
        container = {"name": component, "env": env}
    if pod.has_probe:
        container["livenessProbe"] = {"httpGet": {"port": 9464}}
    config = {"name": pod.revision}
    volumes = [{"name": "config", "configMap": config}]
    gates = [{"name": gate} for gate in pod.gates]
    spec = {"nodeName": pod.node, "containers": [container], "volumes": volumes}
    return {**spec, **({"schedulingGates": gates} if gates else {})}
