"""The cache knows by the operator's clock when pods start and end, and when nodes are ready or not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.jobs import KEY, Clock, make_node, make_pod, make_training

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.observed import NodeView, Pod

NOW, HOUR = 1_800_000_000.0, 3600.0
AHEAD, RIGHT, BEHIND = HOUR, 0.0, -HOUR
clocks = pytest.mark.parametrize("offset", [AHEAD, RIGHT, BEHIND], ids=["ahead", "right", "behind"])


def make_cache() -> tuple[Cache, Clock]:
    """Return the cache of a new leader, which knows the job only."""
    clock = Clock(NOW)
    cache = Cache(clock=clock)
    cache.set_job(make_training())
    return cache, clock


def at(started: float | None, ended: float | None = None, uid: str = "one") -> dict[str, Any]:
    """Return a pod created 100 s ago whose kubelet tells these times."""
    state: dict[str, Any] = {} if started is None else {"running": {"startedAt": stamp(started)}}
    if started is not None and ended is not None:
        times = {"startedAt": stamp(started), "finishedAt": stamp(ended)}
        state = {"terminated": {"exitCode": 1, **times}}
    pod = make_pod(uid=uid, creationTimestamp=stamp(NOW - 100))
    pod["metadata"]["labels"][names.LABEL_COMPONENT] = names.TRAINER
    statuses = [{"name": names.TRAINER, "state": state}]
    return {**pod, "status": {"phase": "Running", "containerStatuses": statuses}}


def seen(cache: Cache) -> Pod:
    (manifest,) = cache.pods(KEY)
    return Pod.from_object(manifest)


@clocks
def test_a_pod_that_is_watched_starts_and_ends_when_it_is_seen(offset: float) -> None:
    cache, clock = make_cache()
    cache.set_pod(at(None))
    assert (seen(cache).started, seen(cache).finished) == (None, None)
    clock.now = NOW + 10
    cache.set_pod(at(NOW + 9 + offset))
    clock.now = NOW + 20
    cache.set_pod(at(NOW + 9 + offset))
    assert (seen(cache).started, seen(cache).finished) == (NOW + 10, None)
    clock.now = NOW + 500
    for _ in range(2):
        cache.set_pod(at(NOW + 9 + offset, NOW + 499 + offset))
        assert (seen(cache).started, seen(cache).finished) == (NOW + 10, NOW + 500)
        clock.now += 50


@clocks
def test_how_long_a_pod_ran_is_told_by_one_clock(offset: float) -> None:
    cache, clock = make_cache()
    cache.set_pod(at(None))
    clock.now = NOW + 300  # the start was not seen
    cache.set_pod(at(NOW + 3 + offset, NOW + 8 + offset))
    assert (seen(cache).started, seen(cache).finished) == (NOW + 295, NOW + 300)


@pytest.mark.parametrize(
    ("told", "started"), [(NOW + HOUR, NOW), (NOW - 7, NOW - 7), (NOW - HOUR, NOW - 100)]
)
def test_a_new_leader_knows_that_a_pod_started_after_its_creation(
    told: float, started: float
) -> None:
    cache, clock = make_cache()
    cache.set_pod(at(told))
    assert seen(cache).started == started
    clock.now = NOW + 60
    cache.set_pod(at(told))
    assert seen(cache).started == started
    cache.set_pod(at(told, told + 30))
    assert (seen(cache).started, seen(cache).finished) == (NOW + 30, NOW + 60)


@clocks
def test_another_pod_with_the_same_name_has_its_own_times(offset: float) -> None:
    cache, clock = make_cache()
    cache.set_pod(at(None, uid="old"))
    cache.set_pod(at(NOW + offset, NOW + 5 + offset, uid="old"))
    clock.now = NOW + 20
    cache.set_pod(at(None, uid="new"))
    assert (seen(cache).started, seen(cache).finished) == (None, None)
    clock.now = NOW + 30
    cache.set_pod(at(NOW + offset, uid="new"))  # even if the node tells the time of the old one
    assert seen(cache).started == NOW + 30


def test_a_pod_keeps_its_times_in_the_response_to_its_deletion() -> None:
    cache, clock = make_cache()
    cache.set_pod(at(NOW + HOUR))
    clock.now = NOW + 10
    cache.update_pod(KEY, at(NOW + HOUR))
    assert seen(cache).started == NOW


def test_times_are_forgotten_with_the_pod() -> None:
    cache, clock = make_cache()
    cache.set_pod(at(NOW + HOUR))
    cache.set_pod(at(NOW + HOUR), deleted=True)
    assert cache.num_pods == 0
    clock.now = NOW + 10
    cache.set_pod(at(NOW + HOUR))
    assert seen(cache).started == NOW + 10


@pytest.mark.parametrize("time", [None, "", "soon", 5, ["x"], "1970-01-01T00:00:00Z"])
def test_a_time_that_is_none_is_left_out(time: object) -> None:
    cache, _ = make_cache()
    pod = at(NOW)
    state = {"terminated": {"exitCode": 137, "startedAt": time, "finishedAt": time}}
    pod["status"]["containerStatuses"][0]["state"] = state
    cache.set_pod(pod)
    assert (seen(cache).started, seen(cache).finished, seen(cache).ended) == (None, None, True)


def node(ready: bool, told: float, created: float = NOW - 100) -> dict[str, Any]:
    manifest = make_node("n1", ready)
    manifest["metadata"]["creationTimestamp"] = stamp(created)
    manifest["status"]["conditions"][0]["lastTransitionTime"] = stamp(told)
    return manifest


def view(cache: Cache) -> tuple[bool, float]:
    found: NodeView = cache.nodes["n1"]
    return found.ready, found.since


@clocks
def test_a_node_that_is_watched_changes_when_it_is_seen(offset: float) -> None:
    cache, clock = make_cache()
    cache.set_pod(make_pod())
    cache.set_node(node(True, NOW - 50 + offset))
    for ready in (False, True, False):
        clock.now += 30
        told = clock.now - 1 + offset
        assert cache.set_node(node(ready, told)) == [KEY]
        clock.now += 5
        assert cache.set_node(node(ready, told)) == [], "a heartbeat changes nothing"
        assert view(cache) == (ready, clock.now - 5)


@pytest.mark.parametrize(
    ("told", "since"), [(NOW + HOUR, NOW), (NOW - 7, NOW - 7), (NOW - HOUR, NOW - 100)]
)
def test_a_new_leader_knows_that_a_node_changed_after_its_creation(
    told: float, since: float
) -> None:
    cache, clock = make_cache()
    for _ in range(2):
        cache.set_node(node(False, told))
        assert view(cache) == (False, since)
        clock.now += 10


def test_a_node_that_registers_again_is_another_one() -> None:
    cache, clock = make_cache()
    cache.set_pod(make_pod())
    cache.set_node(node(False, NOW + HOUR))
    cache.set_node(node(False, NOW + HOUR), deleted=True)
    assert view(cache) == (False, 0.0)
    clock.now = NOW + 40
    cache.set_node(node(False, NOW - HOUR, created=NOW + 35))
    assert view(cache) == (False, NOW + 35)
