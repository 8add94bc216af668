"""The objects that a decision deletes and creates."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.planner.faults import (
    avoided_nodes,
    distrusted_nodes,
    replacement_time,
    unschedulable_pods,
)
from fluxtrain_operator.planner.groups import (
    found_pods,
    held_by_previous,
    kept_pod,
    members_before,
    misses_places,
    num_places_taken,
    places,
    rendezvous_name,
)
from fluxtrain_operator.planner.guard import Delete, Failure, Reason
from fluxtrain_operator.planner.observed import (
    NAME_CONFLICT,
    RESTORED,
    CreateFailure,
    Observed,
    Pod,
)
from fluxtrain_operator.planner.situation import Decision, Situation
from fluxtrain_operator.resources.existing import removal, resource
from fluxtrain_operator.resources.pods import Slot, rendezvous_pod, training_pod
from fluxtrain_operator.resources.support import DISRUPTION_BUDGET
from fluxtrain_operator.resources.volumes import key_secret

_KEPT_GRACE_SECONDS = 30
"""Grace period of a pod that has outlived its attempt to keep Kueue's group."""
_REMOVABLE_KINDS = frozenset(("ConfigMap", DISRUPTION_BUDGET))
_PHASE_SECONDS = 30.0
"""If the pod's phase is not final this long after the main process exited, a sidecar still runs."""


def changes(situation: Situation, decision: Decision) -> tuple[list[Delete], list[Manifest]]:
    """Return what ``decision`` deletes and creates; ``situation`` is in the attempt that follows."""
    if decision.action in ("hold", "wait"):
        return [], []
    if decision.action == "suspend":
        pods = _stop(situation, situation.observed.pods, decision.cause)
        found = found_pods(situation, Reason.LABEL_REMOVED, Reason.RESTORED)
        others = _deletions(situation, found, decision.cause)
        return [*pods, *others, *budgets(situation.observed)], []
    if decision.action in ("complete", "fail"):
        return [*clean_up(situation)], []
    deletions = [
        *_removed_pods(situation, decision),
        *_removed_rendezvous(situation),
        *_deletions(situation, found_pods(situation, Reason.LABEL_REMOVED), Reason.LABEL_REMOVED),
        *_restored(situation),
        *_undesired(situation),
    ]
    return deletions, [*missing_objects(situation, blocking_failures(situation, decision))]


def _removed_pods(situation: Situation, decision: Decision) -> Iterator[Delete]:
    """Yield the pods of earlier attempts, and those that failed, are lost, or exceed ``nodes.max``."""
    yield from _previous_pods(situation, decision)
    removed = {pod.name: (pod, Reason.UNSCHEDULABLE) for pod in unschedulable_pods(situation)}
    removed |= {pod.name: (pod, Reason.SCALED_DOWN) for pod in _excess(situation)}
    for failure in situation.failures:
        if _is_replaced(situation, failure):
            removed[failure.pod.name] = failure.pod, Reason.POD_ENDED
    for pod in situation.current:
        if (fault := _node_fault(situation, pod)) is not None:
            removed[pod.name] = pod, fault
    for pod, reason in removed.values():
        yield from _deletions(situation, [pod], reason)


def _restored(situation: Situation) -> Iterator[Delete]:
    """Yield the pods that a backup brought back, once the revision that they run is stored as the job's."""
    if ("ConfigMap", situation.revision.name) in situation.observed.applied:
        yield from _deletions(situation, found_pods(situation, Reason.RESTORED), Reason.RESTORED)


def _excess(situation: Situation) -> list[Pod]:
    """Return the pods beyond ``nodes.max``: first those that do not run, then those of high indices."""
    kept_first = sorted(
        situation.active, key=lambda pod: (not pod.running, not pod.node, pod.index)
    )
    return kept_first[situation.job.spec.nodes.max :]


