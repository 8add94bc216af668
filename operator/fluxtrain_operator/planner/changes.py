"""The objects that a decision deletes and creates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fluxtrain_operator import names
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.planner.backoff import replacement_time
from fluxtrain_operator.planner.changed_labels import unwatched_pods
from fluxtrain_operator.planner.creations import blocking_failures, missing_objects, object_key
from fluxtrain_operator.planner.decision import Decision
from fluxtrain_operator.planner.disruption import Delete, Reason
from fluxtrain_operator.planner.exclusion import unschedulable_pods
from fluxtrain_operator.planner.failures import Failure
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.places import misses_places
from fluxtrain_operator.planner.pod_group import kept_pod, members_before
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.resources import DISRUPTION_BUDGET

_KEPT_GRACE_SECONDS = 30
"""Grace period of a pod that has outlived its attempt to keep Kueue's group."""
_PHASE_SECONDS = 30.0
"""If the pod's phase is not final this long after the main process exited, a sidecar still runs."""


def changes(situation: Situation, decision: Decision) -> tuple[list[Delete], list[Manifest]]:
    """Return what ``decision`` deletes and creates; ``situation`` is in the attempt that follows."""
    if decision.action in ("hold", "wait"):
        return [], []
    if decision.action == "suspend":
        pods = _stop(situation, situation.observed.pods, decision.cause)
        unwatched = _deletions(situation, unwatched_pods(situation), decision.cause)
        return [*pods, *unwatched, *budgets(situation.observed)], []
    if decision.action in ("complete", "fail"):
        return [*clean_up(situation)], []
    deletions = [
        *_removed_pods(situation, decision),
        *_removed_rendezvous(situation),
        *_deletions(situation, unwatched_pods(situation), Reason.LABEL_REMOVED),
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
        if kind in situation.removable_kinds:
            yield Delete(kind, name)


def _kept_config_maps(situation: Situation) -> Iterator[str]:
    """Yield the config maps to keep beside that of the revision: those of pods, and the one before."""
    job, status = situation.job, situation.job.status
    unchanged = situation.revision.name == status.revision
    before = status.previous_revision if unchanged else status.revision
    yield from [before] if before else []
    yield from (
        pod.revision or names.legacy_config_map(job.name) for pod in situation.observed.pods
    )


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
        pods = tuple(pod for pod in pods if _still_runs(pod, situation.now))
    yield from _stop(situation, pods, Reason.JOB_ENDED)
    if clean_pods != "None":
        yield from _deletions(situation, unwatched_pods(situation), Reason.JOB_ENDED)
    yield from budgets(situation.observed)


def clean_up_times(situation: Situation) -> Iterator[float]:
    """Yield the Unix times at which pods whose main process has exited count as running."""
    if situation.job.spec.lifecycle.clean_pods == "Running":
        for pod in situation.observed.pods:
            if pod.ended and not _has_final_phase(pod):
                yield _phase_deadline(pod)


def _still_runs(pod: Pod, now: float) -> bool:
    """Return whether a container runs; kubelet reports the exit code before the pod's final phase."""
    return not _has_final_phase(pod) and not (pod.ended and now < _phase_deadline(pod))


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
