"""The progress in a pod's termination message counts, even if the pod is gone before a reconcile."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.operator.jobs import KEY, OWNER, make_job, run_pods
from tests.operator.object_store import Harness, ObjectStore, run

from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.guard import Delete
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.situation import newest_report

SHOWN, LAST = 58, 75


def message(
    step: int = LAST, rank: int = 0, ended: float | None = None, since_step: float = 1.0
) -> str:
    ended = time.time() if ended is None else ended
    values = {
        "rank": rank,
        "step": step,
        "lastStepTime": ended - since_step,
        "checkpointStep": step,
    }
    return json.dumps({**values, "checkpointTime": ended, "phaseSeconds": {"step": 60.0}})


class Terminating(ObjectStore):
    """Pods that are deleted still exist: their program has time to save a checkpoint."""

    async def delete(self, namespace: str, deletion: Delete, version: str) -> Manifest | None:
        if deletion.kind != "Pod":
            return await super().delete(namespace, deletion, version)
        existing = self.objects["Pod", deletion.name]
        existing["metadata"]["deletionTimestamp"] = stamp(time.time() + 180)
        return existing


def stopping() -> Harness:
    """Return a job that is being suspended, whose status shows step 58, with its pods."""
    shown = {"step": SHOWN, "samples": 0, "lastStepTime": stamp(time.time() - 20)}
    harness = Harness(Terminating())
    run(harness, 1, harness.sync, lambda: run_pods(harness.cache, 4), 1)
    job = make_job(**(harness.cluster.status | {"progress": shown}))
    job["spec"]["lifecycle"] = {"suspend": True}
    harness.set_job(job)
    run(harness, 1)
    assert harness.cluster.status["progress"]["step"] == SHOWN
    return harness


def pod(harness: Harness, name: str = "job-0") -> Manifest:
    (found,) = (p for p in harness.cache.pods(KEY) if p["metadata"]["name"] == name)
    return dict(found)


def ended(manifest: Manifest, text: str, finished: float | None = None) -> Manifest:
    """Return the final object of a pod, whose program exited with ``text`` as its last words."""
    at = stamp(time.time() if finished is None else finished)
    state = {"terminated": {"exitCode": 75, "message": text, "startedAt": at, "finishedAt": at}}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]}
    return {**manifest, "status": status}


def step_after(harness: Harness, *removed: Manifest) -> int:
    """Return the step of the status after the final objects of pods, and no pod is left."""

    def remove() -> None:
        for manifest in removed:
            harness.cache.set_pod(manifest, deleted=True)
        for manifest in harness.cache.pods(KEY):
            harness.cache.set_pod(manifest, deleted=True)

    run(harness, remove, 1)
    return int(harness.cluster.status["progress"]["step"])


def test_the_final_object_in_a_deletion_has_the_last_step() -> None:
    harness = stopping()
    assert step_after(harness, ended(pod(harness), message())) == LAST
    assert harness.cluster.status["checkpoint"]["step"] == LAST


def test_a_change_that_is_followed_by_the_deletion_is_not_missed() -> None:
    harness = stopping()
    final = ended(pod(harness), message())
    harness.cache.set_pod(final)
    assert step_after(harness, final) == LAST


def test_a_pod_that_is_gone_already_when_it_is_deleted_has_the_last_step() -> None:
    """The response to the deletion came first, the watch event has the final object."""
    harness = stopping()
    final = ended(pod(harness), message())
    assert step_after(harness) == SHOWN
    assert harness.cluster.status["phase"] == "Suspended"
    assert step_after(harness, final) == LAST


@pytest.mark.parametrize(
    "text", ["", "out of memory", "{", message(rank=1), "[" * 5000, "[1]", '{"rank": 0}']
)
def test_other_last_words_change_nothing(text: str) -> None:
    harness = stopping()
    assert step_after(harness, ended(pod(harness), text)) == SHOWN


def test_a_step_before_that_of_the_status_does_not_count() -> None:
    harness = stopping()
    assert step_after(harness, ended(pod(harness), message(3, since_step=100))) == SHOWN


@pytest.mark.parametrize(
    "owners", [[], [{**OWNER, "uid": "another"}], [{**OWNER, "controller": False}]]
)
def test_pods_of_others_are_not_believed(owners: list[Any]) -> None:
    harness = stopping()
    stranger = ended(pod(harness), message())
    own = stranger["metadata"]
    stranger["metadata"] = {**own, "uid": "stranger", "name": "job-9", "ownerReferences": owners}
    assert step_after(harness, stranger) == SHOWN


def test_a_job_that_was_created_again_does_not_inherit_it() -> None:
    harness = stopping()
    harness.cache.set_pod(ended(pod(harness), message()), deleted=True)
    assert harness.cache.final_pod(KEY) is not None
    again = make_job()
    again["metadata"]["uid"] = "uid-again"
    harness.set_job(again, version="6000")
    assert harness.cache.final_pod(KEY) is None


def test_one_pod_is_kept_per_job_and_none_of_deleted_jobs() -> None:
    harness = stopping()
    for number in range(20):
        at = time.time() + number
        final = ended(pod(harness), message(LAST + number, ended=at), at)
        final["metadata"] = {**final["metadata"], "uid": f"uid-{number}", "name": f"job-{number}"}
        harness.cache.set_pod(final, deleted=True)
    assert len(harness.cache._final_pods) == 1
    assert step_after(harness) == LAST + 19
    harness.cache.set_job(make_job(), deleted=True)
    assert not harness.cache._final_pods
    harness.cache.set_pod(final, deleted=True)
    assert not harness.cache._final_pods


def test_a_trainer_that_answers_is_believed_more() -> None:
    final = Pod.from_object(ended(pod(stopping()), message()))
    answer = Progress.from_json({"rank": 0, "step": 0})
    assert final.final_progress is not None
    report = newest_report(Observed(progress=answer, final_pod=final), time.time())
    assert report is not None
    assert report.progress is answer
    report = newest_report(Observed(final_pod=final), time.time())
    assert report is not None
    assert report.progress.status.step == LAST
