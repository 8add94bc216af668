"""A small simulated cluster with one job, which checks the planner's invariants.

It simulates what the API server, the kubelets, Kueue, the trainers and a user do to pods, by nodes' clocks of
their own. The operator reads it through delayed watches, and writes to it with optimistic concurrency.
Kueue treats pods as 0.9 does: a group is admitted as a whole; its pods keep a finalizer until they are
replaced or the group ends, with its last pod, as our pods are not retriable; a pod of a lost node runs, and a
replacement of it is an excess pod.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from tests.operator.jobs import make_training
from tests.operator.planner.invariants import (
    check_faults,
    check_reasons,
    check_restart_in_place,
    with_changes,
    with_look_alikes,
)

from fluxtrain.contract.process import SAVE, STEP
from fluxtrain.contract.resource.status import ProgressStatus, Status
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.names import Transition, seconds, stamp, transition
from fluxtrain_operator.base.node_health import Distrust, Fault, ordered, score
from fluxtrain_operator.base.reports import MembersReport, ProcessRestart, Progress, RankProgress
from fluxtrain_operator.planner.guard import NODE_FAULTS, Delete, Reason
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import Plan, load, plan, revision_to_read
from fluxtrain_operator.planner.status import finished
from fluxtrain_operator.resources import DISRUPTION_BUDGET

_Remove = Callable[[Pod], None]
Put = Callable[[Pod, Pod | None], None]
ENOUGH = 1000
"""A quota, in pods, that admits all groups."""


@dataclass
class Group:
    """The workload of a pod group."""

    total: int
    is_admitted: bool = False
    is_evicted: bool = False
    has_finished: bool = False


class SmallKueue:
    """One queue. Pods are changed by ``put`` and deleted by ``delete``, as by the API server."""

    def __init__(self, put: Put, delete: _Remove) -> None:
        self._put, self._delete = put, delete
        self.quota = ENOUGH
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}
        """Names of groups by the uid of their members."""
        self._totals: dict[str, int] = {}
        """How many pods the group has, as each of its members tells, by uid."""
        self.num_excess = 0
        """Pods that were deleted as a group had more than its number."""

    def mutate(self, pod: Pod, manifest: Manifest) -> Pod:
        """Return the new ``pod`` after the webhook: with a gate and a finalizer, if it is of a group."""
        metadata = manifest["metadata"]
        group = metadata["labels"].get(names.KUEUE_GROUP)
        if group is None:
            return pod
        assert metadata["annotations"][names.KUEUE_RETRIABLE] == "false"
        self._totals[pod.uid] = int(metadata["annotations"][names.KUEUE_COUNT])
        self._group_of[pod.uid] = group
        gate, finalizer = (names.KUEUE_GATE,), (names.KUEUE_FINALIZER,)
        gated = replace(pod, gated=True, gates=gate, waiting="SchedulingGated")
        return replace(gated, finalizers=finalizer)

    def group_of(self, pod: Pod) -> str:
        """Return the name of the pod's group; empty without one."""
        return self._group_of.get(pod.uid, "")

    def act(self, pods: Collection[Pod]) -> None:
        """Reconcile all groups of ``pods`` once; workloads without pods are garbage collected."""
        members: dict[str, list[Pod]] = {}
        for pod in pods:
            if group := self.group_of(pod):
                members.setdefault(group, []).append(pod)
        self.groups = {name: group for name, group in self.groups.items() if name in members}
        for name in sorted(members):
            self._reconcile(name, members[name])

    def evict(self) -> None:
        """Evict the admitted groups, as for one of a higher priority."""
        for group in self.groups.values():
            group.is_evicted = group.is_admitted and not group.has_finished

    def delete_workloads(self, pods: Collection[Pod]) -> None:
        """Delete the workloads: Kueue deletes their pods, and manages them no more."""
        for pod in pods:
            if self.group_of(pod) in self.groups:
                self._delete(pod)
        self.groups = {}

    def _reconcile(self, name: str, pods: list[Pod]) -> None:
        group = self.groups.get(name)
        active = [pod for pod in pods if _is_active(pod)]
        inactive = [pod for pod in pods if not _is_active(pod)]
        if group is None and all(pod.ended for pod in pods):
            return self._release(pods)  # as of a group that has ended
        if group is None:
            self._release(inactive)
            inactive = []
            totals = {self._totals[pod.uid] for pod in active}
            if len(totals) != 1 or len(active) < max(totals):
                return  # not whole, or its pods tell two numbers
            group = self.groups[name] = Group(max(totals))
        if group.has_finished:
            return self._release(pods)
        self._remove_excess(active, group.total)
        num_replaced = len(inactive) + len(active) - group.total
        inactive.sort(key=lambda pod: pod.finished or pod.deletion_deadline or pod.created)
        self._release(inactive[: max(0, num_replaced)])
        if all(pod.phase in ("Failed", "Succeeded") for pod in pods):
            group.has_finished = True
        elif group.is_evicted:
            self._stop(group, active)
        else:
            self._admit(group, active[: group.total])

    def _remove_excess(self, active: list[Pod], total: int) -> None:
        active.sort(key=lambda pod: (not pod.finalizers, pod.gated, int(pod.uid)))
        for pod in active[total:]:
            self.num_excess += 1
            self._put(pod, kept := replace(pod, finalizers=()))
            self._delete(kept)
        del active[total:]

    def _stop(self, group: Group, active: list[Pod]) -> None:
        for pod in active:
            if not (pod.gated or pod.deleting):
                self._delete(pod)
        if not any(pod.phase == "Running" for pod in active):
            group.is_admitted = group.is_evicted = False

    def _admit(self, group: Group, active: list[Pod]) -> None:
        used = sum(other.total for other in self.groups.values() if other.is_admitted)
        if not group.is_admitted and used + group.total <= self.quota:
            group.is_admitted = True
        for pod in active if group.is_admitted else ():
            if pod.gated and not pod.deleting:
                self._put(pod, replace(pod, gated=False, gates=(), waiting=""))

    def _release(self, pods: list[Pod]) -> None:
        """Remove the finalizer of ``pods``: those that are being deleted and do not run are gone."""
        for pod in pods:
            is_gone = pod.deleting and (pod.ended or pod.forced or not pod.node)
            if pod.finalizers:
                self._put(pod, None if is_gone else replace(pod, finalizers=()))


