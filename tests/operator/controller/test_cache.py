"""The cache keeps the newest version of each object, in whatever order events arrive.

Decoding only the fields in use changes nothing that is read. Somebody changes labels or annotations of a
job's own pods: the job goes on, and reports what matters.
"""

from __future__ import annotations

import copy
import json
import time
from functools import partial
from typing import Any

import msgspec
import pytest
from benchmarks.operator import crowd
from benchmarks.operator.fake_api_server import FakeApiServer
from tests.operator.jobs import KEY, OWNER, Clock, make_node, make_pod, make_training, run_pods
from tests.operator.jobs import make_job as job_manifest
from tests.operator.object_store import Harness, run

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import NodeMarks, parse_node_health
from fluxtrain_operator.controller.cache import Applied, Cache
from fluxtrain_operator.controller.kept_fields import NodeFields, ObjectFields, PodFields, trimmed
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod, controller_of


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


def test_a_list_of_after_a_rollback_of_etcd_replaces_all_that_was_cached_before() -> None:
    cache = make_cache(make_pod("ghost", 80), make_pod("job-0", 90), make_pod("job-1", 20))
    forget = cache.before_pod_list()
    cache.set_pod(make_pod("job-2", 53))  # our own write, after the rollback and the list
    forget(52)
    for pod in (make_pod("job-0", 40), make_pod("job-1", 20)):
        cache.set_pod(pod)
    cache.retain_pods({"job-0", "job-1"}, version=52)
    assert uids(cache.pods(KEY)) == ["job-0", "job-1", "job-2"]
    versions = {p["metadata"]["uid"]: p["metadata"]["resourceVersion"] for p in cache.pods(KEY)}
    assert versions == {"job-0": "40", "job-1": "20", "job-2": "53"}
    job = make_training()
    older = {**job, "metadata": {**job["metadata"], "resourceVersion": "1"}, "rolledBack": True}
    cache.set_job(older)
    assert "rolledBack" in cache.job(KEY), "jobs of before the rollback are replaced, too"


def test_a_list_that_lags_behind_our_own_writes_replaces_nothing() -> None:
    cache = make_cache(make_pod("job-0", 80), make_pod("job-1", 90))
    forget = cache.before_pod_list("ns")
    cache.set_pod(make_pod("job-0", 105, deletionTimestamp="2027-01-15T08:00:00Z"))
    cache.set_pod(make_pod("job-2", 106))
    forget(100)
    cache.set_pod(make_pod("job-0", 80))
    cache.retain_pods({"job-0", "job-1"}, version=100)
    assert uids(cache.pods(KEY)) == ["job-0", "job-1", "job-2"]
    pods = [Pod.from_object(pod) for pod in cache.pods(KEY)]
    assert [pod.uid for pod in pods if pod.deleting] == ["job-0"]


def test_a_list_of_another_namespace_is_not_compared() -> None:
    cache = make_cache(make_pod("job-0", 80))
    cache.before_pod_list("other")(52)
    cache.set_pod(make_pod("job-0", 40))
    assert cache.pods(KEY)[0]["metadata"]["resourceVersion"] == "80"


def test_pods_that_were_disrupted_are_kept_until_the_status_counts_them() -> None:
    drained = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cache = make_cache(make_pod("job-0", 5), make_pod("job-1", 6))
    cache.set_pod(make_pod("job-0", 8), deleted=True)
    cache.set_pod({**make_pod("job-1", 9), "status": {"conditions": [drained]}}, deleted=True)
    (gone,) = cache.gone_pods(KEY)
    assert Pod.from_object(gone).disruption == "EvictionByEvictionAPI"
    job = make_training()
    counted = {**job, "status": {"restarts": {"countedPods": ["job-1"]}}}
    cache.set_job({**counted, "metadata": {**job["metadata"], "resourceVersion": "99999"}})
    assert cache.gone_pods(KEY) == []


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


