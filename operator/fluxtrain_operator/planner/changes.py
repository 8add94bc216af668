"""What a decision changes in the cluster: the objects that go, and those that come."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from fluxtrain_operator import names
from fluxtrain_operator.job import Manifest, digest
from fluxtrain_operator.planner.failures import due_again
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.obstacles import Blocker
from fluxtrain_operator.planner.rules import Decision
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.resources import Slot, rendezvous_pod, training_pod

MOST_PODS = 64
"""Training pods that one plan creates; a large job gets its pods in several, and others theirs in between."""
_PHASE_SECONDS = 30.0
"""A pod that has no last phase so long after its main process ended has a sidecar that goes on."""


@dataclass(frozen=True)
class Delete:
    """An object to delete; a pod only if it still has this ``uid``."""

    kind: str
    name: str
    uid: str = ""
    grace_seconds: int | None = None
    """None: the object's own grace; 0: by force."""


def changes(situation: Situation, decision: Decision) -> tuple[list[Delete], list[Manifest]]:
    """Return what ``decision`` deletes and creates; ``situation`` is in the attempt that it leads to."""
    if decision.action in ("hold", "wait"):
        return [], []
    if decision.action == "suspend":
        return [*_stop(situation, situation.observed.pods)], []
    if decision.action in ("complete", "fail"):
        return [*clean_up(situation)], []
    delete = [*_removals(situation, decision), *_stale_store(situation), *_unwanted(situation)]
    return delete, [*_missing(situation, in_the_way(situation, decision))]


def in_the_way(situation: Situation, decision: Decision) -> tuple[Blocker, ...]:
    """Return what keeps the objects from being made that ``decision`` wants and that are not there."""
    found = situation.observed.obstacles
    if not found or decision.action not in ("run", "restart"):
        return ()
    job = situation.job
    wanted = {_key(manifest) for manifest in situation.support}
    wanted |= {("Pod", names.pod(job.name, index)) for index in _free_indices(situation)}
    if situation.observed.rendezvous is None:
        wanted.add(("Pod", names.rendezvous(job.name)))
    return tuple(obstacle for obstacle in found if (obstacle.kind, obstacle.name) in wanted)


def _missing(situation: Situation, stuck: tuple[Blocker, ...]) -> Iterator[Manifest]:
    """Yield what is to be made now. Pods mount some of the objects around them, so these come first.

    No pod begins where others, of an earlier job or of nobody, still have the names of some; and none is
    tried where some were refused a moment ago.
    """
    blocked = [obstacle for obstacle in stuck if obstacle.due > situation.now]
    held = {(obstacle.kind, obstacle.name) for obstacle in blocked}
    yield from (manifest for manifest in _missing_support(situation) if _key(manifest) not in held)
    is_new = not situation.observed.pods
    lacks_support = any(obstacle.kind != "Pod" for obstacle in stuck)
    if not lacks_support and not any(is_new or not obstacle.is_taken for obstacle in blocked):
        yield from _missing_pods(situation, {name for _, name in held})


def _removals(situation: Situation, decision: Decision) -> Iterator[Delete]:
    """Yield the pods that are of another attempt, lost, failed, or too many."""
    yield from _deletions(situation, situation.old, decision.grace_seconds)
    spare = situation.kept[situation.job.spec.nodes.max :]
    failed = [f.pod for f in situation.faults if due_again(f, 0) <= situation.now]
    lost = [p for p in situation.current if _lost(situation, p)]
    going = {pod.name: pod for pod in (*spare, *failed, *lost)}
    yield from _deletions(situation, going.values())


def _lost(situation: Situation, pod: Pod) -> bool:
    stuck = situation.out_of_reach(pod) and pod.deleting
    return stuck or situation.unreachable(pod) or situation.condemned(pod)


def _stale_store(situation: Situation) -> Iterator[Delete]:
    """Yield the rendezvous pod where it is lost, failed or made for another spec.

    On a lost node it goes by force only where the pods out there are too few to train on their own.
    """
    store = situation.observed.rendezvous
    if store is None:
        return
    lost = situation.unreachable(store)
    forced = lost and _cut_off_cannot_train(situation)
    outdated = not situation.job.is_made_for(store.spec_hash)
    if forced or ((lost or store.ended or outdated) and not store.deleting):
        yield _delete(store, 0 if forced else None)


def _cut_off_cannot_train(situation: Situation) -> bool:
    cut_off = sum(situation.unreachable(pod) for pod in situation.observed.pods)
    restart, nodes = situation.job.spec.restart, situation.job.spec.nodes
    return cut_off < nodes.min or restart.force_delete_on_lost_node


def _unwanted(situation: Situation) -> Iterator[Delete]:
    wanted = {_key(manifest) for manifest in situation.support}
    for kind, name in sorted(set(situation.observed.applied) - wanted):
        yield Delete(kind, name)


def _stop(situation: Situation, pods: tuple[Pod, ...]) -> Iterator[Delete]:
    """Yield ``pods``, and the store when none of them runs any more: losing it would end them hard."""
    yield from _deletions(situation, pods)
    store = situation.observed.rendezvous
    if store is not None and not store.deleting and all(pod.ended for pod in pods):
        yield _delete(store)


