"""``startAfter``: a predecessor that was seen complete may be removed, and is not removed unseen."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest
from tests.operator.controller.event_loop import synchronous
from tests.operator.jobs import KEY, make_job
from tests.operator.object_store import Harness

from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.executor import NEVER

FIRST = ("ns", "first")


def first(phase: str = "", ttl: int | None = None, ended: float | None = None) -> Manifest:
    """Return the predecessor, which has ``ended`` at a Unix time; by default long ago."""
    conditions = []
    if phase in ("Complete", "Failed"):
        time_of_end = stamp(time.time() - 10**6 if ended is None else ended)
        end = {"type": phase, "status": "True", "reason": "Ended"}
        conditions = [{**end, "lastTransitionTime": time_of_end}]
    job = make_job("first", **({"phase": phase, "conditions": conditions} if phase else {}))
    job["spec"] |= {} if ttl is None else {"lifecycle": {"ttlSecondsAfterFinished": ttl}}
    return job


class Waiting(Harness):
    """A job that starts after others."""

    def __init__(self, start_after: tuple[str, ...] = ("first",), **lifecycle: Any) -> None:
        super().__init__()
        self.versions = count()
        job = make_job()
        job["spec"]["lifecycle"] = {"startAfter": list(start_after), **lifecycle}
        self.cache.set_job(job)

    async def reconcile(self, times: int = 1) -> None:
        """Reconcile; the status is written at once."""
        if (state := self.reconciler._states.get(KEY)) is not None:
            state.written = NEVER
        await super().reconcile(times)

    def put_first(self, manifest: Manifest | None) -> None:
        """Create or change the predecessor, as a watch reports it; None removes it."""
        if manifest is None:
            self.cache.set_job(self.cache.job(FIRST) or first(), deleted=True)
            self.cluster.objects.pop(("FluxTraining", "first"), None)
            return
        manifest["metadata"]["resourceVersion"] = str(7000 + next(self.versions))
        self.cache.set_job(manifest)
        self.cluster.objects["FluxTraining", "first"] = manifest

    @property
    def status(self) -> Manifest:
        """Return the status of the job that waits."""
        job = self.cache.job(KEY)
        return dict(job["status"]) if job is not None else {}

    @property
    def admitted(self) -> tuple[str, str]:
        """Return reason and message of its condition Admitted."""
        (condition,) = (c for c in self.status["conditions"] if c["type"] == "Admitted")
        return condition["reason"], condition.get("message", "")

    @property
    def waits(self) -> str:
        """Return the message of a job that waits; empty if it does not."""
        reason, message = self.admitted
        return message if reason == "WaitingForJobs" else ""

    @property
    def exists(self) -> bool:
        """Return whether the predecessor exists."""
        return ("FluxTraining", "first") in self.cluster.objects

    async def reconcile_first(self) -> float | None:
        return await self.reconciler.reconcile(FIRST)


def after(name: str, *start_after: str) -> Manifest:
    job = make_job(name)
    job["spec"]["lifecycle"] = {"startAfter": list(start_after)}
    return job


@synchronous
async def test_jobs_that_wait_for_one_another_tell_it_until_one_of_them_does_not() -> None:
    harness = Waiting(("first", "other"))
    harness.put_first(after("first", "third"))
    harness.cache.set_job(after("third", "second", "job"))
    harness.cache.set_job(after("second", "first"))
    harness.cache.set_job(after("other"))
    await harness.reconcile(2)
    chain = "job starts after first starts after third starts after job: none of them can start"
    assert harness.admitted == ("CyclicDependency", f"spec.lifecycle.startAfter: {chain}")
    harness.put_first(first("Running"))
    await harness.reconcile()
    assert "first is Running" in harness.waits
    harness.put_first(after("first", "third"))
    await harness.reconcile()
    assert harness.admitted[0] == "CyclicDependency"
    harness.cache.set_job(after("third", "second"))
    await harness.reconcile()
    assert "first is new" in harness.waits, "it is not part of the cycle that it waits for"


@synchronous
async def test_a_predecessor_that_is_given_twice_counts_once() -> None:
    harness = Waiting(("first", "first"))
    harness.put_first(first("Running"))
    await harness.reconcile(2)
    assert harness.waits == "spec.lifecycle.startAfter: first is Running"
    harness.put_first(first("Complete"))
    await harness.reconcile(2)
    assert harness.admitted[0] == "Admitted"
    assert harness.status["completedPredecessors"] == ["first"]
    job = harness.cache.job(KEY)
    assert job is not None
    harness.cache.set_job(job, deleted=True)
    assert harness.cache.jobs_after(FIRST) == []


@synchronous
async def test_a_predecessor_that_never_existed_is_waited_for() -> None:
    harness = Waiting()
    await harness.reconcile(2)
    assert "first does not exist; create it, or take it out" in harness.waits
    assert harness.cluster.own("Pod") == []
    harness.put_first(first("Running"))
    await harness.reconcile()
    assert "first is Running" in harness.waits
    harness.put_first(None)
    await harness.reconcile()
    assert "first does not exist" in harness.waits, "it was removed before it completed"


@synchronous
async def test_a_predecessor_that_was_seen_complete_may_be_removed() -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete"))
    await harness.reconcile()
    assert harness.status["completedPredecessors"] == ["first"]
    harness.put_first(None)
    await harness.reconcile()
    assert harness.waits.count("does not exist") == 1
    assert "first" not in harness.waits
    harness.cache.set_job(make_job("second", phase="Complete"))
    await harness.reconcile()
    assert harness.cluster.own("Pod") == ["job-0", "job-1", "job-2", "job-3", "job-rendezvous"]
    assert harness.status["completedPredecessors"] == ["first", "second"]


@pytest.mark.parametrize("phase", ["", "Pending", "Running", "Failed"])
@synchronous
async def test_a_predecessor_that_is_created_again_must_complete_again(phase: str) -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete"))
    await harness.reconcile()
    harness.put_first(None)
    await harness.reconcile()
    harness.put_first(first(phase))
    await harness.reconcile()
    assert harness.status.get("completedPredecessors", []) == []
    assert f"first is {phase or 'new'}" in harness.admitted[1]
    harness.put_first(None)
    await harness.reconcile()
    assert "first does not exist" in harness.waits
    harness.put_first(first("Complete"))
    await harness.reconcile()
    assert harness.status["completedPredecessors"] == ["first"]


@synchronous
async def test_a_job_that_has_begun_waits_no_more() -> None:
    harness = Waiting()
    harness.put_first(first("Complete"))
    await harness.reconcile()
    for state in (first("Running"), None):
        harness.put_first(state)
        await harness.reconcile()
        assert harness.cluster.own("Pod") != []
        assert harness.status["completedPredecessors"] == ["first"]


@synchronous
async def test_a_suspended_job_sees_its_predecessor_complete_too() -> None:
    harness = Waiting(suspend=True)
    harness.put_first(first("Complete", ttl=0))
    await harness.reconcile()
    assert harness.status["completedPredecessors"] == ["first"]
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_predecessor_is_removed_after_the_jobs_that_wait_have_seen_it() -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete", ttl=0))
    assert await harness.reconcile_first() == 5.0
    assert harness.exists, "it is not removed unseen"
    await harness.reconcile()
    await harness.reconcile_first()
    assert not harness.exists
    harness.put_first(None)
    await harness.reconcile()
    assert "second does not exist" in harness.waits
    assert "first" not in harness.waits


@pytest.mark.parametrize(
    ("start_when", "is_kept"), [("Ended", True), ("Complete", False), (None, False)]
)
@synchronous
async def test_a_failed_predecessor_is_kept_for_those_that_it_lets_start(
    start_when: str | None, is_kept: bool
) -> None:
    harness = Waiting(("first", "second"), **({"startWhen": start_when} if start_when else {}))
    harness.put_first(first("Failed", ttl=0))
    await harness.reconcile_first()
    assert harness.exists == is_kept
    await harness.reconcile()
    await harness.reconcile_first()
    assert not harness.exists
    assert harness.status.get("completedPredecessors", []) == (["first"] if is_kept else [])


def has_begun(job: Manifest) -> None:
    job["status"] = {"phase": "Running", "attempt": 1}


def is_finished(job: Manifest) -> None:
    condition = {"type": "Failed", "status": "True", "reason": "InvalidSpec"}
    job["status"] = {"conditions": [{**condition, "lastTransitionTime": stamp(0)}]}


def is_of_another_operator(job: Manifest) -> None:
    job["spec"]["managedBy"] = "example.com/other"


def is_being_deleted(job: Manifest) -> None:
    job["metadata"]["deletionTimestamp"] = stamp(0)


def waits_for_another(job: Manifest) -> None:
    job["spec"]["lifecycle"]["startAfter"] = ["second"]


@pytest.mark.parametrize(
    "change",
    [has_begun, is_finished, is_of_another_operator, is_being_deleted, waits_for_another],
)
@synchronous
async def test_other_jobs_do_not_keep_a_predecessor(change: Any) -> None:
    harness = Waiting()
    job = make_job()
    job["spec"]["lifecycle"] = {"startAfter": ["first"]}
    change(job)
    harness.set_job(job)
    harness.put_first(first("Complete", ttl=0))
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_failed_predecessor_is_removed_in_time() -> None:
    harness = Waiting()
    harness.put_first(first("Failed", ttl=0))
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_new_leader_removes_no_predecessor_before_all_jobs_are_listed() -> None:
    harness = Waiting()
    harness.cache.set_job(make_job(), deleted=True)
    harness.put_first(first("Complete", ttl=0))
    harness.reconciler.jobs_known_from = time.monotonic() + 60
    assert await harness.reconcile_first() == 5.0
    assert harness.exists
    harness.reconciler.jobs_known_from = 0.0
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_record_of_a_job_that_is_no_predecessor_any_more_is_dropped() -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete"))
    await harness.reconcile()
    job = make_job(**harness.status)
    job["spec"]["lifecycle"] = {"startAfter": ["second"]}
    harness.set_job(job)
    await harness.reconcile()
    assert harness.cluster.status.get("completedPredecessors", []) == []