ALL_PODS = ["job-0", "job-1", "job-2", "job-3", "job-rendezvous"]
LABELS = (
    *(names.LABEL_JOB, names.LABEL_COMPONENT, names.LABEL_INDEX, names.LABEL_ATTEMPT),
    *(names.LABEL_NAME, names.LABEL_PART_OF),
)
ANNOTATIONS = (
    *(names.ANNOTATION_SPEC, names.ANNOTATION_NODES, names.ANNOTATION_ENDED),
    *(names.ANNOTATION_RENDEZVOUS, names.ANNOTATION_REVISION, names.ANNOTATION_REPLACEMENT),
    names.ANNOTATION_DISTRUSTED,
)
KEYS = [*(("labels", key) for key in LABELS), *(("annotations", key) for key in ANNOTATIONS)]
VALUES = (None, "", "0", "1", "7", "999999999", "9" * 63, "other", "rendezvous", "trainer", "3:3")


class Changed(Harness):
    """A running job of four nodes; somebody changes its pods."""

    def start(self) -> None:
        """Start all pods."""
        run_pods(self.cache, 4)

    def change(self, name: str, field: str, key: str, value: str | None) -> None:
        """Change a label or annotation of the pod ``name``, as a watch reports it; None removes it."""
        pod = self.cluster.objects["Pod", name]
        known = next(p for p in self.cache.pods(KEY) if p["metadata"]["name"] == name)
        metadata = pod["metadata"]
        metadata[field] = {k: v for k, v in metadata[field].items() if k != key}
        metadata[field] |= {} if value is None else {key: value}
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1000)
        self.cache.set_pod({**copy.deepcopy(pod), "status": known.get("status", {})})

    def edit(self, **spec: object) -> None:
        """Change the spec."""
        changed = job_manifest(**self.cluster.status)
        changed["spec"] |= spec
        self.set_job(changed, str(6000 + self.cluster.num_tried))

    def uids(self) -> dict[str, str]:
        """Return the uids of the pods by name."""
        pods = (m for (kind, _), m in self.cluster.objects.items() if kind == "Pod")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def pods(self) -> tuple[Pod, ...]:
        return Observed.from_objects(self.cache.pods(KEY)).pods


def changed() -> Changed:
    """Return the job once its pods run."""
    harness = Changed()
    run(harness, 1, harness.start, 1)
    return harness


def is_told(harness: Harness) -> bool:
    """Return whether condition and event name a changed label."""
    reason, text = harness.cluster.condition("Healthy")[1:]
    return reason == "LabelsChanged" and "somebody has changed" in text


@pytest.mark.slow
@pytest.mark.parametrize(("field", "key"), KEYS, ids=lambda key: key.rpartition("/")[2])
@pytest.mark.parametrize("name", ["job-0", "job-rendezvous"])
def test_a_job_goes_on_whatever_happens_to_a_pods_labels(name: str, field: str, key: str) -> None:
    harness = changed()
    before, attempt = harness.uids(), harness.cluster.status["attempt"]
    for value in VALUES:
        run(harness, partial(harness.change, name, field, key, value), harness.start, 2)
        after = harness.uids()
        assert sorted(after) == ALL_PODS, "no pod is missing, and none is there twice"
        kept = {pod for pod, uid in before.items() if after[pod] == uid}
        assert kept >= set(ALL_PODS) - {"job-rendezvous"}, "no training pod is deleted"
        assert harness.cluster.status["attempt"] == attempt
        assert [pod.index for pod in harness.pods()] == [0, 1, 2, 3]
        assert harness.cluster.status["restarts"]["pod"] <= 4
    # it is still managed: a lost pod is replaced, and a suspension deletes all
    run(harness, lambda: harness.delete("Pod", "job-1"), 1)
    assert harness.cluster.own("Pod") == ALL_PODS
    run(harness, lambda: harness.edit(lifecycle={"suspend": True}), 2)
    assert harness.cluster.own("Pod") == []


SELECTED = (names.LABEL_JOB, names.LABEL_COMPONENT, names.LABEL_INDEX, names.LABEL_ATTEMPT)


