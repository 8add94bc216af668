"""Somebody changes labels or annotations of a job's own pods: the job goes on, and reports what matters."""

from __future__ import annotations

import copy
import time
from functools import partial

import pytest
from tests.operator.jobs import KEY, OWNER, make_job, run_pods
from tests.operator.object_store import Harness, run

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.observed import Observed, Pod

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
        changed = make_job(**self.cluster.status)
        changed["spec"] |= spec
        self.set_job(changed, str(6000 + self.cluster.num_tried))

    def uids(self) -> dict[str, str]:
        """Return the uids of the pods by name."""
        pods = (m for (kind, _), m in self.cluster.objects.items() if kind == "Pod")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def pods(self) -> tuple[Pod, ...]:
        return Observed.from_objects(self.cache.pods(KEY)).pods


def is_told(harness: Harness) -> bool:
    """Return whether condition and event name a changed label."""
    reason, text = harness.cluster.condition("Healthy")[1:]
    return reason == "LabelsChanged" and "somebody has changed" in text


@pytest.mark.parametrize(("field", "key"), KEYS, ids=lambda key: key.rpartition("/")[2])
@pytest.mark.parametrize("name", ["job-0", "job-rendezvous"])
def test_a_job_goes_on_whatever_happens_to_a_pods_labels(name: str, field: str, key: str) -> None:
    harness = Changed()
    run(harness, 1, harness.start, 1)
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
    harness = Changed()
    run(harness, 1, harness.start, 1)
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
    harness = Changed()
    run(harness, 1, harness.start, 1)
    before = harness.uids()
    run(harness, lambda: harness.change("job-rendezvous", "labels", key, None), 2)
    after = harness.uids()
    assert {name for name in ALL_PODS if before[name] != after[name]} == {"job-rendezvous"}


@pytest.mark.parametrize("name", ["job-0", "job-3", "job-rendezvous"])
def test_a_pod_that_lost_the_label_of_the_watch_is_replaced(name: str) -> None:
    harness = Changed()
    run(harness, 1, harness.start, 1)
    before = harness.uids()

    def remove() -> None:
        pod = harness.cluster.objects["Pod", name]
        harness.cache.set_pod(copy.deepcopy(pod), deleted=True)  # what the watch reports
        del pod["metadata"]["labels"][names.LABEL_MANAGED_BY]

    run(harness, remove, 4)
    after = harness.uids()
    assert {pod for pod in ALL_PODS if before[pod] != after[pod]} == {name}
    assert harness.cluster.warnings().count("LabelRemoved") == 1
    run(harness, harness.start, 2)
    assert harness.cluster.condition("Admitted")[0] == "True"
    assert harness.cluster.condition("Healthy")[1] != "LabelRemoved"


def lose_label(harness: Harness, name: str) -> None:
    """Let somebody remove the label of the watch from the pod ``name``."""
    pod = harness.cluster.objects["Pod", name]
    harness.cache.set_pod(copy.deepcopy(pod), deleted=True)  # what the watch reports
    del pod["metadata"]["labels"][names.LABEL_MANAGED_BY]


@pytest.mark.parametrize("name", ["job-0", "job-3", "job-rendezvous"])
def test_a_suspension_stops_a_pod_that_lost_the_label_of_the_watch_just_before(name: str) -> None:
    """Also one that lost it while no operator ran: the pod is searched for."""
    harness = Changed()
    run(harness, 1, harness.start, 1)
    suspend = partial(harness.edit, lifecycle={"suspend": True})
    run(harness, partial(lose_label, harness, name), suspend, 2)
    assert harness.cluster.own("Pod") == []
    assert harness.cluster.condition("Suspended")[0] == "True"


def test_a_suspension_leaves_pods_of_others_with_the_jobs_label_alone() -> None:
    harness = Changed()
    run(harness, 1, harness.start, 1)
    labels = {names.LABEL_JOB: "job"}
    harness.cluster.put("Pod", "job-9", labels=labels)
    harness.cluster.put("Pod", "job-8", {**OWNER, "uid": "uid-before"}, labels=labels)
    run(harness, lambda: harness.edit(lifecycle={"suspend": True}), 2)
    assert [n for kind, n in harness.cluster.objects if kind == "Pod"] == ["job-9", "job-8"]


@pytest.mark.parametrize(("clean_pods", "is_deleted"), [("All", True), ("None", False)])
def test_the_end_of_a_job_stops_a_pod_that_lost_the_label_of_the_watch(
    clean_pods: str, is_deleted: bool
) -> None:
    harness = Changed()
    run(harness, 1, harness.start, 1)
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
    harness = Changed()
    run(harness, 1, harness.start, 1)
    harness.sync()
    run(harness, lambda: harness.edit(run={"preset": "no-such"}), 1)
    assert harness.cluster.condition("Healthy")[1] == "InvalidSpec"
    assert harness.cluster.own("PodDisruptionBudget") == ["job-nodes"]
    lose_pods = [partial(harness.delete, "Pod", f"job-{number}") for number in range(4)]
    run(harness, *lose_pods, 1)
    assert harness.cluster.own("PodDisruptionBudget") == []
    assert harness.cluster.own("Pod") == ["job-rendezvous"], "nothing is created"


def test_until_a_pod_without_the_label_of_the_watch_has_gone_the_job_waits_for_its_name() -> None:
    harness = Changed()
    run(harness, 1, harness.start, 1)
    pod = harness.cluster.objects["Pod", "job-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    harness.cache.set_pod(copy.deepcopy(pod), deleted=True)
    del pod["metadata"]["labels"][names.LABEL_MANAGED_BY]
    run(harness, 3)
    assert harness.cluster.objects["Pod", "job-0"] is pod
    del harness.cluster.objects["Pod", "job-0"]
    run(harness, 2)
    assert harness.cluster.own("Pod") == ALL_PODS


def test_a_pod_that_somebody_took_from_the_job_is_a_name_conflict() -> None:
    harness = Changed()
    run(harness, 1, harness.start, 1)
    pod = harness.cluster.objects["Pod", "job-0"]
    pod["metadata"]["ownerReferences"] = []
    run(harness, harness.sync, harness.start, 2)
    assert harness.cluster.objects["Pod", "job-0"] is pod
    assert harness.cluster.condition("Healthy")[:2] == ("False", "NameConflict")
    assert "Pod job-0 already exists and has no owner" in harness.cluster.condition("Healthy")[2]


def pod_of(job: str, **labels: str) -> Manifest:
    owner = {"kind": "FluxTraining", "name": "job", "uid": "uid-job", "controller": True}
    metadata = {"name": "job-0", "namespace": "ns", "uid": "u", "ownerReferences": [owner]}
    return {"metadata": {**metadata, "labels": {names.LABEL_JOB: job, **labels}}, "spec": {}}


def test_a_pod_that_changes_its_owner_leaves_its_job() -> None:
    cache = Cache()
    cache.set_job(make_job())
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
    cache.set_job(make_job())
    pod = pod_of("job", **labels)
    pod["metadata"]["name"] = name
    cache.set_pod(pod)
    (cached,) = cache.pods(KEY)
    assert cached["metadata"]["labels"].get(names.LABEL_COMPONENT) == component
