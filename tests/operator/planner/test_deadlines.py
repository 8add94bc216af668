"""Deadlines: active time begins with the first admitted pod, anew only after a suspension or a queue."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    condition,
    make_job,
    make_pod,
    make_pods,
    plan_with,
    progress,
    with_status,
)

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.planner.observed import CreateFailure, Pod
from fluxtrain_operator.planner.plan import Plan

LIMIT = 3600
TWO: dict[str, Any] = {"nodes": {"min": 2, "max": 2}}
QUEUED: dict[str, Any] = {**TWO, "scheduling": {"queueName": "team"}}
MEMBER: dict[str, Any] = {"finalizers": (names.KUEUE_FINALIZER,)}
GATE: dict[str, Any] = {"gated": True, "gates": (names.KUEUE_GATE,)}
GATED: dict[str, Any] = {**PENDING, **MEMBER, **GATE, "node": ""}


class Story:
    """A job and the plans of it, one after the other; times are seconds after NOW."""

    def __init__(self, spec: dict[str, Any], **lifecycle: Any) -> None:
        self.spec, self.lifecycle = spec, lifecycle
        self.job: Job = make_job(**spec, lifecycle=lifecycle)
        self.plan(0)

    def plan(self, at: float, *pods: Pod, **observed: Any) -> Plan:
        """Plan with ``pods`` of the present attempt, and keep the status."""
        result = plan_with(self.job, *pods, now=NOW + at, **observed)
        self.job = with_status(self.job, result.status)
        return result

    def pods(self, count: int = 2, **changes: Any) -> list[Pod]:
        """Return pods of the present attempt."""
        return make_pods(count, self.job, attempt=self.job.status.attempt, **changes)

    def suspend(self, suspend: bool) -> None:
        """Suspend or resume the job."""
        lifecycle = {**self.lifecycle, "suspend": suspend}
        self.job = make_job(self.job.status, **self.spec, lifecycle=lifecycle)

    @property
    def active_since(self) -> float | None:
        """Return the status's time after NOW."""
        time = seconds(self.job.status.active_since)
        return None if time is None else time - NOW

    @property
    def failure(self) -> str:
        """Return why the job has failed; empty if it has not."""
        value, reason = condition(self.job.status, "Failed")
        return reason if value == "True" else ""


def quota(at: float, *indices: int) -> dict[str, Any]:
    """Return the failures to create the pods at ``indices``."""
    failures = (
        CreateFailure("Pod", f"job-{index}", "QuotaExceeded", "exceeded quota", NOW + at + 5)
        for index in indices
    )
    return {"create_failures": tuple(failures)}


def test_a_job_that_exceeds_its_active_deadline_fails() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    assert story.active_since is None
    before = story.plan(10, *story.pods(), progress=progress(-10))
    assert (story.active_since, story.job.status.start_time) == (10, stamp(NOW + 10))
    before = story.plan(LIMIT + 9, *story.pods(), progress=progress(-LIMIT - 9))
    assert (before.requeue_after, story.failure) == (1.0, "")
    story.plan(LIMIT + 10, *story.pods(), progress=progress(-LIMIT - 10))
    assert story.failure == "DeadlineExceeded"


@pytest.mark.parametrize("at", [20, 1800, LIMIT])
def test_a_moment_without_admission_does_not_begin_the_active_time_anew(at: float) -> None:
    """A quota that refuses one replacement for ten seconds."""
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(), progress=progress(-10))
    left = make_pod(0, story.job)
    story.plan(at, left, **quota(at, 1))
    assert condition(story.job.status, "Admitted") == ("False", "QuotaExceeded")
    assert story.active_since == 10
    story.plan(at + 5, *story.pods(), progress=progress(-at - 5))
    assert condition(story.job.status, "Admitted")[0] == "True"
    story.plan(LIMIT + 10, *story.pods(), progress=progress(-LIMIT - 10))
    assert story.failure == "DeadlineExceeded"


def test_the_deadline_passes_while_the_job_is_not_admitted_too() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods())
    story.plan(20, make_pod(0, story.job), **quota(20, 1))
    story.plan(LIMIT + 10, make_pod(0, story.job), **quota(LIMIT + 10, 1))
    assert story.failure == "DeadlineExceeded"


