"""Random histories of a small cluster: the planner always converges and violates no invariant.

Changes reach the operator late, out of order, twice or never; its writes conflict, and it crashes between two
requests. FLUXTRAIN_HISTORIES sets the number of histories, FLUXTRAIN_FIRST_HISTORY the first seed.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.operator.planner.small_cluster import (
    DISRUPTIONS,
    ENOUGH,
    FATAL_CODE,
    NODES,
    PROGRAM_CODES,
    REJECTIONS,
    RIGHT,
    Mute,
    Planner,
    Size,
    SmallCluster,
    with_status,
)

from fluxtrain.contract.resource.status import Restarts, Status
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.reports import NO_MEMBERS
from fluxtrain_operator.controller import kept_fields
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner import changes, situation
from fluxtrain_operator.planner.guard import Delete, Reason
from fluxtrain_operator.planner.observed import NodeView, Observed
from fluxtrain_operator.planner.plan import Plan, plan
from fluxtrain_operator.planner.status import finished
from fluxtrain_operator.resources import DISRUPTION_BUDGET

pytestmark = pytest.mark.slow

NUM_HISTORIES = int(os.environ.get("FLUXTRAIN_HISTORIES", "2000"))
FIRST = int(os.environ.get("FLUXTRAIN_FIRST_HISTORY", "0"))
PINNED = Path(__file__).parent / "golden" / "wrong_planners.json"
"""By wrong planner, a short history in which it is detected: size, events and offsets."""
CHUNK = 50
_CHUNKS_PER_LINE = 100
ANOMALIES = ("lost", "repeated", "reordered", "stale", "refused", "died")
"""Anomalies of the watches, of writes of the status, and of the operator."""
_OFFSETS = (-3600.0, 0.0, 3600.0)
"""By how many seconds the clock of a node is ahead."""
_FEWEST_EVENTS, _MOST_EVENTS = 20, 60
_QUEUED = 0.25
"""Part of the histories in which Kueue admits the pods."""


class History(NamedTuple):
    """A job's size, the numbers of the events that happen to it, and by how much clocks are ahead."""

    size: Size
    events: tuple[int, ...]
    offsets: tuple[float, ...] = RIGHT

    @staticmethod
    def of(seed: int) -> History:
        chance = random.Random(seed)
        low = chance.randint(1, 2)
        size = Size(low, low + chance.randint(0, 2), chance.random() < 0.5)
        count = chance.randint(_FEWEST_EVENTS, _MOST_EVENTS)
        events = tuple(chance.randrange(_LARGEST_EVENT) for _ in range(count))
        offsets = tuple(chance.choice(_OFFSETS) for _ in NODES)
        gpus, is_queued = chance.choice((0, 8)), chance.random() < _QUEUED
        return History(size._replace(gpus=gpus, is_queued=is_queued), events, offsets)

    def play(self, planner: Planner = plan) -> Counter[str]:
        """Run the events, then let the cluster converge; return the number of each anomaly."""
        cluster = SmallCluster(self.size, planner, self.offsets)
        for event in self.events:
            apply_event(cluster, event)
        anomalies = cluster.happened.copy()
        cluster.reconnect()
        if len(NODES) // 2 < cluster.num_ready < len(NODES):  # first without the other nodes
            cluster.settle()
            if not self.size.is_queued:  # Kueue keeps the quota of pods on lost nodes
                cluster.check()
        cluster.repair()
        cluster.settle()
        cluster.check()
        stays = finished(cluster.status) or cluster.suspend
        lost = {name for name, pod in cluster.pods.items() if stays and not pod.kept_by}
        assert lost == set(), "unreachable pods are deleted as well"
        return anomalies

    def fault(self, planner: Planner = plan) -> str | None:
        """Return the invariant that ``planner`` violates in this history; None if none."""
        try:
            self.play(planner)
        except AssertionError as error:
            return str(error).partition("\n")[0]
        return None

    def shortened(self, has_fault: Callable[[History], bool]) -> History:
        """Return the history without the events that its fault does not need."""
        shortest = self
        for count in (16, 4, 1):  # together, as most are not needed
            for at in reversed(range(0, len(shortest.events), count)):
                events = shortest.events[:at] + shortest.events[at + count :]
                shorter = shortest._replace(events=events)
                shortest = shorter if has_fault(shorter) else shortest
        return shortest

    def __str__(self) -> str:
        events = [f"  {EVENTS[e % len(EVENTS)].__name__}({e // len(EVENTS)})" for e in self.events]
        return "\n".join([f"{self.size} {self.offsets}", *events, f"  {self.events}"])