def _is_active(pod: Pod) -> bool:
    """Return whether Kueue counts ``pod``: it runs, will run or has succeeded."""
    return pod.phase != "Failed" and bool(pod.node or not pod.deleting)


class NodeClocks:
    """Nodes whose clocks are ahead by ``offsets``, in seconds by name, watched by one leader at a time."""

    def __init__(self, offsets: Mapping[str, float]) -> None:
        self.offsets = offsets
        self._known: set[str] = set()
        self._transitions: dict[tuple[str, float], Transition] = {}

    def change_leader(self) -> None:
        """Forget what was seen: another leader has another cache, which lists all objects at once."""
        self._known, self._transitions = set(), {}

    def watch(self, observed: Observed, now: float) -> None:
        """Let the leader's cache see what has changed ``now``, whatever it plans from."""
        self.seen(observed, now)

    def seen(self, observed: Observed, now: float) -> Observed:
        """Return ``observed``, which has true times, with those that the leader's cache has."""
        service, answer = observed.rendezvous, observed.progress
        told = self._told(answer, observed.pods, now) if answer is not None else None
        return replace(
            observed,
            pods=tuple(self._pod(pod, now) for pod in observed.pods),
            rendezvous=None if service is None else self._pod(service, now),
            nodes={name: self._node(node, now) for name, node in observed.nodes.items()},
            progress=told,
            any_progress=told or observed.any_progress,
        )

    def _pod(self, pod: Pod, now: float) -> Pod:
        newest, offset = pod.finished or pod.started, self.offsets.get(pod.node, 0.0)
        if newest is None:
            self._known.add(pod.uid)
            return pod
        shift = offset + self._transition(pod.uid, newest + offset, pod.created, now).shift
        return replace(
            pod,
            started=None if pod.started is None else pod.started + shift,
            finished=None if pod.finished is None else pod.finished + shift,
        )

    def _node(self, node: NodeView, now: float) -> NodeView:
        told = node.since + self.offsets[node.name]
        newest = self._transition(node.name, told, node.created, now)
        return replace(node, since=newest.time, reported_since=told)

    def _transition(self, name: str, told: float, created: float, now: float) -> Transition:
        """Return the transition that the leader knows; a watch that lags may tell an older one again."""
        newest = transition(
            told,
            self._transitions.get((name, told)),
            is_watched=name in self._known,
            earliest=created,
            now=now,
        )
        self._known.add(name)
        self._transitions[name, told] = newest
        return newest

    def _told(self, answer: Progress, pods: tuple[Pod, ...], now: float) -> Progress:
        """Return rank 0's ``answer`` as it is told now; one may be without ranks."""
        last = seconds(answer.status.last_step_time)
        if last is None or not answer.ranks:
            return answer
        node = next((pod.node for pod in pods if pod.uid == answer.ranks[0].pod), "")
        told = stamp(last + self.offsets.get(node, 0.0))
        status = answer.status.model_copy(update={"last_step_time": told})
        return replace(answer, status=status, seconds_since_step=now - last)


NODES = ("a", "b", "c", "d", "e")
RIGHT = (0.0,) * len(NODES)
"""By how many seconds the clocks of the nodes are ahead."""
MAX_RESTARTS = 2
STORAGE_CODE, STOPPED_CODE = 74, 75
PROGRAM_CODES, FATAL_CODE = (1, STORAGE_CODE), 3
_GRACE_SECONDS = 180
_RECENT_SECONDS = 30.0
_QUIET_ROUNDS = 5
"""Of 15 s each: progress counts as recent for a minute."""
_RECENT_OUTAGE_SECONDS = 3600.0
_MAX_SNAPSHOTS = 6
MAX_FAULTS_PER_MINUTE = 1
"""Pods that may be replaced for faults of nodes."""
_ALL_ACTS = 1000
_KEEPING = (Reason.NO_PROGRESS, Reason.PROGRAM_FAILED)
"""Causes of restarts of all pods after which these need no other places than before."""
DISRUPTIONS = (
    *("EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager"),
    "TerminationByKubelet",
)
REJECTIONS = ("UnexpectedAdmissionError", "OutOfcpu", "NodeAffinity", "NodeShutdown")
Planner = Callable[[Job, Observed, float], Plan]


class Size(NamedTuple):
    """The fields of a job that determine how it recovers."""

    low: int
    high: int
    force: bool
    """Whether pods of a lost node may be deleted by force."""
    gpus: int = 0
    """GPUs of each node."""
    is_queued: bool = False
    """Whether the pods of an attempt are a group of Kueue's."""


@dataclass(frozen=True)
class Snapshot:
    """What the watches report after one change."""

    number: int
    """Changes before this one."""
    version: int
    """The job's resourceVersion."""
    spec: tuple[bool, Size, str]
    """Arguments of `make_job`."""
    status: Status
    observed: Observed


@dataclass(frozen=True)
class Container:
    """A running container; it may outlive the object of its pod."""

    index: int
    node: str