def _previous_pods(situation: Situation, decision: Decision) -> Iterator[Delete]:
    """Yield the pods of earlier attempts but the one that keeps Kueue's group.

    That one is deleted with the first new pod, and has little time: without its peers it saves nothing.
    """
    kept = kept_pod(situation)
    pods = [pod for pod in situation.previous if pod != kept]
    members = {pod.uid for pod in members_before(situation)}
    for pod in pods:
        is_late = decision.action != "restart" and pod.uid in members
        grace = _KEPT_GRACE_SECONDS if is_late else decision.grace_seconds
        yield from _deletions(situation, [pod], decision.cause, grace)


def _is_replaced(situation: Situation, failure: Failure) -> bool:
    """Return whether the pod of ``failure`` is replaced now; one of the program once that was decided."""
    if failure.infrastructure:
        return replacement_time(situation, failure) <= situation.now
    last = situation.pod_replacement
    return last is not None and failure.pod.uid in last.pods


def _node_fault(situation: Situation, pod: Pod) -> Reason | None:
    """Return why ``pod`` is replaced although it may still run; None if it is not."""
    stuck = situation.kubelet_unresponsive(pod) and pod.deleting
    if stuck or situation.unreachable(pod):
        return Reason.NODE_LOST
    return situation.guard.unhealthy_reason(pod)


def _removed_rendezvous(situation: Situation) -> Iterator[Delete]:
    """Yield the rendezvous pod if it is lost, has failed or was created for another spec.

    On a lost node it is force deleted if it has ended, or if the pods on lost nodes cannot train alone.
    """
    pod = situation.observed.rendezvous
    if pod is None:
        return
    lost = situation.unreachable(pod)
    has_ended = pod.ended and situation.kubelet_unresponsive(pod) and not pod.forced
    forced = has_ended or (lost and not _lost_pods_can_train(situation))
    reason = Reason.POD_ENDED if pod.ended else Reason.OUTDATED
    reason = Reason.NODE_LOST if lost else reason
    outdated = situation.is_outdated_rendezvous(pod) or misses_places(situation, pod)
    if forced or ((lost or pod.ended or outdated) and not pod.deleting):
        yield from _delete(situation, pod, reason, 0 if forced else None)


def _lost_pods_can_train(situation: Situation) -> bool:
    num_lost = sum(situation.unreachable(pod) for pod in situation.observed.pods)
    restart, nodes = situation.job.spec.restart, situation.job.spec.nodes
    return num_lost >= nodes.min and not restart.force_delete_on_lost_node


def _undesired(situation: Situation) -> Iterator[Delete]:
    """Yield the supporting objects that neither the spec asks for nor a pod mounts, of removable kinds."""
    desired = {object_key(manifest) for manifest in situation.supporting_objects}
    desired |= {("ConfigMap", name) for name in _kept_config_maps(situation)}
    for kind, name in sorted(set(situation.observed.applied) - desired):
        if kind in _REMOVABLE_KINDS:
            yield Delete(kind, name)


def _kept_config_maps(situation: Situation) -> Iterator[str]:
    """Yield the config maps to keep, apart from that of the revision: those of pods, and the one before."""
    status = situation.job.status
    unchanged = situation.revision.name == status.revision
    before = status.previous_revision if unchanged else status.revision
    yield from [before] if before else []
    yield from (pod.revision for pod in situation.observed.pods if pod.revision)


def _stop(situation: Situation, pods: tuple[Pod, ...], reason: Reason) -> Iterator[Delete]:
    """Yield ``pods``; the rendezvous pod only once all have exited: agents report to it that they leave."""
    yield from _deletions(situation, pods, reason)
    rendezvous = situation.observed.rendezvous
    if rendezvous is not None and not rendezvous.deleting and all(pod.ended for pod in pods):
        yield from _delete(situation, rendezvous, reason)


def budgets(observed: Observed) -> Iterator[Delete]:
    """Yield the disruption budget, if there is one: without pods it would count as violated."""
    for kind, name in observed.applied:
        if kind == DISRUPTION_BUDGET:
            yield Delete(kind, name)