def apply_event(cluster: SmallCluster, event: int) -> None:
    """Apply one of EVENTS, selected by ``event`` along with its object."""
    cluster.now += 1.0
    EVENTS[event % len(EVENTS)](cluster, event // len(EVENTS))
    cluster.snapshot()


def operator_plans(cluster: SmallCluster, number: int) -> None:
    """Plan from snapshots of random age, half of the time the newest; sometimes crash, or plan twice."""
    acts = 100 if number % 3 else number // 3 % 4
    for _ in range(1 + (number % 5 == 0)):
        cluster.reconcile(max(0, number % 7 - 3), max(0, number // 7 % 7 - 3), acts)


def kubelet_acts(cluster: SmallCluster, number: int) -> None:
    if number % 2:
        cluster.kill_orphans()
    if number % 4:
        cluster.run_kueue()
    if pod := cluster.some(number):
        cluster.kubelet(pod)


def pod_ends(cluster: SmallCluster, number: int) -> None:
    codes = (*PROGRAM_CODES * 3, 75, 137, None, FATAL_CODE)
    code, pod = codes[number % 10], cluster.some(number // 10)
    if pod is not None and code == 75 and number // 10 % 2:
        cluster.end(cluster.disrupted_by(pod, "TerminationByKubelet"), code)
    elif pod is not None and code == 137 and number // 10 % 2:
        cluster.fail_probe(pod)
    elif pod is not None:
        cluster.end(pod, code)


def a_pod_is_deleted(cluster: SmallCluster, number: int) -> None:
    """By a user, or by a drain, the scheduler or a taint."""
    if pod := cluster.some(number):
        cluster.remove(cluster.disrupted_by(pod, (*DISRUPTIONS[:3], "")[number // 7 % 4]))


def node_changes_readiness(cluster: SmallCluster, number: int) -> None:
    cluster.turn(NODES[number % len(NODES)], down=number // len(NODES) % 2 == 0)


def gang_steps(cluster: SmallCluster, number: int) -> None:
    cluster.train()


def gang_hangs(cluster: SmallCluster, number: int) -> None:
    """After a step: these trainers do not answer before."""
    if cluster.progress is not None:
        cluster.hung = ("processes", "pods", "")[number % 3]


def trainers_are_replaced(cluster: SmallCluster, number: int) -> None:
    """By those of an image that report ranks, or not."""
    cluster.old_trainers = number % 4 == 0


def gang_succeeds(cluster: SmallCluster, number: int) -> None:
    if number % 4 == 0:
        cluster.succeed(lost=number // 4 % 2)


def trainers_fail(cluster: SmallCluster, number: int) -> None:
    if number % 8 == 0:
        cluster.fail_trainers(number // 8)


def time_passes(cluster: SmallCluster, number: int) -> None:
    cluster.now += (5, 40, 400, 4000)[number % 4]


def user_suspends_or_resumes(cluster: SmallCluster, number: int) -> None:
    cluster.edit(suspend=number % 4 == 0)


def user_scales(cluster: SmallCluster, number: int) -> None:
    cluster.edit(high=max(cluster.size.low, number % len(NODES)))


def user_changes_the_image(cluster: SmallCluster, number: int) -> None:
    cluster.edit(image=f"trainer:{number % 4 // 3}")


def operator_is_upgraded_or_rolled_back(cluster: SmallCluster, number: int) -> None:
    cluster.operator = f"operator:{number % 3}"
    cluster.clocks.change_leader()


def stranger_deletes_the_revisions(cluster: SmallCluster, number: int) -> None:
    if number % 4 == 0:
        cluster.lose_revisions()


def stranger_creates_look_alikes(cluster: SmallCluster, number: int) -> None:
    cluster.look_alikes = number if number % 5 == 0 else 0


def somebody_changes_a_pod(cluster: SmallCluster, number: int) -> None:
    """A label or an annotation of it: removed, odd, or that of another pod; or a finalizer is set."""
    if number % 5 == 0 and (held := cluster.some(number // 5)):
        cluster.hold(held)
    elif pod := cluster.some(number):
        field, key = CHANGED_KEYS[number // 7 % len(CHANGED_KEYS)]
        cluster.change(pod, field, key, CHANGED_VALUES[number // 7 % len(CHANGED_VALUES)])


CHANGED_KEYS = (
    *[("labels", key) for key in (names.LABEL_JOB, names.LABEL_COMPONENT, names.LABEL_INDEX)],
    *[("labels", names.LABEL_ATTEMPT)] * 3,
    *(
        ("annotations", key)
        for key in (
            *(names.ANNOTATION_SPEC, names.ANNOTATION_REVISION, names.ANNOTATION_NODES),
            *(names.ANNOTATION_ENDED, names.ANNOTATION_REPLACEMENT, names.ANNOTATION_RENDEZVOUS),
            names.ANNOTATION_DISTRUSTED,
        )
    ),
)
CHANGED_VALUES = (None, "", "0", "1", "7", "999999999", "3:3", "rendezvous")


def kubelet_rejects_a_pod(cluster: SmallCluster, number: int) -> None:
    if pod := cluster.some(number):
        cluster.reject(pod, REJECTIONS[number // 7 % len(REJECTIONS)])


def node_is_marked(cluster: SmallCluster, number: int) -> None:
    cluster.mark(NODES[number % len(NODES)])


def queue_changes(cluster: SmallCluster, number: int) -> None:
    """Kueue evicts the group, its workload is deleted, or the quota is shrunk or restored."""
    match number % 5:
        case 0:
            cluster.kueue.evict()
        case 1:
            cluster.kueue.delete_workloads(list(cluster.pods.values()))
        case 2 | 3:
            cluster.kueue.quota = number // 5 % 5
        case _:
            cluster.kueue.quota = ENOUGH


def gpus_are_marked(cluster: SmallCluster, number: int) -> None:
    """Of one node, or by a broken exporter of all."""
    cluster.mark_gpus(NODES if number % 6 == 0 else [NODES[number % len(NODES)]])


def endpoints_are_blocked(cluster: SmallCluster, number: int) -> None:
    """Those of rank 0, all trainers, the rendezvous service or one agent; or none is any more."""
    trainers: Any = ("none", "none", "rank 0", "all")[number % 4]
    members: Any = ("none", "none", "one pod", "all")[number // 4 % 4]
    cluster.mute = Mute(trainers, members)


def gang_saves(cluster: SmallCluster, number: int) -> None:
    cluster.save((30.0, 600.0, 3000.0, 6000.0)[number % 4], progresses=number // 4 % 2 == 0)


def gang_cannot_save(cluster: SmallCluster, number: int) -> None:
    cluster.fail_save(1 + number % len(NODES))


def storage_changes_its_speed(cluster: SmallCluster, number: int) -> None:
    """Trainers that are asked to stop need longer, even longer than their grace period."""
    cluster.stop_seconds = (0.0, 0.0, 20.0, 150.0, 1000.0)[number % 5]


EVENTS: tuple[Callable[[SmallCluster, int], None], ...] = (
    *[operator_plans] * 5,
    *[kubelet_acts] * 3,
    *[pod_ends] * 3,
    a_pod_is_deleted,
    *[node_changes_readiness] * 2,
    *[gang_steps] * 2,
    gang_succeeds,
    gang_hangs,
    trainers_are_replaced,
    time_passes,
    user_suspends_or_resumes,
    user_scales,
    user_changes_the_image,
    operator_is_upgraded_or_rolled_back,
    stranger_deletes_the_revisions,
    stranger_creates_look_alikes,
    trainers_fail,
    kubelet_rejects_a_pod,
    node_is_marked,
    somebody_changes_a_pod,
    queue_changes,
    gpus_are_marked,
    endpoints_are_blocked,
    gang_saves,
    gang_cannot_save,
    storage_changes_its_speed,
)
_LARGEST_EVENT = len(EVENTS) * 840


class Tally(NamedTuple):
    """Totals of some histories."""

    num_events: int
    times: Counter[str]
    """Number of times that each anomaly happened."""
    histories: Counter[str]
    """Number of histories with each anomaly."""
    faults: list[int]
    """Seeds of the histories that violate an invariant."""


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make``, which makes the objects of a job, called once for a spec and further arguments."""
    made: dict[tuple[Any, ...], tuple[Job, Any]] = {}

    def known(job: Job, *args: Any) -> Any:
        key = id(job.spec), job.image, *(getattr(arg, "name", arg) for arg in args)
        if key not in made:
            made[key] = job, make(job, *args)  # the job, so that its spec keeps its id
        return made[key][1]

    return known


@pytest.fixture(autouse=True)
def make_objects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make the objects again takes half of the time of a plan."""
    monkeypatch.setattr(situation, "supporting", once(situation.supporting))
    for name in ("rendezvous_pod", "training_pod"):
        monkeypatch.setattr(changes, name, once(getattr(changes, name)))


def play_all(seeds: range) -> Tally:
    tally = Tally(0, Counter(), Counter(), [])
    for seed in seeds:
        history = History.of(seed)
        try:
            happened = history.play()
        except AssertionError:
            tally.faults.append(seed)
            continue
        tally.times.update(happened)
        tally.histories.update(name for name, count in happened.items() if count)
        tally = tally._replace(num_events=tally.num_events + len(history.events))
    return tally


def told(tallies: Iterable[Tally]) -> Iterator[Tally]:
    """Yield ``tallies``, and print seeds of faults and how many histories have been played."""
    for count, tally in enumerate(tallies, start=1):
        if tally.faults or count % _CHUNKS_PER_LINE == 0:
            print(f"{FIRST + count * CHUNK} histories; faults: {tally.faults}", flush=True)
        yield tally


FEW = range(FIRST, FIRST + NUM_HISTORIES // 10)
REST = range(FEW.stop, FIRST + NUM_HISTORIES)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seeds", [pytest.param(FEW, id="few"), pytest.param(REST, id="rest", marks=pytest.mark.proof)]
)
def test_every_history_converges_and_violates_no_invariant(seeds: range) -> None:
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), fork, initializer=gc.freeze) as pool:
        tallies = list(told(pool.map(play_all, chunks)))
    faults = [seed for tally in tallies for seed in tally.faults]
    if faults:
        first = History.of(faults[0])
        fault = first.fault()
        shortest = first.shortened(lambda each: each.fault() == fault)
        pytest.fail(
            f"{len(faults)} histories, seeds {faults[:100]}; {shortest.fault()}\n{shortest}"
        )
    num_events = sum(tally.num_events for tally in tallies)
    print(f"{len(seeds)} histories of {num_events} events, among them")
    for name in ANOMALIES:
        times = sum(tally.times[name] for tally in tallies)
        count = sum(tally.histories[name] for tally in tallies)
        print(f"  {name}: {times} times, in {count} histories")
        assert count > len(seeds) / 2, f"too few histories in which something was {name}"


def test_a_failed_peer_whose_replacement_number_was_changed_is_not_charged() -> None:
    events = (13468, 27150, 9510, 21032, 17751, 14728, 7568, 9317)
    offsets = (-3600.0, -3600.0, -3600.0, 0.0, 0.0)
    assert History(Size(2, 2, True), events, offsets).fault() is None


def test_of_two_nodes_that_are_not_ready_only_the_one_without_training_is_lost() -> None:
    events = (
        *(22644, 3061, 17048, 12136, 13253, 15954, 8894, 10195),
        *(28806, 12897, 6091, 6315, 24347, 22440, 7888, 15953, 26472),
    )
    assert History(Size(2, 3, False), events).fault() is None


def restarts_a_finished_job(job: Job, observed: Observed, now: float) -> Plan:
    training = job.training.model_copy(update={"status": Status(attempt=job.status.attempt)})
    return plan(replace(job, training=training) if finished(job.status) else job, observed, now)


def deletes_by_force(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    forced = [replace(act, grace_seconds=0) for act in result.delete if isinstance(act, Delete)]
    return replace(result, delete=tuple(forced))


def replaces_before_the_old_one_is_gone(job: Job, observed: Observed, now: float) -> Plan:
    staying = tuple(pod for pod in observed.pods if not pod.deleting)
    result = plan(job, replace(observed, pods=staying), now)
    create = copy.deepcopy(result.create)
    for manifest in create:
        if manifest["kind"] == "Pod" and "rendezvous" not in manifest["metadata"]["name"]:
            manifest["metadata"]["name"] += f"-{now}"
    return replace(result, create=create)


def counts_lost_pods_as_restarts(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    count = result.status.restarts or Restarts()
    charged = Restarts(process=count.process, pod=count.pod, charged=max(count.gang, count.pod))
    return replace(result, status=result.status.model_copy(update={"restarts": charged}))


def counts_what_agents_tell_again(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    count = result.status.restarts or Restarts()
    forgotten = count.counted and count.counted.model_copy(update={"generation": 0})
    again = count.model_copy(update={"counted": forgotten})
    return replace(result, status=result.status.model_copy(update={"restarts": again}))


def ignores_suspension(job: Job, observed: Observed, now: float) -> Plan:
    life = job.spec.lifecycle.model_copy(update={"suspend": False})
    spec = job.spec.model_copy(update={"lifecycle": life})
    return plan(
        replace(job, training=job.training.model_copy(update={"spec": spec})), observed, now
    )


def writes_too_often(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    return replace(
        result, status=result.status.model_copy(update={"observed_generation": int(now)})
    )


def deletes_without_a_reason(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    return replace(result, delete=tuple(replace(act, reason=None) for act in result.delete))


def names_another_reason(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    named = [replace(act, reason=Reason.SCALED_DOWN) for act in result.delete]
    return replace(result, delete=tuple(named))


def replaces_all_pods_of_faulty_nodes_at_once(job: Job, observed: Observed, now: float) -> Plan:
    return plan(job, replace(observed, disruptions_left=None), now)


def makes_pods_of_the_newest_defaults(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    create = copy.deepcopy(result.create)
    for manifest in create:
        if manifest["kind"] == "Pod":
            notes = manifest["metadata"]["annotations"]
            notes[names.ANNOTATION_REVISION] = job.spec_revision.name
    return replace(result, create=create)


def deletes_every_other_revision(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    maps = (name for kind, name in observed.applied if kind == "ConfigMap")
    others = [Delete("ConfigMap", name) for name in maps if name != result.status.revision]
    return replace(result, delete=(*result.delete, *others))


def deletes_pods_that_restart_in_place(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    if result.decision is None or result.decision.in_place_restart is None:
        return result
    pods = [Delete("Pod", p.name, p.uid, None, Reason.NO_PROGRESS) for p in observed.pods]
    return replace(result, delete=(*result.delete, *pods))


def keeps_disruption_budgets(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    kept = tuple(act for act in result.delete if act.kind != DISRUPTION_BUDGET)
    return replace(result, delete=kept)


def restarts_all_pods_for_one(job: Job, observed: Observed, now: float) -> Plan:
    return plan(job, replace(observed, heard=NO_MEMBERS), now)


def charges_each_pod(job: Job, observed: Observed, now: float) -> Plan:
    known = job.status.model_copy(update={"pod_replacement": None})
    return plan(with_status(job, known), observed, now)


def excludes_every_node(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    create = copy.deepcopy(result.create)
    for manifest in create:
        if manifest["kind"] == "Pod" and observed.distrust.scores:
            notes = manifest["metadata"]["annotations"]
            notes[names.ANNOTATION_DISTRUSTED] = ",".join(observed.nodes)
    return replace(result, create=create)


def believes_clocks_that_are_ahead(job: Job, observed: Observed, now: float) -> Plan:
    ahead = max(_OFFSETS)
    pods = (
        replace(
            pod,
            started=None if pod.started is None else pod.started + ahead,
            finished=None if pod.finished is None else pod.finished + ahead,
        )
        for pod in observed.pods
    )
    return plan(job, replace(observed, pods=tuple(pods)), now)


def restarts_a_job_that_does_not_answer(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    if observed.any_progress is not None or result.decision is None:
        return result
    pods = [Delete("Pod", p.name, p.uid, None, Reason.NO_PROGRESS) for p in observed.pods]
    return replace(result, delete=(*result.delete, *pods))


def believes_every_mark_of_gpus(job: Job, observed: Observed, now: float) -> Plan:
    others = {name: NodeView(name, has_gpus=True) for name in map(str, range(9))}
    return plan(job, replace(observed, nodes={**observed.nodes, **others}), now)


def kills_pods_that_save(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    pods = (pod for pod in observed.pods if pod.deleting and pod.running)
    kills = [Delete("Pod", pod.name, pod.uid, 0, Reason.SUSPENDED) for pod in pods]
    return replace(result, delete=(*result.delete, *kills))


def gives_up_the_group(job: Job, observed: Observed, now: float) -> Plan:
    result = plan(job, observed, now)
    return replace(result, status=result.status.model_copy(update={"group_attempt": None}))


def short_history(name: str, seed: int, has_fault: Callable[[History], bool]) -> History:
    """Return the pinned history in which ``name`` is detected.

    With UPDATE_GOLDEN one that no longer has the fault is found anew, from ``seed`` on, and shortened.
    """
    rows = json.loads(PINNED.read_text())
    if name in rows and has_fault(pinned := read_history(rows[name])):
        return pinned
    assert os.environ.get("UPDATE_GOLDEN"), (
        f"the history of {name} in {PINNED} has no fault: UPDATE_GOLDEN=1 finds another one"
    )
    seeds = (number for number in (seed, *range(3000)) if has_fault(History.of(number)))
    found = next(seeds, None)
    assert found is not None, f"none of 3000 histories detects {name}"
    rows[name] = shortest = History.of(found).shortened(has_fault)
    print(f"{name}: {found}\n{shortest}")
    lines = (f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
    PINNED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return shortest


def read_history(row: Any) -> History:
    size, events, offsets = row
    return History(Size(*size), tuple(events), tuple(offsets))


@pytest.mark.parametrize(
    ("wrong", "invariant", "seed"),
    [
        (restarts_a_finished_job, "finished job", 27),
        (deletes_by_force, "two processes of one rank", 481),
        (replaces_before_the_old_one_is_gone, "two for one", 3),
        (counts_lost_pods_as_restarts, "charged twice", 2),
        (counts_what_agents_tell_again, "a restart is counted twice", 10),
        (ignores_suspension, "a suspended job has its phase", 10),
        (writes_too_often, "did not converge", 0),
        (deletes_without_a_reason, "deleted without a reason", 4),
        (names_another_reason, "is not true of a pod that steps", 4),
        (replaces_all_pods_of_faulty_nodes_at_once, "too many pods are replaced", 160),
        (makes_pods_of_the_newest_defaults, "a pod without its revision", 9),
        (deletes_pods_that_restart_in_place, "a restart in place deletes a training pod", 166),
        (deletes_every_other_revision, "the revision of a pod is deleted", 4),
        (keeps_disruption_budgets, "exactly while there are pods", 10),
        (excludes_every_node, "more nodes are excluded for faults", 3),
        (believes_clocks_that_are_ahead, "with everything in place a job runs", 0),
        (restarts_all_pods_for_one, "ProgramFailed is not true of a pod that steps", 2),
        (charges_each_pod, "charged twice", 133),
        (restarts_a_job_that_does_not_answer, "NoProgress is not true of a pod that steps", 4),
        (believes_every_mark_of_gpus, "UnhealthyGPU is not true of a pod that steps", 50),
        (kills_pods_that_save, "killed before the end of its grace period", 4),
        (gives_up_the_group, "a restart gives up its group", 1036),
    ],
)
def test_a_wrong_planner_is_detected(wrong: Planner, invariant: str, seed: int) -> None:
    def has_fault(history: History) -> bool:
        return invariant in (history.fault(wrong) or "")

    history = short_history(wrong.__name__, seed, has_fault)
    assert has_fault(history)
    assert history.fault() is None, "the planner itself has no fault there"


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "fault"),
    [
        (kept_fields, "created_labels", lambda pod: {}, ""),
        (Cache, "pods", Cache._labelled, "an object that is not the job's"),
    ],
    ids=["believes changed labels", "takes pods by their labels"],
)
def test_a_wrong_cache_is_detected(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object, fault: str
) -> None:
    def has_fault(history: History) -> bool:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, wrong)
            found = history.fault()
            return found is not None and fault in found

    history = short_history(f"cache with wrong {name}", 0, has_fault)
    assert has_fault(history)
    assert history.fault() is None, "the cache itself has no fault there"


def test_a_history_is_shortened_to_what_its_fault_needs() -> None:
    def has_fault(history: History) -> bool:
        return "deleted without a reason" in (history.fault(deletes_without_a_reason) or "")

    history = History.of(4)
    shortest = history.shortened(has_fault)
    assert has_fault(shortest)
    assert len(shortest.events) <= len(history.events) / 2
