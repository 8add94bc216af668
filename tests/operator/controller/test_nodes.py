"""Nodes: the faults of all jobs, summed when they change, and when pods and nodes changed.

A new leader knows the same. Times are by the operator's clock.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.jobs import KEY, Clock, make_job, make_node, make_pod, make_training
from tests.operator.object_store import Harness, run

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import Fault, score
from fluxtrain_operator.controller import cache as cache_module
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.observed import NodeView, Pod

NOW = float(int(time.time()))


def fault(node: str = "n1", seconds_ago: float = 0.0, reason: str = "NodeLost") -> dict[str, Any]:
    return {"node": node, "reason": reason, "time": stamp(NOW - seconds_ago), "pod": "u"}


def job(name: str, *faults: dict[str, Any], version: int = 1) -> dict[str, Any]:
    manifest = make_job(name, nodeFaults=list(faults))
    manifest["metadata"]["resourceVersion"] = str(version)
    return manifest


def make_cache(*nodes: str) -> Cache:
    cache = Cache()
    for name in nodes:
        cache.set_node(make_node(name))
    return cache


def values(cache: Cache, now: float = NOW) -> dict[str, float]:
    distrust = cache.fault_history.distrust(now)
    return {name: round(distrust.of(name), 3) for name in distrust.scores}


def test_faults_of_all_jobs_are_summed_and_the_worst_node_is_first() -> None:
    cache = make_cache("n1", "n2", "n3")
    cache.set_job(job("a", fault("n1", 3600), fault("n2", 7200)))
    cache.set_job(job("b", fault("n2", 600)))
    assert list(values(cache)) == ["n2", "n1"]
    cache.set_job(job("b", version=2))
    assert list(values(cache)) == ["n1", "n2"]
    cache.set_job(job("a", version=2), deleted=True)
    assert values(cache) == {}
    assert len(cache.fault_history) == 0


def test_nodes_that_do_not_exist_are_not_distrusted() -> None:
    cache = make_cache("n1")
    cache.set_job(job("a", fault("n1"), fault("stranger")))
    assert values(cache) == {"n1": 1.0}
    cache.set_node(make_node("stranger"))
    assert values(cache) == {"n1": 1.0, "stranger": 1.0}
    cache.set_node(make_node("n1"), deleted=True)
    assert values(cache) == {"stranger": 1.0}


def test_a_node_that_is_created_again_under_its_name_starts_anew() -> None:
    cache = make_cache("n1")
    cache.set_job(job("a", fault("n1", 600)))
    again = make_node("n1")
    again["metadata"]["creationTimestamp"] = stamp(NOW - 60)
    cache.set_node(make_node("n1"), deleted=True)
    cache.set_node(again)
    assert values(cache) == {}
    cache.set_job(job("a", fault("n1", 600), fault("n1", 30), version=2))
    assert values(cache) == {"n1": pytest.approx(1.0, abs=0.01)}


def test_a_new_leader_knows_the_same_in_any_order_of_events() -> None:
    manifests = [job(f"j{n}", fault(f"n{n % 3}", n * 500), fault("n1", n * 90)) for n in range(9)]
    expected = make_cache("n0", "n1", "n2")
    for manifest in manifests:
        expected.set_job(manifest)
    other = make_cache()
    for manifest in reversed(manifests):
        other.set_job(manifest)
    for name in ("n2", "n0", "n1"):
        other.set_node(make_node(name))
    assert values(other) == values(expected)


def test_the_sums_are_those_of_all_faults_after_any_changes() -> None:
    chance = random.Random(7)
    nodes, present = [f"n{n}" for n in range(6)], dict[str, list[dict[str, Any]]]()
    cache, now = make_cache(*nodes), NOW
    for version in range(2, 400):
        name = f"job-{chance.randrange(8)}"
        now += chance.choice((0.0, 1.0, 30.0, 900.0))
        if chance.random() < 0.2:
            present.pop(name, None)
            cache.set_job(job(name, version=version), deleted=True)
        else:
            listed = [
                fault(chance.choice(nodes), NOW - now + chance.randrange(9999)) for _ in range(4)
            ]
            present[name] = listed
            cache.set_job(job(name, *listed, version=version))
        distrust = cache.fault_history.distrust(now)
        for node in nodes:
            known = [f for each in present.values() for f in each if f["node"] == node]
            faults = [Fault(node, f["reason"], _time(f)) for f in known]
            expected = score(faults, now).value
            assert distrust.of(node) == pytest.approx(expected, abs=0.07)  # forgotten below 1/16


def _time(listed: dict[str, Any]) -> float:
    from fluxtrain_operator.base.names import seconds

    return seconds(listed["time"]) or 0.0


def test_what_does_not_change_is_not_summed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, summed = make_cache("n1", "n2"), list[float]()

    def counting(faults: Any, now: float, created: float = 0.0) -> Any:
        listed = list(faults)
        summed.append(len(listed))
        return score(listed, now, created)

    monkeypatch.setattr(cache_module, "score", counting)
    for number in range(1000):
        cache.set_job(job(f"job-{number}", *[fault("n1", 60 * n) for n in range(16)]))
    assert summed == []
    cache.fault_history.distrust(NOW)
    assert summed == [16_000]
    for number in range(1000):  # a status write and a reconcile of each job
        changed = job(f"job-{number}", *[fault("n1", 60 * n) for n in range(16)], version=2)
        cache.set_job({**changed, "status": {**changed["status"], "phase": "Running"}})
        cache.fault_history.distrust(NOW + number)
    assert summed == [16_000]
    cache.set_job(job("another", fault("n2")))
    cache.fault_history.distrust(NOW + 1000)
    assert summed == [16_000, 1]


def test_a_scrape_reads_the_hundred_worst_nodes() -> None:
    metrics, cache = Metrics(CollectorRegistry()), make_cache(*(f"n{n}" for n in range(150)))
    assert distrusted(metrics) == {}
    metrics.watch_distrust(lambda: cache.fault_history.distrust(NOW))
    for n in range(150):
        cache.set_job(job(f"job-{n}", fault(f"n{n}", 60.0 * n)))
    series = distrusted(metrics)
    assert len(series) == 100
    assert series["n0"] == 1.0
    assert "n120" not in series
    assert all(0 < value <= 1 for value in series.values())


def distrusted(metrics: Metrics) -> dict[str, float]:
    families = {family.name: family for family in metrics.registry.collect()}
    samples = families["fluxtrain_operator_node_distrust"].samples
    return {sample.labels["node"]: sample.value for sample in samples}


def test_pods_of_one_job_exclude_and_avoid_nodes_on_which_others_met_faults() -> None:
    harness = Harness()
    for number in range(10):
        harness.cache.set_node(make_node(f"n{number}"))
    past = NOW - time.time()  # the module may have been imported an hour ago
    bad = [fault("n3", past + 120.0 * n) for n in range(3)]
    harness.cache.set_job(job("other", *bad, fault("n4", past)))
    run(harness, 1)
    pod = harness.cluster.objects["Pod", "job-0"]
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][-1]["values"] == ["n3"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["values"] == ["n4"]
    assert pod["metadata"]["annotations"]["fluxtrain.dev/distrusted-nodes"] == "n3"
    store = harness.cluster.objects["Pod", "job-rendezvous"]["spec"]["affinity"]["nodeAffinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in store, "it only avoids them"


THEN, HOUR = 1_800_000_000.0, 3600.0
AHEAD, RIGHT, BEHIND = HOUR, 0.0, -HOUR
clocks = pytest.mark.parametrize("offset", [AHEAD, RIGHT, BEHIND], ids=["ahead", "right", "behind"])


def clocked_cache() -> tuple[Cache, Clock]:
    """Return the cache of a new leader, which knows the job only."""
    clock = Clock(THEN)
    cache = Cache(clock=clock)
    cache.set_job(make_training())
    return cache, clock


def at(started: float | None, ended: float | None = None, uid: str = "one") -> dict[str, Any]:
    """Return a pod created 100 s ago whose kubelet tells these times."""
    state: dict[str, Any] = {} if started is None else {"running": {"startedAt": stamp(started)}}
    if started is not None and ended is not None:
        times = {"startedAt": stamp(started), "finishedAt": stamp(ended)}
        state = {"terminated": {"exitCode": 1, **times}}
    pod = make_pod(uid=uid, creationTimestamp=stamp(THEN - 100))
    pod["metadata"]["labels"][names.LABEL_COMPONENT] = names.TRAINER
    statuses = [{"name": names.TRAINER, "state": state}]
    return {**pod, "status": {"phase": "Running", "containerStatuses": statuses}}


def seen(cache: Cache) -> Pod:
    (manifest,) = cache.pods(KEY)
    return Pod.from_object(manifest)


@clocks
def test_a_pod_that_is_watched_starts_and_ends_when_it_is_seen(offset: float) -> None:
    cache, clock = clocked_cache()
    cache.set_pod(at(None))
    assert (seen(cache).started, seen(cache).finished) == (None, None)
    clock.now = THEN + 10
    cache.set_pod(at(THEN + 9 + offset))
    clock.now = THEN + 20
    cache.set_pod(at(THEN + 9 + offset))
    assert (seen(cache).started, seen(cache).finished) == (THEN + 10, None)
    clock.now = THEN + 500
    for _ in range(2):
        cache.set_pod(at(THEN + 9 + offset, THEN + 499 + offset))
        assert (seen(cache).started, seen(cache).finished) == (THEN + 10, THEN + 500)
        clock.now += 50


@clocks
def test_how_long_a_pod_ran_is_told_by_one_clock(offset: float) -> None:
    cache, clock = clocked_cache()
    cache.set_pod(at(None))
    clock.now = THEN + 300  # the start was not seen
    cache.set_pod(at(THEN + 3 + offset, THEN + 8 + offset))
    assert (seen(cache).started, seen(cache).finished) == (THEN + 295, THEN + 300)


@pytest.mark.parametrize(
    ("told", "started"),
    [(THEN + HOUR, THEN), (THEN - 7, THEN - 7), (THEN - HOUR, THEN - 100)],
)
def test_a_new_leader_knows_that_a_pod_started_after_its_creation(
    told: float, started: float
) -> None:
    cache, clock = clocked_cache()
    cache.set_pod(at(told))
    assert seen(cache).started == started
    clock.now = THEN + 60
    cache.set_pod(at(told))
    assert seen(cache).started == started
    cache.set_pod(at(told, told + 30))
    assert (seen(cache).started, seen(cache).finished) == (THEN + 30, THEN + 60)


@clocks
def test_another_pod_with_the_same_name_has_its_own_times(offset: float) -> None:
    cache, clock = clocked_cache()
    cache.set_pod(at(None, uid="old"))
    cache.set_pod(at(THEN + offset, THEN + 5 + offset, uid="old"))
    clock.now = THEN + 20
    cache.set_pod(at(None, uid="new"))
    assert (seen(cache).started, seen(cache).finished) == (None, None)
    clock.now = THEN + 30
    cache.set_pod(at(THEN + offset, uid="new"))  # even if the node tells the time of the old one
    assert seen(cache).started == THEN + 30


def test_a_pod_keeps_its_times_in_the_response_to_its_deletion() -> None:
    cache, clock = clocked_cache()
    cache.set_pod(at(THEN + HOUR))
    clock.now = THEN + 10
    cache.update_pod(KEY, at(THEN + HOUR))
    assert seen(cache).started == THEN


def test_times_are_forgotten_with_the_pod() -> None:
    cache, clock = clocked_cache()
    cache.set_pod(at(THEN + HOUR))
    cache.set_pod(at(THEN + HOUR), deleted=True)
    assert cache.num_pods == 0
    clock.now = THEN + 10
    cache.set_pod(at(THEN + HOUR))
    assert seen(cache).started == THEN + 10


@pytest.mark.parametrize("time", [None, "", "soon", 5, ["x"], "1970-01-01T00:00:00Z"])
def test_a_time_that_is_none_is_left_out(time: object) -> None:
    cache, _ = clocked_cache()
    pod = at(THEN)
    state = {"terminated": {"exitCode": 137, "startedAt": time, "finishedAt": time}}
    pod["status"]["containerStatuses"][0]["state"] = state
    cache.set_pod(pod)
    assert (seen(cache).started, seen(cache).finished, seen(cache).ended) == (None, None, True)


def node(ready: bool, told: float, created: float = THEN - 100) -> dict[str, Any]:
    manifest = make_node("n1", ready)
    manifest["metadata"]["creationTimestamp"] = stamp(created)
    manifest["status"]["conditions"][0]["lastTransitionTime"] = stamp(told)
    return manifest


def view(cache: Cache) -> tuple[bool, float]:
    found: NodeView = cache.nodes["n1"]
    return found.ready, found.since


@clocks
def test_a_node_that_is_watched_changes_when_it_is_seen(offset: float) -> None:
    cache, clock = clocked_cache()
    cache.set_pod(make_pod())
    cache.set_node(node(True, THEN - 50 + offset))
    for ready in (False, True, False):
        clock.now += 30
        told = clock.now - 1 + offset
        assert cache.set_node(node(ready, told)) == [KEY]
        clock.now += 5
        assert cache.set_node(node(ready, told)) == [], "a heartbeat changes nothing"
        assert view(cache) == (ready, clock.now - 5)


@pytest.mark.parametrize(
    ("told", "since"),
    [(THEN + HOUR, THEN), (THEN - 7, THEN - 7), (THEN - HOUR, THEN - 100)],
)
def test_a_new_leader_knows_that_a_node_changed_after_its_creation(
    told: float, since: float
) -> None:
    cache, clock = clocked_cache()
    for _ in range(2):
        cache.set_node(node(False, told))
        assert view(cache) == (False, since)
        clock.now += 10


def test_a_node_that_registers_again_is_another_one() -> None:
    cache, clock = clocked_cache()
    cache.set_pod(make_pod())
    cache.set_node(node(False, THEN + HOUR))
    cache.set_node(node(False, THEN + HOUR), deleted=True)
    assert view(cache) == (False, 0.0)
    clock.now = THEN + 40
    cache.set_node(node(False, THEN - HOUR, created=THEN + 35))
    assert view(cache) == (False, THEN + 35)