@cache
def make_job(suspend: bool, size: Size, image: str, operator: str) -> Job:
    """Return the job; what follows from its spec is computed once. ``operator`` is the default image."""
    spec = {
        **({"image": image} if image else {}),
        "nodes": {"min": size.low, "max": size.high},
        "lifecycle": {"suspend": suspend, "cleanPods": "All"},
        "restart": {"maxRestarts": MAX_RESTARTS, "forceDeleteOnLostNode": size.force},
        "gpusPerNode": size.gpus,
        **({"scheduling": {"queueName": "team"}} if size.is_queued else {}),
    }
    job = load(make_training(spec), operator)
    assert job.spec_hash
    return job


def with_status(job: Job, status: Status) -> Job:
    changed = copy.copy(job)
    training = job.training.model_copy(update={"status": status})
    vars(changed)["training"] = training  # its hash and config stay computed
    return changed


class Mute(NamedTuple):
    """Endpoints that a firewall or a service mesh blocks."""

    trainers: Literal["none", "rank 0", "all"] = "none"
    members: Literal["none", "one pod", "all"] = "none"
    """Of the rendezvous service, at /members and /progress; or the heartbeats of one pod."""


class Save(NamedTuple):
    """A checkpoint for which all ranks wait."""

    since: float
    until: float
    progresses: bool
    """Whether ranks report progress meanwhile."""