def clean_up(situation: Situation) -> Iterator[Delete]:
    """Yield the pods of a finished job that ``cleanPods`` does not keep, and the disruption budget."""
    clean_pods = situation.job.spec.lifecycle.clean_pods
    pods = situation.observed.pods
    if clean_pods == "None":
        pods = ()
    elif clean_pods == "Running":
        # kubelet reports the exit code before the pod's final phase
        now, running = situation.now, (pod for pod in pods if not _has_final_phase(pod))
        pods = tuple(pod for pod in running if not (pod.ended and now < _phase_deadline(pod)))
    yield from _stop(situation, pods, Reason.JOB_ENDED)
    if clean_pods != "None":
        yield from _deletions(
            situation, found_pods(situation, Reason.LABEL_REMOVED), Reason.JOB_ENDED
        )
    yield from budgets(situation.observed)


def clean_up_times(situation: Situation) -> Iterator[float]:
    """Yield the Unix times at which pods whose main process has exited count as running."""
    if situation.job.spec.lifecycle.clean_pods == "Running":
        for pod in situation.observed.pods:
            if pod.ended and not _has_final_phase(pod):
                yield _phase_deadline(pod)


def _has_final_phase(pod: Pod) -> bool:
    return pod.phase in ("Succeeded", "Failed")


def _phase_deadline(pod: Pod) -> float:
    return (pod.finished or pod.created) + _PHASE_SECONDS


def _deletions(
    situation: Situation, pods: Iterable[Pod], reason: Reason, grace_seconds: int | None = None
) -> Iterator[Delete]:
    """Yield the ``pods`` not being deleted yet; those with unresponsive kubelets by force, if allowed."""
    allowed = situation.job.spec.restart.force_delete_on_lost_node
    for pod in pods:
        if situation.kubelet_unresponsive(pod) and (pod.ended or allowed):
            if not pod.forced:
                yield from _delete(situation, pod, reason, 0)
        elif not pod.deleting:
            yield from _delete(situation, pod, reason, grace_seconds)


def _delete(
    situation: Situation, pod: Pod, reason: Reason, grace_seconds: int | None = None
) -> Iterator[Delete]:
    """Yield the deletion of ``pod`` unless the guard refuses it: there is no other way to delete a pod."""
    if not situation.guard.refusal(reason, pod):
        yield Delete("Pod", pod.name, pod.uid, grace_seconds, reason)


MAX_PODS_PER_PLAN = 64
"""Training pods that one plan creates; more follow in further plans, so that other jobs are not delayed."""


def missing_objects(
    situation: Situation, failures: tuple[CreateFailure, ...]
) -> Iterator[Manifest]:
    """Yield the objects to create now, the pods last as they mount others.

    Objects that failed are left out until their retry time. No pod is created while a supporting object or
    the rendezvous pod fails or pods are rejected, nor the first ones while another object has a name.
    """
    waiting = [failure for failure in failures if failure.retry_time > situation.now]
    held = {(failure.kind, failure.name) for failure in waiting}
    is_new = not situation.observed.pods
    lacks_support = any(failure.kind != "Pod" for failure in failures)
    refused = (
        lacks_support
        or situation.include_rendezvous(waiting)
        or any(is_new or not f.is_name_conflict for f in waiting)
    )
    pods = [] if refused else [*_missing_pods(situation, {name for _, name in held})]
    again = {(failure.kind, failure.name) for failure in failures}
    again |= {("ConfigMap", situation.revision.name)} if pods else set()
    # it cannot be observed: it is created before pods, or tried again
    key = key_secret(situation.job)
    support = [
        *_missing_supporting(situation, again),
        *([key] if pods or object_key(key) in again else []),
    ]
    yield from (manifest for manifest in support if object_key(manifest) not in held)
    yield from pods


def blocking_failures(situation: Situation, decision: Decision) -> tuple[CreateFailure, ...]:
    """Return the create failures of missing objects that ``decision`` needs."""
    failures = situation.observed.create_failures
    if not failures or decision.action not in ("run", "restart"):
        return ()
    job = situation.job
    needed = {object_key(manifest) for manifest in situation.supporting_objects}
    pods = [names.pod(job.name, index) for index in _free_indices(situation)]
    if situation.observed.rendezvous is None:
        pods.append(rendezvous_name(situation))
    needed |= {("Pod", name) for name in pods}
    needed |= {object_key(key_secret(job))} if pods else set()
    blocking = (failure for failure in failures if (failure.kind, failure.name) in needed)
    return _conflicts_first(situation, list(blocking))


