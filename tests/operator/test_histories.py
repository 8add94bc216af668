"""Random histories of a small cluster: whatever happens, the planner converges and breaks no promise.

The cluster is what the API server, the kubelets and a person do to pods; the operator reads it late and
out of order, loses races, and dies between two acts. FLUXTRAIN_PROPERTY_EXAMPLES sets how many histories.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluxtrain.contract.status import ProgressStatus, Status
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.observed import NodeView, Observed, Pod
from fluxtrain_operator.plan import Delete, Plan, load, plan
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.status import finished
from fluxtrain_operator.timestamps import stamp

EXAMPLES = int(os.environ.get("FLUXTRAIN_PROPERTY_EXAMPLES", "2000"))
NODES = ("a", "b", "c", "d", "e")
MAX_RESTARTS = 2
PROGRAM_CODES, OTHER_CODES = (1, 74), (75, 137, None, 3)
GRACE_SECONDS = 180


@cache
def make_job(suspend: bool, low: int, high: int, image: str, force: bool) -> Job:
    restart = {"maxRestarts": MAX_RESTARTS, "forceDeleteOnLostNode": force}
    spec = {
        "image": image,
        "run": {"preset": "micro"},
        "nodes": {"min": low, "max": high},
        "lifecycle": {"suspend": suspend, "cleanPods": "All"},
        "restart": restart,
    }
    manifest = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "job", "uid": "uid"},
        "spec": spec,
    }
    return load(manifest, "trainer:1")


def with_status(job: Job, status: Status) -> Job:
    """Return ``job`` with ``status``, and with what it has worked out already."""
    known = {key: vars(job)[key] for key in ("spec_hash", "config_json") if key in vars(job)}
    changed = replace(job, training=job.training.model_copy(update={"status": status}))
    vars(changed).update(known)
    return changed


@dataclass(frozen=True)
class Picture:
    """What a reader may see, now or later."""

    version: int
    job: Job
    observed: Observed


class Cluster:
    """Pods by name, nodes, one job, and the promises that are checked as they are made."""

    def __init__(self, low: int, high: int, force: bool) -> None:
        self.low, self.high, self.force, self.image = low, high, force, "trainer:1"
        self.suspend = False
        self.now, self.version, self.num_uids = 1_800_000_000.0, 0, 0
        self.status, self.progress = Status(), None
        self.pods: dict[str, Pod] = {}
        self.store: Pod | None = None
        self.applied: dict[tuple[str, str], str] = {}
        self.ready = dict.fromkeys(NODES, True)
        self.num_program_faults = self.num_hangs = self.num_fatal = 0
        self.pictures: list[Picture] = []
        self.look()

    # --- what is seen

    def look(self) -> None:
        base = make_job(self.suspend, self.low, self.high, self.image, self.force)
        job = with_status(base, self.status)
        nodes = {name: NodeView(name, ready) for name, ready in self.ready.items()}
        seen = Observed(
            pods=tuple(sorted(self.pods.values(), key=lambda pod: pod.index)),
            rendezvous=self.store,
            progress=self.progress and Progress(self.progress),
            nodes=nodes,
            applied=dict(self.applied),
        )
        self.pictures = [*self.pictures[-5:], Picture(self.version, job, seen)]

    # --- what the operator does

    def reconcile(self, job_age: int = 0, pods_age: int = 0, acts: int = 100) -> Plan:
        """Plan from pictures that are so many changes old, and do the first ``acts`` acts."""
        read = self.pictures[-1 - job_age % len(self.pictures)]
        seen = self.pictures[-1 - pods_age % len(self.pictures)]
        result = plan(read.job, seen.observed, self.now)
        if result.status != read.job.status or result.delete or result.create:
            if read.version != self.version:
                return result  # the API server refuses a status written over another one
            self.write(result.status)
        todo: list[Delete | Manifest] = [*result.delete, *result.create]
        for act in todo[:acts]:
            if isinstance(act, Delete):
                self.delete(act)
            else:
                self.create(act)
        return result

    def write(self, status: Status) -> None:
        before, after = self.status.restarts, status.restarts
        assert status == self.status or not finished(self.status), "a finished job stays as it is"
        assert status.attempt >= self.status.attempt
        if after is not None:
            assert after.gang <= MAX_RESTARTS
            hung = any(c.reason == "NoProgress" for c in status.conditions)
            if after.gang > (before.gang if before else 0):
                self.num_hangs += hung
            assert after.gang <= self.num_program_faults + self.num_hangs, "charged twice"
            assert before is None or (after.gang >= before.gang and after.pod >= before.pod)
        self.version += status != self.status
        self.status = status

    def delete(self, act: Delete) -> None:
        pod = self.store if act.name == names.rendezvous("job") else self.pods.get(act.name)
        if act.kind != "Pod":
            self.applied.pop((act.kind, act.name), None)
        elif pod is not None and pod.uid == act.uid:
            self.remove(pod, act.grace_seconds)

    def remove(self, pod: Pod, grace_seconds: int | None = None) -> None:
        """Delete a pod as the API server does: at once by force, or where nothing runs."""
        if grace_seconds == 0 or pod.ended or not pod.node:
            self.put(pod, None)
        elif not pod.deleting:
            wait = GRACE_SECONDS if grace_seconds is None else grace_seconds
            self.put(pod, replace(pod, deleting=True, deletion_deadline=self.now + wait))

    def put(self, pod: Pod, changed: Pod | None) -> None:
        if self.store is not None and pod.name == self.store.name:
            self.store = changed
        elif changed is None:
            self.pods.pop(pod.name)
        else:
            self.pods[pod.name] = changed

    def create(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] != "Pod":
            hashed = manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED]
            self.applied[manifest["kind"], name] = hashed
            return
        assert not finished(self.status), "a finished job is never started again"
        self.num_uids += 1
        pod = replace(Pod.from_object(manifest), uid=str(self.num_uids), created=self.now)
        if name == names.rendezvous("job"):
            self.store = self.store or pod
        elif name not in self.pods:  # else: AlreadyExists
            assert pod.index not in {other.index for other in self.pods.values()}
            self.pods[name] = pod

    # --- what the kubelets, the trainers, and people do

    def kubelet(self, pod: Pod) -> None:
        if pod.deleting and self.ready.get(pod.node, True):
            self.put(pod, None)
        elif not pod.node and not pod.ended:
            up = [name for name in NODES if self.ready[name]]
            if up:
                node = up[self.num_uids % len(up)]
                started = replace(pod, node=node, phase="Running", started=self.now, ready=True)
                self.put(pod, started)

    def end(self, pod: Pod, code: int | None) -> None:
        if not pod.running or not self.ready[pod.node]:
            return
        phase = "Succeeded" if code == 0 else "Failed"
        reason = "Evicted" if code is None else ""
        ended = replace(pod, phase=phase, exit_code=code, finished=self.now, reason=reason)
        self.put(pod, replace(ended, ready=False))
        if not pod.deleting:
            self.num_program_faults += code in PROGRAM_CODES
            self.num_fatal += code == 3

    def gang(self) -> list[Pod]:
        """Return the running pods of the latest attempt."""
        running = [pod for pod in self.pods.values() if pod.running]
        latest = max((pod.attempt for pod in running), default=0)
        return [pod for pod in running if pod.attempt == latest]

    def train(self) -> None:
        if len(self.gang()) >= self.low:
            step = self.progress.step + 1 if self.progress else 1
            rate = 8.0
            self.progress = ProgressStatus(
                step=step, samplesPerSecond=rate, lastStepTime=stamp(self.now)
            )

    def succeed(self) -> None:
        gang = self.gang()
        if len(gang) >= self.low:
            for pod in gang:
                self.end(pod, 0)

    def respec(self, **changes: object) -> None:
        vars(self).update(changes)
        self.version += 1

    def happen(self, event: int) -> None:
        """Let one of the things happen that can happen; ``event`` says which, and to whom."""
        kind, number = event % len(EVENTS), event // len(EVENTS)
        self.now += 1.0
        EVENTS[kind](self, number)
        self.look()

    def some(self, number: int) -> Pod | None:
        pods = self.everything()
        return pods[number % len(pods)] if pods else None

    def everything(self) -> list[Pod]:
        return [*self.pods.values(), *([self.store] if self.store else [])]

    def settle(self) -> None:
        """Let nothing more go wrong, until nothing more happens."""
        for _ in range(80):
            self.now += 15.0
            for pod in self.everything():
                self.kubelet(pod)
            self.train()
            self.look()
            before = self.status
            result = self.reconcile()
            self.look()
            quiet = not result.delete and not result.create
            if quiet and same(before, self.status) and not self.holds():
                return
        raise AssertionError("the planner never came to rest")

    def check(self) -> None:
        """Check what must hold of a cluster at rest."""
        status, wanted = self.status, self.pictures[-1].job.spec_hash
        reachable = [pod for pod in self.pods.values() if self.ready.get(pod.node, True)]
        if finished(status):
            assert reachable == [], "cleanPods is All"
        elif self.suspend:
            assert (status.phase, reachable) == ("Suspended", [])
        else:
            assert status.phase == "Running"
            assert len(reachable) == self.high
            assert {(pod.attempt, pod.spec_hash) for pod in reachable} == {(status.attempt, wanted)}
            assert self.store is not None
            assert status.nodes is not None
            assert (status.nodes.ready, status.nodes.desired) == (self.high, self.high)
        used = status.restarts.gang if status.restarts else 0
        if status.phase == "Failed" and not self.num_fatal:
            assert used == MAX_RESTARTS, "the infrastructure's faults are free"

    def holds(self) -> bool:
        """Return whether the job waits for a back-off or its last pods."""
        return not finished(self.status) and any(pod.ended for pod in self.pods.values())


def reconcile_late(cluster: Cluster, number: int) -> None:
    """Plan from pictures of any age, each half of the time the newest, and now and then die midway."""
    acts = 100 if number % 3 else number // 3 % 4
    cluster.reconcile(max(0, number % 7 - 3), max(0, number // 7 % 7 - 3), acts)


def kubelet_acts(cluster: Cluster, number: int) -> None:
    if pod := cluster.some(number):
        cluster.kubelet(pod)


def pod_ends(cluster: Cluster, number: int) -> None:
    if pod := cluster.some(number // 10):
        cluster.end(pod, (PROGRAM_CODES * 3 + OTHER_CODES)[number % 10])


def somebody_deletes_a_pod(cluster: Cluster, number: int) -> None:
    if pod := cluster.some(number):
        cluster.remove(pod)


def node_goes_or_comes(cluster: Cluster, number: int) -> None:
    node = NODES[number % len(NODES)]
    cluster.ready[node] = not cluster.ready[node]


def time_passes(cluster: Cluster, number: int) -> None:
    cluster.now += (5, 40, 400, 4000)[number % 4]


EVENTS: tuple[Callable[[Cluster, int], None], ...] = (
    *[reconcile_late] * 5,
    *[kubelet_acts] * 3,
    *[pod_ends] * 3,
    somebody_deletes_a_pod,
    node_goes_or_comes,
    *[lambda cluster, number: cluster.train()] * 2,
    lambda cluster, number: cluster.succeed() if number % 4 == 0 else None,
    time_passes,
    lambda cluster, number: cluster.respec(suspend=number % 4 == 0),
    lambda cluster, number: cluster.respec(high=max(cluster.low, number % len(NODES))),
    lambda cluster, number: cluster.respec(image=f"trainer:{number % 4 // 3}"),
)
_LARGEST_EVENT = len(EVENTS) * 840 - 1


def same(one: Status, other: Status) -> bool:
    ignored = {"progress": None, "goodput": None}
    return one.model_copy(update=ignored) == other.model_copy(update=ignored)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    low=st.integers(1, 2),
    more=st.integers(0, 2),
    force=st.booleans(),
    events=st.lists(st.integers(0, _LARGEST_EVENT), min_size=20, max_size=60),
)
def test_every_history_converges_and_keeps_the_promises(
    low: int, more: int, force: bool, events: list[int]
) -> None:
    cluster = Cluster(low, low + more, force)
    for event in events:
        cluster.happen(event)
    if any(cluster.ready.values()):  # first with the nodes that are left
        cluster.settle()
        cluster.check()
    cluster.ready = dict.fromkeys(NODES, True)
    cluster.settle()
    cluster.check()
    lost = set(cluster.pods) if finished(cluster.status) or cluster.suspend else set()
    assert lost == set(), "what was out of reach is gone as well"