def clean_up(situation: Situation) -> Iterator[Delete]:
    """Yield the pods of a finished job that ``cleanPods`` does not keep."""
    kept = situation.job.spec.lifecycle.clean_pods
    pods = situation.observed.pods
    if kept == "None":
        pods = ()
    elif kept == "Running":
        pods = tuple(pod for pod in pods if _outlives_job(pod, situation.now))
    yield from _stop(situation, pods)


def clean_up_due(situation: Situation) -> Iterator[float]:
    """Yield the Unix times at which pods that have ended count as running none the less."""
    if situation.job.spec.lifecycle.clean_pods == "Running":
        yield from (_settled_at(p) for p in situation.observed.pods if p.ended and not _is_over(p))


def _outlives_job(pod: Pod, now: float) -> bool:
    """Return whether a pod runs on; kubelet tells of the exit code first, and of the phase a moment later."""
    return not _is_over(pod) and not (pod.ended and now < _settled_at(pod))


def _is_over(pod: Pod) -> bool:
    return pod.phase in ("Succeeded", "Failed")


def _settled_at(pod: Pod) -> float:
    return (pod.finished or pod.created) + _PHASE_SECONDS


def _deletions(
    situation: Situation, pods: Iterable[Pod], grace_seconds: int | None = None
) -> Iterator[Delete]:
    """Yield ``pods`` that are not going yet; those out of reach by force where that is safe or allowed."""
    allowed = situation.job.spec.restart.force_delete_on_lost_node
    for pod in pods:
        if situation.out_of_reach(pod) and (pod.ended or allowed):
            if not pod.forced:
                yield _delete(pod, 0)
        elif not pod.deleting:
            yield _delete(pod, grace_seconds)


def _delete(pod: Pod, grace_seconds: int | None = None) -> Delete:
    return Delete("Pod", pod.name, pod.uid, grace_seconds)


def _missing_support(situation: Situation) -> Iterator[Manifest]:
    for manifest in situation.support:
        hashed = manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED]
        found = situation.observed.applied.get(_key(manifest))
        if found != hashed and not _is_first_config(situation, manifest, found):
            yield manifest


def _is_first_config(situation: Situation, manifest: Manifest, found: str | None) -> bool:
    """Return whether the first operators made the config map that there is, for this spec."""
    return manifest["kind"] == "ConfigMap" and found == digest(situation.job.first_spec_hash)


def _missing_pods(situation: Situation, held: Container[str]) -> Iterator[Manifest]:
    """Yield the pods that are to be created now; those whose names are ``held`` are tried later."""
    job = situation.job
    if situation.observed.rendezvous is None and names.rendezvous(job.name) not in held:
        yield rendezvous_pod(job, situation.avoid)
    free = [i for i in _free_indices(situation) if names.pod(job.name, i) not in held][:MOST_PODS]
    for index, number in zip(free, _replacements(situation, len(free)), strict=True):
        slot = Slot(
            index=index,
            attempt=situation.attempt,
            replacement=number,
            process_restarts=situation.restarts.process,
            avoid=situation.avoid,
        )
        yield training_pod(job, slot, situation.gang)


def _free_indices(situation: Situation) -> list[int]:
    """Return the indices at which a pod is to be created.

    A pod that is going still has its name, so its index waits for it. One that cannot be reached may
    never go, nor one that Kueue holds back in a group that goes on: the next index takes its place.
    """
    kept = {pod.index for pod in situation.kept}
    pods = situation.observed.pods
    unreachable = {pod.index for pod in pods if situation.unreachable(pod)}
    going_on = {situation.attempt, *(pod.attempt for pod in pods if situation.unreachable(pod))}
    held_back = {pod.index for pod in pods if pod.held_back and pod.attempt in going_on}
    taken = {pod.index for pod in pods}
    need = situation.job.spec.nodes.max - len(kept) - len(situation.counted_by_queue)
    places = (index for index in count() if index not in kept | unreachable | held_back)
    return [index for _, index in zip(range(need), places, strict=False) if index not in taken]


def _replacements(situation: Situation, num_created: int) -> list[int]:
    """Return the number of the replacement that each new pod is, 0 for those never asked for before.

    The count is in the pods: planning twice from the same picture makes the same pods.
    """
    num_first = max(0, situation.job.spec.nodes.max - _asked_before(situation))
    num_replaced = max(0, num_created - num_first)
    done = situation.restarts.pod
    return [*range(done + 1, done + 1 + num_replaced), *[0] * (num_created - num_replaced)]


def _asked_before(situation: Situation) -> int:
    """Return how many pods had been asked for in this attempt."""
    status = situation.job.status
    return status.nodes.desired if status.nodes and status.attempt == situation.attempt else 0


def asked_for(situation: Situation, decision: Decision, created: list[Manifest]) -> int:
    """Return how many pods have been asked for, these included; a first one is no replacement."""
    if decision.action in ("suspend", "wait", "complete", "fail"):
        return 0
    wanted, before = situation.job.spec.nodes.max, _asked_before(situation)
    stuck = in_the_way(situation, decision)
    if any(obstacle.kind != "Pod" for obstacle in stuck):
        return min(before, len(situation.current))
    retried = {obstacle.name for obstacle in stuck} | {names.rendezvous(situation.job.name)}
    pods = sum(m["kind"] == "Pod" and m["metadata"]["name"] not in retried for m in created)
    there = len(situation.current) + pods if decision.action != "hold" else before
    return wanted if there >= wanted else min(before, wanted - sum(o.is_first for o in stuck))


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