def is_settled(situation: Situation, failures: tuple[CreateFailure, ...]) -> bool:
    """Return whether all others' objects in the way are among ``failures``: all but the pods were tried."""
    if not failures or failures[0].reason not in (NAME_CONFLICT, RESTORED):
        return True
    found = {(failure.kind, failure.name) for failure in failures} | {*situation.observed.applied}
    return {object_key(manifest) for manifest in situation.supporting_objects} <= found


_MAX_OWNED = 3
"""Objects of others whose owners a message names."""
_RENAME = "give the job another name"


def _conflicts_first(
    situation: Situation, failures: list[CreateFailure]
) -> tuple[CreateFailure, ...]:
    """Return ``failures``, those by others' objects first, which have one message about all of them."""
    conflicts = [failure for failure in failures if failure.reason == NAME_CONFLICT]
    if not conflicts:
        return tuple(failures)
    versions = {object_key(m): m["apiVersion"] for m in situation.supporting_objects}
    free = [
        (resource(versions.get((failure.kind, failure.name), "v1"), failure.kind), failure.name)
        for failure in conflicts
        if not failure.owner
    ]
    command = removal(situation.job.namespace, free) if free else ""
    is_one = len(conflicts) == 1
    if len(free) == len(conflicts):
        remedy = f"delete or rename {'it' if is_one else 'them'}, or {_RENAME}: {command}"
    else:
        remedy = (
            f"{_RENAME}: {'its owner' if is_one else 'owners'} would create such an object again"
        )
        remedy = f"{remedy}; this deletes those without an owner: {command}" if free else remedy
    names_needed = f"{len(conflicts)} objects have names that the job needs: {_owners(conflicts)}"
    message = f"{conflicts[0].message if is_one else names_needed}; {remedy}"
    others = [failure for failure in failures if failure.reason != NAME_CONFLICT]
    return (*(replace(failure, message=message) for failure in conflicts), *others)


def _owners(conflicts: list[CreateFailure]) -> str:
    """Return who owns the objects in the way; of many only the first ones and a number."""
    owned = [f"{f.kind} {f.name} belongs to {f.owner}" for f in conflicts if f.owner]
    num_more, num_free = len(owned) - _MAX_OWNED, len(conflicts) - len(owned)
    return ", ".join(
        [
            *owned[:_MAX_OWNED],
            *([f"{num_more} more belong to others"] if num_more > 0 else []),
            *([f"{num_free} without an owner"] if num_free else []),
        ]
    )


def _missing_supporting(
    situation: Situation, again: Container[tuple[str, str]]
) -> Iterator[Manifest]:
    """Yield the supporting objects that are missing, differ from those applied last, or are in ``again``.

    The revision is applied again before pods are created: in between it may have been deleted or changed.
    """
    for manifest in situation.supporting_objects:
        desired = manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED]
        applied = situation.observed.applied.get(object_key(manifest))
        if applied != desired or object_key(manifest) in again:
            yield manifest


def _missing_pods(situation: Situation, held: Container[str]) -> Iterator[Manifest]:
    """Yield the pods to create now, except those with ``held`` names."""
    job = situation.job
    indices = [i for i in _free_indices(situation) if names.pod(job.name, i) not in held]
    indices = indices[:MAX_PODS_PER_PLAN]
    store = rendezvous_name(situation)
    needs_store = situation.observed.rendezvous is None and store not in held
    if not indices and not needs_store:
        return  # without a look at all nodes
    excluded = situation.guard.excluded_nodes
    if needs_store:
        avoided = avoided_nodes(situation, excluded)
        revision, ended = situation.revision, situation.ended_generation
        yield rendezvous_pod(job, excluded, avoided, revision, ended, places(situation), store)
    distrusted = distrusted_nodes(situation) if indices else ()
    avoided = avoided_nodes(situation, [*excluded, *distrusted]) if indices else ()
    for index, number in zip(indices, _replacements(situation, len(indices)), strict=True):
        slot = Slot(
            index=index,
            attempt=situation.attempt,
            group=situation.group,
            replacement=number,
            process_restarts=situation.restarts.process,
            charged_restarts=situation.charged_restarts,
            excluded_nodes=excluded,
            distrusted_nodes=distrusted,
            avoided_nodes=avoided,
        )
        yield training_pod(job, slot, situation.gang, situation.revision)


