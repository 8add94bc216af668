"""The ledger of nodes: faults of all jobs, summed when they change; a new leader knows the same."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.jobs import make_job, make_node
from tests.operator.object_store import Harness, run

from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import Fault, score
from fluxtrain_operator.controller import cache as node_ledger
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.metrics import Metrics

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
    distrust = cache.ledger.distrust(now)
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
    assert len(cache.ledger) == 0


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
        distrust = cache.ledger.distrust(now)
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

    monkeypatch.setattr(node_ledger, "score", counting)
    for number in range(1000):
        cache.set_job(job(f"job-{number}", *[fault("n1", 60 * n) for n in range(16)]))
    assert summed == []
    cache.ledger.distrust(NOW)
    assert summed == [16_000]
    for number in range(1000):  # a status write and a reconcile of each job
        changed = job(f"job-{number}", *[fault("n1", 60 * n) for n in range(16)], version=2)
        cache.set_job({**changed, "status": {**changed["status"], "phase": "Running"}})
        cache.ledger.distrust(NOW + number)
    assert summed == [16_000]
    cache.set_job(job("another", fault("n2")))
    cache.ledger.distrust(NOW + 1000)
    assert summed == [16_000, 1]


def test_a_scrape_reads_the_hundred_worst_nodes() -> None:
    metrics, cache = Metrics(CollectorRegistry()), make_cache(*(f"n{n}" for n in range(150)))
    assert distrusted(metrics) == {}
    metrics.watch_distrust(lambda: cache.ledger.distrust(NOW))
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
    bad = [fault("n3", 120.0 * n) for n in range(3)]
    harness.cache.set_job(job("other", *bad, fault("n4")))
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