@pytest.mark.parametrize("key", SELECTED)
def test_a_changed_label_of_a_training_pod_is_told_once_until_it_is_set_again(key: str) -> None:
    harness = changed()
    right = harness.cluster.objects["Pod", "job-2"]["metadata"]["labels"][key]
    assert not is_told(harness)
    run(harness, lambda: harness.change("job-2", "labels", key, "wrong"), 3)
    assert is_told(harness)
    assert f"job-2: somebody has changed {key}" in harness.cluster.condition("Healthy")[2]
    assert harness.cluster.warnings() == ["LabelsChanged"]
    run(harness, lambda: harness.change("job-2", "labels", key, right), 1)
    assert not is_told(harness)


@pytest.mark.parametrize("key", [names.LABEL_JOB, names.LABEL_COMPONENT])
def test_a_rendezvous_pod_that_its_service_does_not_find_is_replaced(key: str) -> None:
    harness = changed()
    before = harness.uids()
    run(harness, lambda: harness.change("job-rendezvous", "labels", key, None), 2)
    after = harness.uids()
    assert {name for name in ALL_PODS if before[name] != after[name]} == {"job-rendezvous"}


@pytest.mark.parametrize("name", ["job-0", "job-3", "job-rendezvous"])
def test_a_pod_that_lost_the_label_of_the_watch_is_replaced(name: str) -> None:
    harness = changed()
    before = harness.uids()

    def remove() -> None:
        pod = harness.cluster.objects["Pod", name]
        harness.cache.set_pod(copy.deepcopy(pod), deleted=True)  # what the watch reports
        del pod["metadata"]["labels"][names.LABEL_JOB]

    run(harness, remove, 4)
    after = harness.uids()
    assert {pod for pod in ALL_PODS if before[pod] != after[pod]} == {name}
    assert harness.cluster.warnings().count("LabelRemoved") == 1
    run(harness, harness.start, 2)
    assert harness.cluster.condition("Admitted")[0] == "True"
    assert harness.cluster.condition("Healthy")[1] != "LabelRemoved"


@pytest.mark.parametrize("value", ["Helm", None])
def test_a_pod_whose_label_of_its_manager_a_policy_engine_changed_is_left_alone(
    value: str | None,
) -> None:
    """Information only; the watch still reports the pod."""
    harness = changed()
    before = harness.uids()

    def relabel() -> None:
        for (kind, _), manifest in harness.cluster.objects.items():
            if kind == "Pod":
                manifest["metadata"]["labels"] |= {names.LABEL_MANAGED_BY: value}
        harness.sync()

    run(harness, relabel, 4)
    assert harness.uids() == before
    assert harness.cluster.condition("Healthy")[1] != "LabelRemoved"


def lose_label(harness: Harness, name: str) -> None:
    """Let somebody remove the label of the watch from the pod ``name``."""
    pod = harness.cluster.objects["Pod", name]
    harness.cache.set_pod(copy.deepcopy(pod), deleted=True)  # what the watch reports
    del pod["metadata"]["labels"][names.LABEL_JOB]


@pytest.mark.parametrize("name", ["job-0", "job-3", "job-rendezvous"])
def test_a_suspension_stops_a_pod_that_lost_the_label_of_the_watch_just_before(name: str) -> None:
    """Also one that lost it while no operator ran: the pod is searched for."""
    harness = changed()
    suspend = partial(harness.edit, lifecycle={"suspend": True})
    run(harness, partial(lose_label, harness, name), suspend, 2)
    assert harness.cluster.own("Pod") == []
    assert harness.cluster.condition("Suspended")[0] == "True"


def test_a_suspension_leaves_pods_of_others_with_the_jobs_label_alone() -> None:
    harness = changed()
    labels = {names.LABEL_JOB: "job"}
    harness.cluster.put("Pod", "job-9", labels=labels)
    harness.cluster.put("Pod", "job-8", {**OWNER, "uid": "uid-before"}, labels=labels)
    run(harness, lambda: harness.edit(lifecycle={"suspend": True}), 2)
    assert [n for kind, n in harness.cluster.objects if kind == "Pod"] == ["job-9", "job-8"]


