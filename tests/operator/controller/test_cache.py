"""The cache keeps the newest version of each object, in whatever order events arrive."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.jobs import KEY, OWNER, Clock, make_node, make_pod, make_training

from fluxtrain_operator.base.node_health import NodeMarks, parse_node_health
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.observed import Pod


def make_job(version: int = 1, name: str = "job", **metadata: Any) -> dict[str, Any]:
    return make_training(name=name, resourceVersion=str(version), **metadata)


def make_cache(*pods: dict[str, Any]) -> Cache:
    """Return a cache with the job and ``pods``."""
    cache = Cache()
    cache.set_job(make_job())
    for pod in pods:
        cache.set_pod(pod)
    return cache


def uids(pods: list[Any]) -> list[str]:
    return sorted(pod["metadata"]["uid"] for pod in pods)


def test_an_older_version_never_replaces_a_newer_one() -> None:
    cache = make_cache()
    cache.set_job(make_job(10))
    cache.set_job(make_job(9))
    assert cache.job(KEY) == make_job(10)
    cache.set_pod(make_pod(version=100))
    cache.set_pod(make_pod(version=99))
    assert cache.pods(KEY) == [make_pod(version=100)]


def test_a_pod_with_the_same_name_and_another_uid_replaces_the_old_one() -> None:
    cache = make_cache(make_pod(version=100, uid="old"), make_pod(version=101, uid="new"))
    cache.set_pod(make_pod(version=102, uid="old"), deleted=True)
    assert uids(cache.pods(KEY)) == ["new"]


def test_what_is_heard_late_of_a_deleted_object_does_not_replace_its_successor() -> None:
    cache = make_cache()
    cache.set_job(make_job(12, uid="new"))
    cache.set_job(make_job(9, uid="old"))
    assert cache.job(KEY) == make_job(12, uid="new"), "a response to a write came late"
    cache.set_job(make_job(9, uid="old"), deleted=True)
    assert cache.job(KEY) == make_job(12, uid="new"), "a refusal of a write came late"
    cache.set_job(make_job(11, uid="new"), deleted=True)
    assert cache.job(KEY) is None, "of the same job only one version is gone"
    cache = Cache()
    cache.set_job(make_job(uid=OWNER["uid"]))
    cache.set_pod(make_pod(version=100, uid="new"))
    cache.set_pod(make_pod(version=99, uid="old"))
    assert uids(cache.pods(KEY)) == ["new"], "the response to its creation came late"


def test_deleted_objects_are_removed() -> None:
    cache = Cache()
    assert cache.set_job(make_job()) == KEY
    assert cache.set_pod(make_pod()) == KEY
    cache.set_job(make_job(), deleted=True)
    cache.set_pod(make_pod(), deleted=True)
    assert cache.job(KEY) is None
    assert cache.pods(KEY) == []


def test_the_response_to_a_deletion_does_not_restore_a_removed_pod() -> None:
    cache = make_cache(make_pod())
    deleted = make_pod(deletionTimestamp="2026-01-01T00:00:00Z")
    cache.update_pod(KEY, deleted)
    assert "deletionTimestamp" in cache.pods(KEY)[0]["metadata"]
    cache.set_pod(deleted, deleted=True)
    cache.update_pod(KEY, deleted)
    assert cache.pods(KEY) == [], "the watch event came first"
    cache.set_pod(make_pod(uid="next"))
    cache.update_pod(KEY, deleted)
    assert uids(cache.pods(KEY)) == ["next"]


def test_a_pod_without_a_job_is_ignored() -> None:
    assert Cache().set_pod({"metadata": {"name": "x", "namespace": "ns"}}) is None


def test_a_changed_node_concerns_the_jobs_on_it() -> None:
    cache = make_cache(make_pod())
    assert cache.set_node(make_node("n1")) == [KEY]
    assert cache.set_node(make_node("n1")) == []
    assert cache.set_node(make_node("n2", ready=False)) == []
    assert cache.set_node(make_node("n1", ready=False)) == [KEY]
    assert cache.set_node(make_node("n1"), deleted=True) == [KEY], "deleted differs from not ready"
    assert not cache.nodes["n1"].ready


def test_a_changed_label_is_kept_and_concerns_no_job() -> None:
    cache = make_cache(make_pod())
    node = make_node("n1")
    node["metadata"]["labels"] = {"example.com/rack": "r1"}
    assert cache.set_node(node) == [KEY]
    node["metadata"]["labels"] = {"example.com/rack": "r2"}
    assert cache.set_node(node) == []
    assert cache.nodes["n1"].labels == {"example.com/rack": "r2"}


def test_a_node_concerns_the_jobs_whose_pods_are_on_it_now() -> None:
    cache = make_cache(make_pod(node=""))
    assert cache.set_node(make_node(ready=False)) == []
    cache.set_pod(make_pod(version=2, node="n1"))
    assert cache.set_node(make_node(ready=True)) == [KEY]
    cache.set_pod(make_pod(version=3, uid="another", node="n2"))
    assert cache.set_node(make_node(ready=False)) == []
    assert cache.set_node(make_node("n2")) == [KEY]


def test_a_deleted_node_is_kept_while_pods_are_on_it() -> None:
    cache = make_cache(make_pod("job-0"), make_pod("job-1"))
    cache.set_node(make_node("n1"))
    assert cache.set_node(make_node("n1"), deleted=True) == [KEY]
    cache.set_pod(make_pod("job-0"), deleted=True)
    assert not cache.nodes["n1"].ready
    cache.set_pod(make_pod("job-1"), deleted=True)
    assert cache.nodes == {}


def test_a_node_that_came_back_is_not_removed_with_the_last_pod_on_it() -> None:
    cache = make_cache(make_pod())
    cache.set_node(make_node("n1"), deleted=True)
    assert cache.set_node(make_node("n1")) == [KEY]
    cache.set_pod(make_pod(), deleted=True)
    assert cache.nodes["n1"].ready


def test_nothing_stays_in_memory_of_deleted_objects() -> None:
    cache = Cache()
    for index in range(20):
        dependent = make_job(name=f"job-{index}")
        dependent["spec"] = {"lifecycle": {"startAfter": ["first", f"job-{index + 1}"]}}
        cache.set_job(dependent)
        cache.set_job(dependent, deleted=True)
        pod, node = make_pod(node=f"node-{index}"), make_node(f"node-{index}")
        cache.set_node(node)
        cache.set_pod(pod)
        cache.set_node(node, deleted=True)
        cache.set_pod(pod, deleted=True)
    kept = {name: value for name, value in vars(cache).items() if name not in ("_marks", "_clock")}
    assert not any(kept.values()), kept


def test_only_the_fields_in_use_are_kept_of_a_pod() -> None:
    pod = make_pod(managedFields=[{"manager": "kubelet"}], annotations={"a": "b"})
    pod["spec"] |= {"containers": [{"name": "trainer"}]}
    pod["status"] = {"phase": "Running", "podIP": "10.0.0.1"}
    cache = make_cache(pod)
    (cached,) = cache.pods(KEY)
    assert Pod.from_object(cached) == Pod.from_object(pod)
    assert (cached["status"], cached["spec"]) == (pod["status"], {"nodeName": "n1"})
    assert "managedFields" not in cached["metadata"]
    pod["spec"]["schedulingGates"] = [{"name": "example.org/not-yet"}]
    cache.set_pod(pod)
    assert Pod.from_object(cache.pods(KEY)[0]).gates == ("example.org/not-yet",)


def test_pods_missing_from_a_list_are_removed_unless_they_are_newer() -> None:
    cache = make_cache(make_pod("job-0", 5), make_pod("job-1", 6), make_pod("job-2", 9))
    cache.set_pod(make_pod("foreign", 6, ownerReferences=[]))
    assert cache.retain_pods({"job-0"}, version=8, namespace="other") == []
    assert cache.retain_pods({"job-0"}, version=8, namespace="ns") == [KEY, KEY]
    assert uids(cache.pods(KEY)) == ["job-0", "job-2"]
    assert cache.foreign_pods(KEY) == []
    assert cache.retain_pods(set(), version=9) == [KEY, KEY]
    assert cache.pods(KEY) == []


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [{**OWNER, "uid": "another"}],
        [{**OWNER, "controller": False}],
        [{"kind": "ReplicaSet", "name": "job", "uid": "v", "controller": True}],
    ],
)
def test_a_pod_that_the_job_does_not_control_is_foreign(owners: list[dict[str, Any]]) -> None:
    cache = make_cache(make_pod("job-0"), make_pod("job-1", ownerReferences=owners))
    assert uids(cache.pods(KEY)) == ["job-0"]
    assert uids(cache.foreign_pods(KEY)) == ["job-1"]


def test_the_pods_of_an_earlier_job_with_the_same_name_are_foreign() -> None:
    cache = make_cache(make_pod())
    cache.set_job(make_job(), deleted=True)
    assert cache.pods(KEY) == []
    cache.set_job(make_job(200, uid="another"))
    assert cache.pods(KEY) == []
    assert uids(cache.foreign_pods(KEY)) == ["job-0"]


def test_a_job_with_fewer_pods_than_desired_misses_pods() -> None:
    cache = make_cache()
    cache.set_job({**make_job(), "status": {"nodes": {"ready": 0, "desired": 2}}})
    for name in ("job-rendezvous", "job-0", "job-1"):
        assert cache.misses_pods(KEY), name
        cache.set_pod(make_pod(name))
    assert not cache.misses_pods(KEY)


def test_pods_are_counted() -> None:
    cache = make_cache(make_pod(), make_pod("job-1"), make_pod("other-0", job="other"))
    cache.set_pod(make_pod(version=2, node="n2"))
    assert cache.num_pods == 3
    cache.set_pod(make_pod(uid="unknown"), deleted=True)
    assert cache.num_pods == 3
    cache.set_pod(make_pod(), deleted=True)
    cache.set_pod(make_pod(), deleted=True)
    assert cache.num_pods == 2


TAINT = {"spec": {"taints": [{"key": "amd-gpu-unhealthy", "effect": "NoSchedule"}]}}
DEADLOCK = {"status": {"conditions": [{"type": "KernelDeadlock", "status": "True"}]}}


@pytest.mark.parametrize(
    ("mark", "field"), [(TAINT, "unhealthy_since"), (DEADLOCK, "problem_since")]
)
def test_the_time_since_which_a_node_is_marked_is_kept_until_it_is_not(
    mark: dict[str, Any], field: str
) -> None:
    clock = Clock(100.0)
    cache, marked = Cache(clock=clock), {**make_node("n1"), **mark}
    for _ in range(3):
        cache.set_node(marked)
        assert getattr(cache.nodes["n1"], field) == 100.0
        clock.now += 10.0
    cache.set_node(make_node("n1"))
    assert getattr(cache.nodes["n1"], field) == 0.0
    clock.now = 200.0
    cache.set_node(marked)
    assert getattr(cache.nodes["n1"], field) == 200.0


def test_an_administrator_adds_marks_of_unhealthy_nodes() -> None:
    health = parse_node_health('{"nodes": {"conditions": ["DiskReady=False"]}}')
    cache, node = Cache(NodeMarks(health)), make_node("n1")
    node["status"]["conditions"].append({"type": "DiskReady", "status": "False"})
    cache.set_node(node)
    assert cache.nodes["n1"].problem == "condition DiskReady=False"
