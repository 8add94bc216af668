"""The objects that a job misses: which to create now, and how many pods were requested."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import count

from fluxtrain_operator import names
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.planner.create_failures import CreateFailure
from fluxtrain_operator.planner.decision import Decision
from fluxtrain_operator.planner.disruption import Delete, Reason
from fluxtrain_operator.planner.exclusion import avoided_nodes, distrusted_nodes
from fluxtrain_operator.planner.kept_pods import rendezvous_name
from fluxtrain_operator.planner.places import places
from fluxtrain_operator.planner.pod_group import num_places_taken, previous_indices
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.resources import Slot, key_secret, rendezvous_pod, training_pod

MAX_PODS_PER_PLAN = 64
"""Training pods that one plan creates; more follow in further plans, so that other jobs are not delayed."""


def missing_objects(
    situation: Situation, failures: tuple[CreateFailure, ...]
) -> Iterator[Manifest]:
    """Yield the objects to create now, the pods last as they mount others.

    Objects that failed are left out until their retry time. No pod is created while a supporting object
    fails or the API server rejects pods, nor the first ones while another object has the name of one.
    """
    waiting = [failure for failure in failures if failure.retry_time > situation.now]
    held = {(failure.kind, failure.name) for failure in waiting}
    is_new = not situation.observed.pods
    lacks_support = any(failure.kind != "Pod" for failure in failures)
    refused = lacks_support or any(is_new or not f.is_name_conflict for f in waiting)
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
    return tuple(failure for failure in failures if (failure.kind, failure.name) in needed)


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
    skipped = active | kept | {pod.index for pod in unreachable} | previous_indices(situation)
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
    """Return kind and name of the object in ``manifest``."""
    return manifest["kind"], manifest["metadata"]["name"]