@pytest.mark.parametrize(("clean_pods", "is_deleted"), [("All", True), ("None", False)])
def test_the_end_of_a_job_stops_a_pod_that_lost_the_label_of_the_watch(
    clean_pods: str, is_deleted: bool
) -> None:
    harness = changed()
    ended = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
    ended |= {"lastTransitionTime": stamp(time.time())}
    harness.cluster.status |= {"phase": "Failed", "conditions": [ended]}
    lose = partial(lose_label, harness, "job-2")
    run(harness, lose, lambda: harness.edit(lifecycle={"cleanPods": clean_pods}), 2)
    assert ("Pod", "job-2") in harness.cluster.objects or is_deleted
    assert (harness.cluster.own("Pod") == []) == is_deleted


def test_a_job_whose_spec_becomes_invalid_has_a_disruption_budget_until_its_pods_have_ended() -> (
    None
):
    harness = changed()
    harness.sync()
    run(harness, lambda: harness.edit(run={"preset": "no-such"}), 1)
    assert harness.cluster.condition("Healthy")[1] == "InvalidSpec"
    assert harness.cluster.own("PodDisruptionBudget") == ["job-nodes"]
    lose_pods = [partial(harness.delete, "Pod", f"job-{number}") for number in range(4)]
    run(harness, *lose_pods, 1)
    assert harness.cluster.own("PodDisruptionBudget") == []
    assert harness.cluster.own("Pod") == ["job-rendezvous"], "nothing is created"