def test_the_wait_for_the_first_pods_does_not_count() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT, pendingDeadlineSeconds=LIMIT)
    for at in (10, LIMIT, 3 * LIMIT):
        story.plan(at, **quota(at, 0, 1))
        assert (story.active_since, story.failure) == (None, "")
    story.plan(4 * LIMIT, *story.pods())
    assert story.active_since == 4 * LIMIT


def test_the_active_time_begins_anew_when_the_job_is_resumed() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods())
    story.suspend(True)
    story.plan(1000, *story.pods())
    assert story.active_since is None
    story.plan(5000)
    assert (condition(story.job.status, "Suspended")[0], story.failure) == ("True", "")
    story.suspend(False)
    story.plan(9000)
    story.plan(9010, *story.pods())
    assert story.active_since is not None
    assert 9000 <= story.active_since <= 9010
    story.plan(9000 + LIMIT - 1, *story.pods())
    assert story.failure == ""
    story.plan(9010 + LIMIT, *story.pods())
    assert story.failure == "DeadlineExceeded"


def test_time_in_kueues_queue_does_not_count_and_a_new_group_begins_anew() -> None:
    story = Story(QUEUED, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(**GATED))
    story.plan(2 * LIMIT, *story.pods(**GATED))
    assert (story.active_since, story.failure) == (None, "")
    story.plan(2 * LIMIT + 10, *story.pods(**MEMBER))
    assert story.active_since == 2 * LIMIT + 10
    evicted = {"deleting": True, "deletion_deadline": NOW + 3 * LIMIT, **MEMBER}
    story.plan(2 * LIMIT + 20, *story.pods(**evicted))
    story.plan(2 * LIMIT + 30)
    story.plan(2 * LIMIT + 40, *story.pods(**GATED))
    assert (story.job.status.attempt, story.active_since) == (2, None)
    story.plan(4 * LIMIT, *story.pods(**GATED))
    assert story.failure == ""
    story.plan(4 * LIMIT + 10, *story.pods(**MEMBER))
    assert story.active_since == 4 * LIMIT + 10


def test_a_replacement_at_the_gate_of_a_running_group_does_not_begin_anew() -> None:
    story = Story(QUEUED, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(**MEMBER))
    story.plan(20, make_pod(0, story.job, **MEMBER), make_pod(1, story.job, **GATED))
    assert condition(story.job.status, "Admitted") == ("False", "SchedulingGated")
    assert story.active_since == 10


def test_gates_of_others_do_not_begin_the_active_time_anew() -> None:
    story = Story({"nodes": {"min": 1, "max": 1}}, activeDeadlineSeconds=LIMIT)
    theirs = {**GATED, "gates": ("example.com/wait",)}
    story.plan(10, *story.pods(1, **theirs))
    assert story.active_since is None
    story.plan(20, *story.pods(1))
    story.plan(30, *story.pods(1, **theirs))
    assert story.active_since == 20


def test_a_restart_after_an_error_of_the_program_does_not_begin_anew() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods())
    end = {"phase": "Failed", "exit_code": 1, "finished": NOW + 100, "ready": False}
    story.plan(120, *story.pods(**end))
    assert (story.job.status.attempt, story.active_since) == (2, 10)
    story.plan(130)
    story.plan(140, *story.pods())
    assert story.active_since == 10


@pytest.mark.parametrize("kind", ["activeDeadlineSeconds", "pendingDeadlineSeconds"])
def test_a_deadline_is_met_if_nothing_happens_after_the_job_became_active(kind: str) -> None:
    story = Story(TWO, **{kind: 5})
    waits = story.plan(1, *story.pods(**PENDING, node="")).requeue_after
    assert (story.active_since, waits) == (1, 5)
    assert story.plan(6, *story.pods(**PENDING, node="")).status.phase == "Failed"


def test_a_moment_without_admission_does_not_begin_the_pending_deadline_anew() -> None:
    story = Story(TWO, pendingDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(**PENDING))
    for at in range(100, LIMIT, 100):
        story.plan(at, make_pod(0, story.job, **PENDING), **quota(at, 1))
        assert condition(story.job.status, "Admitted") == ("False", "QuotaExceeded")
        story.plan(at + 10, *story.pods(**PENDING))
    assert (story.active_since, story.failure) == (10, "")
    story.plan(LIMIT + 10, *story.pods(**PENDING))
    assert story.failure == "PendingDeadlineExceeded"
