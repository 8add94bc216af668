"""The store keeps the newest version of each object, whatever order the watches bring them in."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Applied, Cache, Support
from fluxtrain_operator.planner.observed import Pod


def job(version: int = 1, name: str = "job") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": str(version)}
    }


OWNED = [{"kind": "FluxTraining", "name": "job", "uid": "u", "controller": True}]
"""By the job of ``job()``."""


def make_store() -> Cache:
    """Return a store that knows the job."""
    store = Cache()
    store.set_job(job())
    return store


def pod(name: str, version: int = 1, uid: str = "p", node: str = "n1") -> dict[str, Any]:
    labels = {names.LABEL_JOB: "job"}
    metadata = {"name": name, "namespace": "ns", "uid": uid, "labels": labels}
    metadata |= {"resourceVersion": str(version), "ownerReferences": OWNED}
    return {"metadata": metadata, "spec": {"nodeName": node}}


def node(name: str = "n1", ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions}}


KEY = ("ns", "job")


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = make_store()
    store.set_job(job(10))
    store.set_job(job(9))
    assert store.job(KEY) == job(10)
    store.set_pod(pod("job-0", 100))
    store.set_pod(pod("job-0", 99))
    assert store.pods(KEY) == [pod("job-0", 100)]


def test_a_pod_of_the_same_name_and_another_uid_replaces_the_old_one() -> None:
    store = make_store()
    store.set_pod(pod("job-0", 100, "old"))
    store.set_pod(pod("job-0", 101, "new"))
    store.set_pod(pod("job-0", 102, "old"), gone=True)
    assert [p["metadata"]["uid"] for p in store.pods(KEY)] == ["new"]


def test_what_is_gone_is_forgotten() -> None:
    store = Cache()
    assert store.set_job(job()) == KEY
    assert store.set_pod(pod("job-0")) == KEY
    store.set_job(job(), gone=True)
    store.set_pod(pod("job-0"), gone=True)
    assert store.job(KEY) is None
    assert store.pods(KEY) == []


def test_a_pod_that_is_gone_does_not_come_back_by_the_answer_to_its_deletion() -> None:
    store = Cache()
    store.set_job(job())
    store.set_pod(pod("job-0"))
    going = pod("job-0")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    store.update_pod(KEY, going)
    assert "deletionTimestamp" in store.pods(KEY)[0]["metadata"]
    store.set_pod(going, gone=True)
    store.update_pod(KEY, going)
    assert store.pods(KEY) == [], "the watch was first"
    store.set_pod(pod("job-0", uid="next"))
    store.update_pod(KEY, going)
    assert [p["metadata"]["uid"] for p in store.pods(KEY)] == ["next"]


def test_a_pod_of_nobody_is_left_alone() -> None:
    assert Cache().set_pod({"metadata": {"name": "x", "namespace": "ns"}}) is None


def test_a_node_concerns_the_jobs_on_it_only_when_it_changes() -> None:
    store = Cache()
    store.set_pod(pod("job-0", node="n1"))
    assert store.set_node(node("n1")) == [KEY]
    assert store.set_node(node("n1")) == []
    assert store.set_node(node("n2", ready=False)) == []
    assert store.set_node(node("n1", ready=False)) == [KEY]
    assert store.set_node(node("n1"), gone=True) == [KEY], "not ready may be a lie, gone is not"
    assert not store.nodes["n1"].ready


def test_a_node_that_is_gone_is_remembered_as_long_as_pods_are_on_it() -> None:
    store = Cache()
    store.set_pod(pod("job-0", node="n1"))
    store.set_pod(pod("job-1", uid="q", node="n1"))
    store.set_node(node("n1"))
    assert store.set_node(node("n1"), gone=True) == [KEY]
    store.set_pod(pod("job-0", node="n1"), gone=True)
    assert not store.nodes["n1"].ready
    store.set_pod(pod("job-1", uid="q", node="n1"), gone=True)
    assert store.nodes == {}


def test_a_node_that_came_back_is_not_forgotten_with_the_last_pod_on_it() -> None:
    store = Cache()
    store.set_pod(pod("job-0", node="n1"))
    store.set_node(node("n1"), gone=True)
    assert store.set_node(node("n1")) == [KEY]
    store.set_pod(pod("job-0", node="n1"), gone=True)
    assert store.nodes["n1"].ready


def test_nothing_is_remembered_of_what_is_gone() -> None:
    store = Cache()
    for index in range(20):
        waiting = job(name=f"job-{index}")
        waiting["spec"] = {"lifecycle": {"startAfter": ["first", f"job-{index + 1}"]}}
        store.set_job(waiting)
        store.set_job(waiting, gone=True)
        name = f"node-{index}"
        store.set_node(node(name))
        store.set_pod(pod("job-0", node=name))
        store.set_node(node(name), gone=True)
        store.set_pod(pod("job-0", node=name), gone=True)
    assert not any(vars(store).values()), vars(store)


def test_of_a_pod_is_kept_what_is_looked_at_and_nothing_else() -> None:
    whole = pod("job-0")
    whole["metadata"] |= {"managedFields": [{"manager": "kubelet"}], "annotations": {"a": "b"}}
    whole["spec"] |= {"containers": [{"name": "trainer"}]}
    whole["status"] = {"phase": "Running", "podIP": "10.0.0.1"}
    store = make_store()
    store.set_pod(whole)
    (kept,) = store.pods(KEY)
    assert Pod.from_object(kept) == Pod.from_object(whole)
    assert (kept["status"], kept["spec"]) == (whole["status"], {"nodeName": "n1"})
    whole["spec"]["schedulingGates"] = [{"name": "example.org/not-yet"}]
    store.set_pod(whole)
    assert Pod.from_object(store.pods(KEY)[0]).gates == ("example.org/not-yet",)
    assert "managedFields" not in kept["metadata"]


def test_pods_that_went_unnoticed_are_forgotten_and_those_made_since_are_kept() -> None:
    store = make_store()
    for name, version in (("job-0", 5), ("job-1", 6), ("job-2", 9)):
        store.set_pod(pod(name, version, uid=name))
    assert store.keep_pods({"job-0"}, version=8, namespace="other") == []
    assert store.keep_pods({"job-0"}, version=8, namespace="ns") == [KEY]
    assert sorted(p["metadata"]["name"] for p in store.pods(KEY)) == ["job-0", "job-2"]
    assert store.keep_pods(set(), version=9) == [KEY, KEY]
    assert store.pods(KEY) == []


def orphan(name: str, **metadata: Any) -> dict[str, Any]:
    """Return a pod with the job's label that is not the job's."""
    made = pod(name, uid=name)
    made["metadata"] |= {"ownerReferences": [], **metadata}
    return made


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [{**OWNED[0], "uid": "another"}],
        [{**OWNED[0], "controller": False}],
        [{"kind": "ReplicaSet", "name": "job", "uid": "v", "controller": True}],
    ],
)
def test_only_a_pod_that_this_job_controls_is_its_own(owners: list[dict[str, Any]]) -> None:
    store = make_store()
    store.set_pod(pod("job-0", uid="own"))
    store.set_pod(orphan("job-1", ownerReferences=owners))
    assert [p["metadata"]["uid"] for p in store.pods(KEY)] == ["own"]
    assert [p["metadata"]["name"] for p in store.strangers(KEY)] == ["job-1"]


def test_a_job_that_is_created_anew_has_none_of_the_pods_of_the_one_before() -> None:
    store = make_store()
    store.set_pod(pod("job-0"))
    store.set_job(job(), gone=True)
    assert store.pods(KEY) == []
    anew = job(200)
    anew["metadata"]["uid"] = "another"
    store.set_job(anew)
    assert store.pods(KEY) == []
    assert len(store.strangers(KEY)) == 1


def test_strangers_that_went_unnoticed_are_forgotten_too() -> None:
    store = make_store()
    store.set_pod(orphan("job-1"))
    store.keep_pods(set(), version=8)
    assert store.strangers(KEY) == []


def test_a_node_concerns_the_jobs_whose_pods_are_on_it_now() -> None:
    store = make_store()
    store.set_pod(pod("job-0", 1, node=""))
    assert store.set_node(node(ready=False)) == []
    store.set_pod(pod("job-0", 2, node="n1"))
    assert store.set_node(node(ready=True)) == [KEY]
    store.set_pod(pod("job-0", 3, uid="another", node="n2"))
    assert store.set_node(node(ready=False)) == []
    assert store.set_node(node("n2")) == [KEY]


def around(kind: str, name: str, hashed: str, **owner: Any) -> tuple[str, dict[str, Any]]:
    notes = {names.ANNOTATION_APPLIED: hashed}
    labels = {names.LABEL_JOB: "job"}
    metadata = {"name": name, "namespace": "ns", "labels": labels, "annotations": notes}
    return kind, {"metadata": {**metadata, "ownerReferences": [owner] if owner else []}}


def test_of_what_is_around_pods_only_what_their_job_controls_counts() -> None:
    support = Support()
    support.add(*around("Service", "job", "a", uid="u", controller=True))
    support.add(*around("Service", "foreign", "b"))
    support.add(*around("Service", "lent", "c", uid="u", controller=False))
    assert support.of("ns", "u") == {("Service", "job"): Applied("", "a")}
    assert support.of("ns", "other") == {}


def test_a_job_is_told_of_when_something_around_its_pods_came_went_or_changed() -> None:
    before, after, none = Support(), Support(), Support()
    before.add(*around("Service", "job", "a", uid="u", controller=True))
    after.add(*around("Service", "job", "b", uid="u", controller=True))
    assert after.differs(before) == none.differs(before) == before.differs(none) == [KEY]
    assert after.differs(after) == []


def test_a_job_is_short_that_has_fewer_pods_than_were_asked_for() -> None:
    store = make_store()
    asked = job()
    asked["status"] = {"nodes": {"ready": 0, "desired": 2}}
    store.set_job(asked)
    assert store.is_short(KEY)
    for number, name in enumerate(("job-rendezvous", "job-0", "job-1")):
        assert store.is_short(KEY), number
        store.set_pod(pod(name, uid=name))
    assert not store.is_short(KEY)