def test_until_a_pod_without_the_label_of_the_watch_has_gone_the_job_waits_for_its_name() -> None:
    harness = changed()
    pod = harness.cluster.objects["Pod", "job-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    harness.cache.set_pod(copy.deepcopy(pod), deleted=True)
    del pod["metadata"]["labels"][names.LABEL_JOB]
    run(harness, 3)
    assert harness.cluster.objects["Pod", "job-0"] is pod
    del harness.cluster.objects["Pod", "job-0"]
    run(harness, 2)
    assert harness.cluster.own("Pod") == ALL_PODS


def test_a_pod_that_somebody_took_from_the_job_is_a_name_conflict() -> None:
    harness = changed()
    pod = harness.cluster.objects["Pod", "job-0"]
    owner = {"kind": "Deployment", "name": "shop", "uid": "shop", "controller": True}
    pod["metadata"]["ownerReferences"] = [owner]
    run(harness, harness.sync, harness.start, 2)
    assert harness.cluster.objects["Pod", "job-0"] is pod
    assert harness.cluster.condition("Healthy")[:2] == ("False", "NameConflict")
    message = harness.cluster.condition("Healthy")[2]
    assert "Pod job-0 already exists and belongs to Deployment shop" in message


def test_a_pod_that_lost_its_owner_is_replaced_if_it_runs_the_revision() -> None:
    harness = changed()
    pod = harness.cluster.objects["Pod", "job-0"]
    pod["metadata"]["ownerReferences"] = []
    run(harness, harness.sync, harness.start, 3)
    assert harness.cluster.objects["Pod", "job-0"] is not pod
    assert harness.cluster.own("Pod") == ALL_PODS


def pod_of(job: str, **labels: str) -> Manifest:
    owner = {"kind": "FluxTraining", "name": "job", "uid": "uid-job", "controller": True}
    metadata = {"name": "job-0", "namespace": "ns", "uid": "u", "ownerReferences": [owner]}
    return {"metadata": {**metadata, "labels": {names.LABEL_JOB: job, **labels}}, "spec": {}}


def test_a_pod_that_changes_its_owner_leaves_its_job() -> None:
    cache = Cache()
    cache.set_job(job_manifest())
    assert cache.set_pod(pod_of("job")) == KEY
    taken = pod_of("other")
    taken["metadata"]["ownerReferences"] = []
    assert cache.set_pod(taken) == ("ns", "other")
    assert (cache.pods(KEY), cache.foreign_pods(KEY)) == ([], [])
    taken["metadata"]["labels"] = {}
    assert cache.set_pod(taken) == ("ns", "other"), "the job that it leaves is requeued"
    assert cache.num_pods == 0
    assert cache.set_pod(taken) is None


@pytest.mark.parametrize(
    ("name", "labels", "component"),
    [
        ("job-0", {}, names.TRAINER),
        ("job-rendezvous", {}, names.RENDEZVOUS),
        ("job-rendezvous2", {}, names.RENDEZVOUS),
        ("job-rendezvous1", {}, None),
        ("job-00", {}, None),
        ("job-debug-7", {}, None),
        ("job-", {}, None),
        ("0", {}, None),
        ("job-debug", {names.LABEL_COMPONENT: "trainer"}, "trainer"),
    ],
)
def test_only_the_names_that_the_operator_gives_tell_what_a_pod_is(
    name: str, labels: dict[str, str], component: str | None
) -> None:
    cache = Cache()
    cache.set_job(job_manifest())
    pod = pod_of("job", **labels)
    pod["metadata"]["name"] = name
    cache.set_pod(pod)
    (cached,) = cache.pods(KEY)
    assert cached["metadata"]["labels"].get(names.LABEL_COMPONENT) == component


GPU_NODE: dict[str, Any] = {
    "metadata": {
        "name": "n1",
        "uid": "u",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"kubernetes.io/hostname": "other", "metricsexporter.amd.com.gpu.0.state": "x"},
    },
    "spec": {
        "unschedulable": True,
        "taints": [{"key": "amd-gpu-unhealthy", "value": "1", "effect": "NoSchedule"}],
    },
    "status": {
        "capacity": {"amd.com/gpu": "8"},
        "conditions": [
            {"type": "KernelDeadlock", "status": "True", "reason": "Hung"},
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
        "images": [{"names": ["a"]}],
    },
}


@pytest.fixture(scope="module")
def server() -> FakeApiServer:
    server = FakeApiServer()
    crowd.fill(server, num_jobs=1, num_pods=3, num_nodes=2)
    return server


def decoded(manifest: Any, fields: Any) -> Any:
    return msgspec.json.decode(json.dumps(manifest), type=fields)


def failed(pod: dict[str, Any]) -> dict[str, Any]:
    """Return ``pod`` with each kind of field that is read."""
    metadata = {
        **pod["metadata"],
        "kind": "Pod",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "finalizers": ["a/b"],
    }
    ended = {
        "exitCode": 3,
        "reason": "Error",
        "message": "{}",
        "finishedAt": "2026-01-01T00:00:00Z",
    }
    statuses = [
        {**status, "state": {"terminated": ended}} for status in pod["status"]["containerStatuses"]
    ]
    init = [{"name": "fetch", "image": "i", "state": {"terminated": ended}}]
    told = {"initContainerStatuses": init, "containerStatuses": statuses}
    status = {**pod["status"], "reason": "Evicted", "message": "m", **told}
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    spec = {**pod["spec"], "schedulingGates": gates}
    return {**pod, "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def test_of_a_pod_the_same_is_kept_whether_it_was_decoded_in_part_or_trimmed(
    server: FakeApiServer,
) -> None:
    pods = list(server.of("pods").objects.values())
    for pod in [*pods, *map(failed, pods)]:
        assert trimmed(decoded(pod, PodFields)) == trimmed(pod)
        assert Pod.from_object(decoded(pod, PodFields)) == Pod.from_object(pod)
        assert len(json.dumps(decoded(pod, PodFields))) < len(json.dumps(pod)) / 2


def test_the_view_of_a_node_is_the_same(server: FakeApiServer) -> None:
    for node in [*server.of("nodes").objects.values(), GPU_NODE, {"metadata": {"name": "new"}}]:
        assert NodeView.from_object(decoded(node, NodeFields)) == NodeView.from_object(node)
    assert "images" not in decoded(GPU_NODE, NodeFields)["status"]
    view = NodeView.from_object(decoded(GPU_NODE, NodeFields))
    assert view.unhealthy
    assert view.problem


def test_owner_and_hash_of_a_supporting_object_are_the_same(server: FakeApiServer) -> None:
    (service,) = server.of("services").objects.values()
    kept = decoded(service, ObjectFields)
    assert Applied.from_object(kept) == Applied.from_object(service)
    assert controller_of(kept) == controller_of(service)
    assert "spec" not in kept