def _free_indices(situation: Situation) -> list[int]:
    """Return the indices at which a pod is to be created.

    The index of a pod that is being deleted stays reserved until its name is free. That of an unreachable
    pod, or of one whose object Kueue keeps in a group that goes on, or others' finalizers keep, is skipped,
    as that may take forever.
    """
    job, pods, queueing = situation.job, situation.observed.pods, situation.queueing
    active = {pod.index for pod in situation.active}
    unreachable = [pod for pod in pods if situation.unreachable(pod)]
    ongoing = {situation.attempt, *(pod.attempt for pod in unreachable)}
    ongoing |= {pod.attempt for pod in pods if pod.attempt >= situation.group}
    kept = {pod.index for pod in pods if queueing.keeps_name(pod) and pod.attempt in ongoing}
    kept |= {pod.index for pod in pods if pod.kept_by}
    skipped = active | kept
    skipped |= {pod.index for pod in (*unreachable, *held_by_previous(situation))}
    num_missing = job.spec.nodes.max - len(active) - num_places_taken(situation)
    candidates = (index for index in count() if index not in skipped)
    in_use = {pod.index for pod in pods}
    return [i for _, i in zip(range(num_missing), candidates, strict=False) if i not in in_use]


def _replacements(situation: Situation, num_created: int) -> list[int]:
    """Return the replacement number of each new pod, 0 for initial ones.

    The count is stored in the pods: planning twice from the same objects gives the same pods.
    """
    num_initial = max(0, situation.job.spec.nodes.max - _requested_before(situation))
    num_replaced = max(0, num_created - num_initial)
    done = situation.restarts.pod
    return [*range(done + 1, done + 1 + num_replaced), *[0] * (num_created - num_replaced)]


def num_requested_pods(
    situation: Situation,
    decision: Decision,
    created: list[Manifest],
    deleted: Sequence[Delete] = (),
) -> int:
    """Return how many pods of this attempt were requested, ``created`` included.

    From it follows whether a later pod is initial or a replacement. A pod that was never scheduled and may
    now run on more nodes is requested anew.
    """
    num_anew = sum(deletion.reason is Reason.UNSCHEDULABLE for deletion in deleted)
    return max(0, _num_requested(situation, decision, created) - num_anew)


def _num_requested(situation: Situation, decision: Decision, created: list[Manifest]) -> int:
    if decision.action in ("suspend", "wait", "complete", "fail"):
        return 0
    num_max, before = situation.job.spec.nodes.max, _requested_before(situation)
    failures = blocking_failures(situation, decision)
    if any(failure.kind != "Pod" for failure in failures):
        return min(before, len(situation.current))
    if situation.include_rendezvous(failures) and not situation.current:
        return 0  # no training pod is created without it
    retried = {failure.name for failure in failures} | {rendezvous_name(situation)}
    num_new = sum(m["kind"] == "Pod" and m["metadata"]["name"] not in retried for m in created)
    num_pods = len(situation.current) + num_new if decision.action != "hold" else before
    if num_pods >= num_max:
        return num_max
    return min(before, num_max - sum(failure.is_initial for failure in failures))


def _requested_before(situation: Situation) -> int:
    """Return how many pods of this attempt were requested so far."""
    status = situation.job.status
    return status.nodes.desired if status.nodes and status.attempt == situation.attempt else 0


def object_key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