class SmallCluster:
    """Pods by name, nodes, one job. Raises AssertionError if the planner violates an invariant."""

    def __init__(
        self, size: Size, planner: Planner = plan, offsets: Sequence[float] = RIGHT
    ) -> None:
        self.clocks = NodeClocks(dict(zip(NODES, offsets, strict=True)))
        self.size, self.planner, self.image, self.suspend = size, planner, "", False
        self.operator = "operator:0"
        """Default image of the present version of the operator."""
        self.revisions: dict[str, Revision] = {}
        self.fault_times: list[float] = []
        """Times at which pods were deleted for faults of nodes."""
        self.old_trainers = False
        """Whether the trainers report no ranks, so that they cannot restart in place."""
        self.look_alikes = 0
        """Which pods of strangers there are; 0 for none."""
        self.changes: dict[str, dict[str, dict[str, str | None]]] = {}
        """By uid, changed labels and annotations of pods; None for removed ones."""
        self.now, self.version, self.num_uids = 1_800_000_000.0, 0, 0
        self.status = Status()
        self.progress: ProgressStatus | None = None
        self.pods: dict[str, Pod] = {}
        self.store: Pod | None = None
        self.kept_stores: list[Pod] = []
        """Earlier rendezvous pods, which a stranger's finalizer keeps."""
        self.containers: dict[str, Container] = {}
        self.excluded: dict[str, tuple[str, ...]] = {}
        """By uid, the nodes that pods may not run on."""
        self.applied: dict[tuple[str, str], str] = {}
        self.kueue = SmallKueue(self._put, self.remove)
        has_gpus = size.gpus > 0
        self.nodes = {n: NodeView(n, since=self.now, has_gpus=has_gpus) for n in NODES}
        self.down: set[str] = set()
        """Nodes that are down; on other nodes that are not ready, all containers run on."""
        self.world: tuple[str, ...] = ()
        """Uids of the pods that made the last step."""
        self.disrupted: dict[str, Pod] = {}
        """Pods that a drain, the scheduler, a taint or a node's shutdown has taken, by uid."""
        self.num_program_faults = self.num_hangs = self.num_fatal = self.num_process_faults = 0
        self.failed_life: float | None = None
        """When the program first failed in a pod since the last step."""
        self.late_failures: set[str] = set()
        """Uids of the pods that failed after that one, without a step between."""
        self.told: dict[int, dict[str, tuple[int, ...]]] = {}
        """By attempt, the generations that ended by failed trainers, as each pod's agent tells them."""
        self.heard_by_service: tuple[str, dict[int, str]] = "", {}
        """Uid of the rendezvous pod, and the agent of each restart that it has heard of."""
        self.generation = (0, 0)
        """Attempt of the trainers, and their generation."""
        self.began = self.now
        """When the processes of that generation started."""
        self.hung = ""
        """What must restart before there is another step: ``processes``, ``pods``, or nothing."""
        self.mute = Mute()
        """Which endpoints do not answer, whatever runs."""
        self.saving: Save | None = None
        """The checkpoint that the gang waits for."""
        self.stop_seconds = 0.0
        """How long a trainer writes its checkpoint after SIGTERM."""
        self.stopped: dict[str, float] = {}
        """By uid, when pods that are being deleted will have written it."""
        self.happened: Counter[str] = Counter()
        """Number of each anomaly of the watches and the operator."""
        self.snapshots: list[Snapshot] = []
        self.read = (0, 0)
        """Numbers of the snapshots of the job and the pods that the operator read last."""
        self.snapshot()

    # --- the watches

    def snapshot(self) -> None:
        """Append a snapshot of the present state."""
        last = self.snapshots[-1] if self.snapshots else None
        answer = self._answer()
        is_rank_0 = answer is not None and answer.rank == 0 and not answer.by_agents
        observed = Observed(
            pods=tuple(sorted(map(self._seen, self.pods.values()), key=lambda pod: pod.index)),
            rendezvous=self._seen(self.store) if self.store else None,
            kept_rendezvous=tuple(self.kept_stores),
            progress=answer if is_rank_0 else None,
            any_progress=answer,
            heard=self._heard(),
            nodes=self.nodes,
            distrust=self._distrust(),
            applied=self.applied,
            gone=self._gone(),
        )
        self.clocks.watch(observed, self.now)
        self.snapshots = [
            *self.snapshots[1 - _MAX_SNAPSHOTS :],
            Snapshot(
                last.number + 1 if last is not None else 0,
                self.version,
                (self.suspend, self.size, self.image),
                self.status,
                observed,
            ),
        ]

    def _gone(self) -> tuple[Pod, ...]:
        """Return the disrupted pods that are gone and not counted, as the cache keeps them."""
        counted = self.status.restarts.counted_pods if self.status.restarts else []
        return tuple(
            pod
            for uid, pod in self.disrupted.items()
            if uid not in counted and uid not in {p.uid for p in self.pods.values()}
        )

    def _seen(self, pod: Pod) -> Pod:
        """Return ``pod`` as the operator reads it, after what somebody has changed of it."""
        changes = self.changes.get(pod.uid)
        return with_changes(pod, changes) if changes else pod

    def change(self, pod: Pod, field: str, key: str, value: str | None) -> None:
        """Let somebody change a label or annotation of ``pod``; None removes it."""
        self.changes.setdefault(pod.uid, {}).setdefault(field, {})[key] = value

    def hold(self, pod: Pod) -> None:
        """Let a stranger set a finalizer that keeps ``pod``; not in a queue, where finalizers are Kueue's."""
        if not (self.size.is_queued or pod.finalizers):
            self._put(pod, replace(pod, finalizers=("example.org/audit",)))

    def _distrust(self) -> Distrust:
        """Return the distrust of the nodes by the faults in the job's status, as a new leader sums them."""
        known = self.status.node_faults
        faults = [Fault(f.node, f.reason, seconds(f.time) or 0.0) for f in known]
        scores = {
            node: score([f for f in faults if f.node == node], self.now)
            for node in {fault.node for fault in faults}
        }
        return ordered(scores, self.now)

    def _answer(self) -> Progress | None:
        """Return rank 0's answer; another rank's, or what agents report, if it does not answer."""
        if self.progress is None:
            return None
        last = seconds(self.progress.last_step_time) or 0.0
        silent, phase = self.now - max(last, self.began), STEP
        if self.saving is not None:
            phase, silent = SAVE, 1.0 if self.saving.progresses else self.now - self.saving.since
        step, generation = self.progress.step, self.generation[1]
        number = int(self.mute.trainers == "rank 0")
        pod = self.world[min(number, len(self.world) - 1)] if self.world else ""
        rank = RankProgress(number, phase, step, silent, 1.0, pod=pod, generation=generation)
        ranks = () if self.old_trainers else (rank,)
        if self.mute.trainers == "none":
            return Progress(self.progress, phase=phase, num_nodes=len(self.world), ranks=ranks)
        if self.mute.trainers == "rank 0" and len(self.world) > 1 and ranks:
            nodes = len(self.world)
            return Progress(ProgressStatus(), rank=1, phase=phase, num_nodes=nodes, ranks=ranks)
        if not ranks or self._service() is None:
            return None
        return Progress(ProgressStatus(), rank=number, phase=phase, ranks=ranks, by_agents=True)

    def _service(self) -> Pod | None:
        """Return the rendezvous pod if it answers."""
        is_up = self.store is not None and self.store.running and self._reaches(self.store)
        return self.store if is_up and self.mute.members != "all" else None

    def _heard(self) -> MembersReport:
        """Return the members that the rendezvous service reports, if it answers."""
        if self._service() is None:
            return MembersReport()
        running = {pod.uid for pod in self.pods.values() if pod.running}
        alive = {pod.uid for pod in self._gang()}
        lost = running - alive
        if self.mute.members == "one pod":
            alive -= {min(running, default="")}
            lost -= {min(running, default="")}
        attempt = max((pod.attempt for pod in self._gang()), default=0)
        restarts = tuple(
            ProcessRestart(generation, "ProcessKilled", pod)
            for generation, pod in sorted(self._restarts(attempt).items())
        )
        if len(lost) > len(alive):
            return MembersReport(attempt=attempt, restarts=restarts)
        return MembersReport(frozenset(alive), frozenset(lost), attempt, restarts)

    def _restarts(self, attempt: int) -> dict[int, str]:
        """Return the restarts of ``attempt`` that the service has heard of; a new one starts empty."""
        key = f"{self.store.uid if self.store else ''}/{attempt}"
        if self.heard_by_service[0] != key:
            self.heard_by_service = key, {}
        living = {pod.uid for pod in self._gang()}
        for pod, generations in self.told.get(attempt, {}).items():
            if pod in living:
                self.heard_by_service[1].update(dict.fromkeys(generations, pod))
        return self.heard_by_service[1]

    def fail_trainers(self, number: int) -> None:
        """Let trainers of the gang fail: their agents, one or more, restart them all and tell it."""
        gang = self._gang()
        if len(gang) < self.size.low or self.num_process_faults >= MAX_RESTARTS:
            return
        self._regroup()
        attempt, generation = self.generation
        told = self.told.setdefault(attempt, {})
        for pod in gang[number % len(gang) :]:
            told[pod.uid] = (*told.get(pod.uid, ()), generation)
        self.num_process_faults += 1
        self._start_processes((attempt, generation + 1), "processes")

    def _read(self, known: Snapshot, seen: Snapshot) -> tuple[Job, Observed]:
        """Return the job, and what the operator observes, with the revision that it reads."""
        job = with_status(make_job(*known.spec, self.operator), known.status)
        recent = sum(self.now < time + 60.0 for time in self.fault_times)
        left = MAX_FAULTS_PER_MINUTE - recent
        observed = self.clocks.seen(seen.observed, self.now)
        name = revision_to_read(job, observed, self.now)
        revision = self.revisions.get(name) if name is not None else None
        return job, replace(observed, disruptions_left=left, revision=revision)

    def _note(self, job: int, pods: int) -> None:
        """Count the anomalies of the snapshots that the operator reads."""
        old_job, old_pods = self.read
        anomalies = {
            "lost": job > old_job + 1 or pods > old_pods + 1,
            "repeated": (job, pods) == self.read,
            "reordered": job != pods or job < old_job or pods < old_pods,
            "stale": min(job, pods) < self.snapshots[-1].number,
        }
        self.happened.update(name for name, holds in anomalies.items() if holds)
        self.read = (job, pods)

    # --- the operator

    def reconcile(self, job_age: int = 0, pods_age: int = 0, num_acts: int = _ALL_ACTS) -> Plan:
        """Plan from snapshots of the given ages; crash after ``num_acts`` requests."""
        known = self.snapshots[-1 - job_age % len(self.snapshots)]
        seen = self.snapshots[-1 - pods_age % len(self.snapshots)]
        self._note(known.number, seen.number)
        job, observed = self._read(known, seen)
        result = self.planner(job, observed, self.now)
        check_reasons(job, observed, result, self.now)
        check_restart_in_place(result)
        check_faults(observed, result)
        if self.look_alikes:
            crowded = with_look_alikes(observed, self.look_alikes, self.now)
            same = self.planner(job, crowded, self.now)
            assert same == result, "a decision depends on an object that is not the job's"
        if result.status != known.status or result.delete or result.create:
            if known.version != self.version:
                self.happened["refused"] += 1  # by the API server: the job has changed since
                return result
            self._write(result.status)
        if seen.number == self.snapshots[-1].number:
            self._check_lost(result, observed)
            self._check_group(result)
            self._check_grace(result)
        acts: list[Delete | Manifest] = [*result.delete, *result.create]
        if len(acts) > num_acts:
            self.happened["died"] += 1
            self.clocks.change_leader()
        for act in acts[:num_acts]:
            if isinstance(act, Delete):
                self._delete(act)
            else:
                self._create(act)
        return result

    def _check_lost(self, result: Plan, observed: Observed) -> None:
        """Check that no node is lost while its pod tells of steps, or while most nodes are not ready."""
        lost = [e.message.partition(":")[0] for e in result.events if e.reason == "NodeLost"]
        since = [node.since for node in observed.nodes.values() if not node.ready]
        num_lately = sum(self.now - turned < _RECENT_OUTAGE_SECONDS for turned in since)
        outage = not self.num_ready or num_lately > self.num_ready
        last = self.progress.last_step_time if self.progress else None
        is_recent = last is not None and last > stamp(self.now - _RECENT_SECONDS)
        just_now = is_recent and self._answer() is not None
        living = {pod.uid for pod in self._gang()}
        for name in lost:
            assert not outage, "nothing is lost while most nodes are not ready"
            uid = pod.uid if (pod := self.pods.get(name)) else ""
            together = uid in self.world and living == set(self.world)
            assert not (together and just_now), "the node of a training pod counts as lost"

    def _check_grace(self, result: Plan) -> None:
        """Check that no pod is killed while its kubelet may still let it write a checkpoint."""
        for act in result.delete:
            pod = self.pods.get(act.name)
            if act.grace_seconds == 0 and pod is not None and pod.running and self._reaches(pod):
                late = pod.deletion_deadline is not None and self.now >= pod.deletion_deadline
                silent = pod.uid in self.snapshots[-1].observed.heard.silent
                assert late or silent, "a pod is killed before the end of its grace period"

    def _check_group(self, result: Plan) -> None:
        """Check that a restart of all pods keeps their group, if new pods can join it."""
        decision = result.decision
        if decision is None or decision.action != "restart" or decision.cause not in _KEEPING:
            return
        before = result.status.attempt - 1  # the status has been written
        members = [pod for pod in self.pods.values() if pod.attempt == before]
        left = [pod for pod in members if self._is_usable(pod)]
        held = [pod for pod in members if pod not in left and pod.phase != "Failed"]
        places = self.size.high - len(held)
        same = {pod.spec_hash for pod in left} <= {self._job.spec_hash}
        fits = same and {pod.nodes[1] for pod in members} == {self.size.high}
        is_member = left and names.KUEUE_FINALIZER in left[0].finalizers
        if is_member and fits and places >= max(2, self.size.low):
            assert result.status.group_attempt is not None, "a restart gives up its group"

    def _is_usable(self, pod: Pod) -> bool:
        faulty = pod.node and (self._is_marked(pod.node) or not self.nodes[pod.node].ready)
        silent = self.snapshots[-1].observed.heard.silent
        return not (pod.ended or pod.deleting or faulty or pod.uid in silent)

    @property
    def _job(self) -> Job:
        return make_job(self.suspend, self.size, self.image, self.operator)

    def _write(self, status: Status) -> None:
        before, after = self.status.restarts, status.restarts
        assert status == self.status or not finished(self.status), "a finished job stays as it is"
        assert status.attempt >= self.status.attempt, "attempts only grow"
        if after is not None:
            hung = any(c.reason == "NoProgress" for c in status.conditions)
            charged = (after.charged or 0) - after.process
            before_charged = (before.charged or 0) - before.process if before else 0
            self.num_hangs += hung and charged > before_charged
            assert charged <= MAX_RESTARTS, "more restarts than allowed"
            assert charged <= self.num_program_faults + self.num_hangs, "charged twice"
            assert after.process <= self.num_process_faults, "a restart is counted twice"
            named = sum(after.causes.get(reason, 0) for reason in DISRUPTIONS)
            assert named <= len(self.disrupted), "a disruption is counted twice"
            grown = before is None or (after.gang >= before.gang and after.pod >= before.pod)
            assert grown, "restarts only grow"
        self.version += status != self.status
        self.status = status

    def _delete(self, act: Delete) -> None:
        is_store = self.store is not None and act.name == self.store.name
        pod = self.store if is_store else self.pods.get(act.name)
        if act.kind != "Pod":
            self.applied = {k: v for k, v in self.applied.items() if k != (act.kind, act.name)}
            mounted = {pod.revision for pod in self.pods.values()}
            assert act.name not in mounted, "the revision of a pod is deleted"
            self.revisions.pop(act.name, None)
        elif pod is not None and pod.uid == act.uid:
            self._count_fault(act, pod)
            self.remove(pod, act.grace_seconds)

    def _count_fault(self, act: Delete, pod: Pod) -> None:
        if act.reason in NODE_FAULTS and not pod.deleting and not pod.ended:
            recent = [time for time in self.fault_times if self.now < time + 60.0]
            self.fault_times = [*recent, self.now]
            within = len(self.fault_times) <= MAX_FAULTS_PER_MINUTE
            assert within, "too many pods are replaced at a time for faults of nodes"

    def lose_revisions(self) -> None:
        """Delete the revisions, as a stranger does."""
        self.revisions = {}
        kept = {key: value for key, value in self.applied.items() if key[0] != "ConfigMap"}
        self.applied = kept

    def _create(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Secret":
            return
        if manifest["kind"] != "Pod":
            hashed = manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED]
            self.applied = {**self.applied, (manifest["kind"], name): hashed}
            if manifest["kind"] == "ConfigMap":
                revision = Revision.from_object("job", manifest)
                assert revision is not None, "the name of a revision is its hash"
                self.revisions[name] = revision
            return
        assert not finished(self.status), "a finished job is never started again"
        if name in self.pods:
            return  # AlreadyExists
        self.num_uids += 1
        pod = replace(Pod.from_object(manifest), uid=str(self.num_uids), created=self.now)
        self.excluded[pod.uid] = _excluded(manifest)
        pod = self.kueue.mutate(pod, manifest)
        if names.is_rendezvous("job", name):
            assert name not in {kept.name for kept in self.kept_stores}, "a name that is not free"
            self.store = self.store or pod
        else:
            assert pod.index not in {other.index for other in self.pods.values()}, "two for one"
            peers = [p for p in self.pods.values() if p.running and p.attempt == pod.attempt]
            revisions = {p.revision for p in peers if not p.deleting} | {pod.revision}
            assert len(revisions) == 1, "pods of two revisions in one attempt"
            assert pod.revision in self.revisions, "a pod without its revision"
            self.pods[name] = pod

    # --- the API server and the kubelets

    def remove(self, pod: Pod, grace_seconds: int | None = None) -> None:
        """Delete a pod: at once if forced, ended or not scheduled, but for a finalizer.

        Its container runs on.
        """
        is_immediate = grace_seconds == 0 or pod.ended or not pod.node
        if is_immediate and not pod.finalizers:
            self._put(pod, None)
        elif is_immediate or not pod.deleting:
            wait = _GRACE_SECONDS if grace_seconds is None else grace_seconds
            wait = 0 if is_immediate else wait
            self.stopped[pod.uid] = self.now + min(wait, self.stop_seconds)
            forced = pod.forced or grace_seconds == 0
            deleted = replace(pod, deleting=True, deletion_deadline=self.now + wait, forced=forced)
            self._put(pod, deleted)

    def _put(self, pod: Pod, changed: Pod | None) -> None:
        if self.store is not None and pod.name == self.store.name:
            is_kept = changed is not None and changed.kept_by != ()
            self.kept_stores += [changed] if changed is not None and is_kept else []
            self.store = None if is_kept else changed
        elif changed is None:
            self.pods.pop(pod.name)
        else:
            self.pods[pod.name] = changed

    def kubelet(self, pod: Pod) -> None:
        """Stop a pod that is being deleted, or start a new one, if there is a ready node."""
        if pod.deleting and self._reaches(pod):
            if not pod.ended and self.now < self.stopped.get(pod.uid, 0.0):
                return  # it writes its checkpoint
            self.containers.pop(pod.uid, None)
            self._put(pod, self._ended(pod, STOPPED_CODE) if pod.finalizers else None)
        elif not (pod.node or pod.ended or pod.gated or pod.deleting):
            ready = [name for name in NODES if self.nodes[name].ready]
            unmarked = [name for name in ready if not self._is_marked(name)]
            allowed = [name for name in ready if name not in self.excluded.get(pod.uid, ())]
            if up := unmarked or allowed or ready:
                self._start(pod, up[self.num_uids % len(up)])

    def _ended(self, pod: Pod, code: int | None) -> Pod:
        """Return ``pod`` after its main process exited with ``code``, or as failed if it has not run."""
        if pod.ended:
            return pod
        code = code if pod.started is not None else None
        phase = "Succeeded" if code == 0 else "Failed"
        return replace(pod, phase=phase, exit_code=code, finished=self.now, ready=False)

    def _is_marked(self, node: str) -> bool:
        view = self.nodes[node]
        return bool(view.problem or (self.size.gpus and view.unhealthy))

    def _start(self, pod: Pod, node: str) -> None:
        if pod.name in self.pods:
            others = {container.index for container in self.containers.values()}
            assert self.size.force or pod.index not in others, "two processes of one rank"
            self.containers[pod.uid] = Container(pod.index, node)
        self._put(pod, replace(pod, node=node, phase="Running", started=self.now, ready=True))

    def disrupted_by(self, pod: Pod, reason: str) -> Pod:
        """Return ``pod`` with the condition that a drain, the scheduler, a taint or a kubelet sets.

        They take training pods that run, the kubelet only while its node is ready.
        """
        is_taken = pod.name in self.pods and pod.running and not pod.deleting
        if not (reason and is_taken) or (reason == DISRUPTIONS[-1] and not self._reaches(pod)):
            return pod
        told = "told by another program"
        disrupted = replace(pod, disruption=reason, disruption_message=told)
        self.disrupted[pod.uid] = disrupted
        self._put(pod, disrupted)
        return disrupted

    def fail_probe(self, pod: Pod) -> None:
        """Let the kubelet stop a pod whose liveness probe fails."""
        if pod.running and pod.name in self.pods and not pod.deleting and self._reaches(pod):
            self._put(pod, probed := replace(pod, has_probe=True))
            self.end(probed, 143)

    def reject(self, pod: Pod, reason: str = REJECTIONS[0]) -> None:
        """Let the kubelet of a ready node reject a pod that is not scheduled yet."""
        up = [name for name in NODES if self.nodes[name].ready]
        waits = not (pod.node or pod.ended or pod.gated or pod.deleting)
        if up and waits and pod.name in self.pods:
            rejected = replace(pod, phase="Failed", reason=reason)
            self._put(pod, replace(rejected, node=up[0], finished=self.now))

    def mark(self, node: str) -> None:
        """Mark a node as unhealthy, or take the mark away."""
        view = self.nodes[node]
        problem = "" if view.problem else "condition KernelDeadlock=True"
        self.nodes = {**self.nodes, node: replace(view, problem=problem, problem_since=self.now)}

    def mark_gpus(self, nodes: Sequence[str]) -> None:
        """Mark the GPUs of ``nodes`` as unhealthy, or take the marks away."""
        for node in nodes:
            view = self.nodes[node]
            mark = "" if view.unhealthy else "label amd.com/gpu-health=unhealthy"
            marked = replace(view, unhealthy=mark, unhealthy_since=self.now)
            self.nodes = {**self.nodes, node: marked}

    def kill_orphans(self) -> None:
        """Stop the containers whose pods were force deleted, on ready nodes."""
        living = {pod.uid for pod in self.pods.values()}
        for uid, container in list(self.containers.items()):
            if uid not in living and self.nodes[container.node].ready:
                del self.containers[uid]

    def turn(self, node: str, down: bool) -> None:
        """Toggle the readiness of a node; a ``down`` one also stops its containers' training."""
        ready = not self.nodes[node].ready
        turned = replace(self.nodes[node], ready=ready, since=self.now)
        self.nodes = {**self.nodes, node: turned}
        self.down = self.down | {node} if down and not ready else self.down - {node}

    def repair(self) -> None:
        """Make all nodes ready and healthy, and the quota plentiful."""
        self.nodes = {
            name: replace(node, ready=True, problem="", unhealthy="")
            for name, node in self.nodes.items()
        }
        self.down = set()
        self.kueue.quota = ENOUGH

    def reconnect(self) -> None:
        """Make all endpoints reachable, and end the save."""
        self.mute, self.saving = Mute(), None

    @property
    def num_ready(self) -> int:
        return sum(node.ready for node in self.nodes.values())

    def _reaches(self, pod: Pod) -> bool:
        """Return whether the pod is on a ready node, or on none."""
        return not pod.node or self.nodes[pod.node].ready

    def some(self, number: int) -> Pod | None:
        pods = self.everything()
        return pods[number % len(pods)] if pods else None

    def everything(self) -> list[Pod]:
        return [*self.pods.values(), *([self.store] if self.store else [])]

    # --- the trainers and the user

    def end(self, pod: Pod, code: int | None) -> None:
        """Let the main process exit with ``code``, if its node is ready; None: evict it for its own limit."""
        if not pod.running or not self._reaches(pod):
            return
        self.containers.pop(pod.uid, None)
        reason = "Evicted" if code is None else ""
        told = pod.disruption_message
        told = f"{reason}: {told}" if reason and told else told
        self._put(pod, replace(self._ended(pod, code), reason=reason, disruption_message=told))
        if not pod.deleting:
            self._count_failure(pod, code is None or pod.has_probe or code in PROGRAM_CODES)
            self.num_fatal += code == FATAL_CODE

    def _count_failure(self, pod: Pod, is_of_program: bool) -> None:
        """Count a failure of the program; one for pods that ran side by side, without a step between."""
        if not is_of_program:
            return
        if self.failed_life is None or (pod.started or 0.0) > self.failed_life:
            self.num_program_faults += 1
            self.failed_life = self.now
        else:
            self.late_failures.add(pod.uid)

    def _end_life(self) -> None:
        """Count late failures that the operator has not recorded: they may seem to come after this step."""
        replaced = self.status.pod_replacement
        known = set(replaced.pods) if replaced is not None else set()
        self.num_program_faults += len(self.late_failures - known)
        self.failed_life, self.late_failures = None, set()

    def train(self) -> None:
        """Make a step if enough pods run and they do not hang."""
        self._regroup()
        if self.saving is not None:
            is_whole = {pod.uid for pod in self._gang()} == set(self.world)
            if self.now < self.saving.until and is_whole:
                return
            self.saving = None
        if len(self._gang()) >= self.size.low and not self.hung:
            self._end_life()
            step = self.progress.step + 1 if self.progress else 1
            self.world = tuple(pod.uid for pod in self._gang())
            self.progress = ProgressStatus(
                step=step, samplesPerSecond=8.0, lastStepTime=stamp(self.now)
            )

    def _regroup(self) -> None:
        """Let the agents of a new attempt meet, or end a generation that their service must end."""
        attempt = max((pod.attempt for pod in self._gang()), default=0)
        if attempt > self.generation[0]:
            self._start_processes((attempt, 1), "pods")
        if self.store is None or not self.store.running or not self._reaches(self.store):
            return
        if self.store.ended_generation >= self.generation and attempt == self.generation[0]:
            self._start_processes((attempt, self.generation[1] + 1), "processes")

    def _start_processes(self, generation: tuple[int, int], cured: str) -> None:
        self.generation, self.began, self.saving = generation, self.now, None
        self.hung = "" if cured == "pods" else self.hung.replace(cured, "")

    def save(self, duration: float, progresses: bool) -> None:
        """Let the gang wait for a checkpoint, if it steps."""
        world = {pod.uid for pod in self._gang()}
        if self.progress is not None and not self.hung and world == set(self.world) != set():
            self.saving = Save(self.now, self.now + duration, progresses)

    def fail_save(self, num_pods: int) -> None:
        """Let the save fail on ``num_pods`` pods: their storage refuses it."""
        for pod in self._gang()[:num_pods] if self.saving is not None else ():
            self.end(pod, STORAGE_CODE)

    def run_kueue(self) -> None:
        """Reconcile Kueue's groups, and let the garbage collector end unscheduled pods."""
        for pod in list(self.pods.values()):
            if pod.deleting and not pod.node:
                self._put(pod, self._ended(pod, None))
        self.kueue.act(list(self.pods.values()))

    def succeed(self, lost: int) -> None:
        """Let all pods succeed but the first ``lost`` ones, if enough run."""
        gang = self._gang()
        for pod in gang[lost:] if len(gang) >= self.size.low else []:
            self.end(pod, 0)

    def _gang(self) -> list[Pod]:
        """Return the running pods of the latest attempt."""
        running = [p for p in self.pods.values() if p.running and p.node not in self.down]
        latest = max((pod.attempt for pod in running), default=0)
        return [pod for pod in running if pod.attempt == latest]

    def edit(
        self, *, suspend: bool | None = None, high: int | None = None, image: str = ""
    ) -> None:
        """Change the spec."""
        self.suspend = self.suspend if suspend is None else suspend
        self.size = self.size if high is None else self.size._replace(high=high)
        self.image = image or self.image
        self.version += 1

    # --- convergence

    def settle(self) -> None:
        """Run without further faults until the state is stable."""
        num_quiet = 0
        for _ in range(240):  # an hour: trainers that made no step may be silent for half of it
            self.now += 15.0
            self.kill_orphans()
            for pod in self.everything():
                self.kubelet(pod)
            self.run_kueue()
            self.train()
            self.snapshot()
            before = self.status
            result = self.reconcile()
            quiet = not result.delete and not result.create
            rests = quiet and _same(before, self.status) and not self._holds()
            num_quiet = num_quiet + 1 if rests else 0
            if num_quiet > _QUIET_ROUNDS:
                return
        raise AssertionError("the planner did not converge")

    def check(self) -> None:
        """Check the invariants of a stable cluster."""
        status, spec_hash = self.status, self._job.spec_hash
        has_budget = any(kind == DISRUPTION_BUDGET for kind, _ in self.applied)
        needs_budget = self.size.low < self.size.high and status.phase == "Running"
        assert has_budget == needs_budget, "a disruption budget exactly while there are pods"
        reachable = [p for p in self.pods.values() if self._reaches(p) and not p.kept_by]
        if finished(status):
            assert not reachable, "cleanPods is All, and pods are left"
        elif self.suspend:
            assert status.phase == "Suspended", "a suspended job has its phase"
            assert not reachable, "a suspended job keeps no pods"
        else:
            assert status.phase == "Running", "with everything in place a job runs"
            left = [
                p for p in reachable if not (p.ended and p.deleting)
            ]  # Kueue's finalizers keep some
            counted_pods = [p for p in self.pods.values() if p in left or self._trains(p)]
            zombies = [p for p in self._gang() if p.deleting and p.uid in self.world]
            fits = len(counted_pods) <= self.size.high <= len(counted_pods) + len(zombies)
            assert fits, "as many pods as nodes.max, or as many that train"
            versions = {(pod.attempt, pod.spec_hash) for pod in counted_pods}
            newest = {(status.attempt, spec_hash)}  # a job of one node may have only a zombie
            assert versions <= newest, "pods of one attempt and the newest spec"
            assert len({pod.revision for pod in counted_pods}) <= 1, "pods of one revision"
            assert self.store is not None, "a rendezvous pod"
            assert status.nodes is not None, "the status counts nodes"
            counted = (status.nodes.ready, status.nodes.desired)
            assert counted == (self.size.high, self.size.high), "the status counts all nodes"
        values = {condition.type: condition.status for condition in status.conditions}
        fails = status.phase == "Failed"
        stops = status.phase == "Suspended" and values["Suspended"] == "False"  # on a lost node
        summary = tuple(values[kind] == "True" for kind in ("Ready", "Reconciling", "Stalled"))
        assert summary == (not (fails or stops), stops, fails), "what awaits the job is summarized"
        used = (status.restarts.charged or 0) if status.restarts else 0
        if status.phase == "Failed" and not self.num_fatal:
            assert used >= MAX_RESTARTS, "the infrastructure's faults are free"

    def _trains(self, pod: Pod) -> bool:
        return not pod.deleting and pod.uid in self.world and pod in self._gang()

    def _holds(self) -> bool:
        """Return whether pods stop, or the job waits for a backoff, its last pods, or the watchdog."""
        left = [pod for pod in self.everything() if not (pod.ended and pod.deleting)]
        if any(pod.deleting and self._reaches(pod) for pod in left):
            return True
        training = [pod for pod in self._gang() if pod.attempt == self.status.attempt]
        hangs = bool(self.hung) and not self.suspend and len(training) >= self.size.low
        # the rendezvous pod may have ended, and goes with the last of the others
        ended = any(pod.ended for pod in left if pod.name in self.pods)
        return not finished(self.status) and (hangs or ended)


def _excluded(pod: Manifest) -> tuple[str, ...]:
    """Return the host names that the node affinity of ``pod`` excludes."""
    of_nodes = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    expressions = [
        e for term in required.get("nodeSelectorTerms", ()) for e in term["matchExpressions"]
    ]
    return tuple(name for e in expressions if e["operator"] == "NotIn" for name in e["values"])


def _same(one: Status, other: Status) -> bool:
    ignored = {"progress": None, "goodput": None, "time_spent": None}
    return one.model_copy(update=ignored) == other.model_copy(update=ignored)
