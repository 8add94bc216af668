"""Pods that the infrastructure lets fail again and again: delays, conditions, and what ends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    charged_and_free,
    condition,
    created,
    deleted,
    failed,
    make_pod,
    message,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain.contract.resource.status import Retry
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.planner.observed import Pod

REJECTED = "UnexpectedAdmissionError"


def rejected(uid: str, now: float = NOW, reason: str = REJECTED, **changes: Any) -> Pod:
    """Return a pod that the kubelet rejected at ``now``."""
    times = {"created": now, "started": None, "finished": now}
    return failed(1, None, uid=uid, reason=reason, **{**times, **changes})


def with_retries(job: Job, *retries: Retry) -> Job:
    return with_status(job, job.status.model_copy(update={"retries": list(retries)}))


def retry(count: int, reason: str = REJECTED, seconds_ago: float = 0.0, **changes: Any) -> Retry:
    time = stamp(NOW - seconds_ago)
    return Retry(
        **{"index": 1, "reason": reason, "count": count, "time": time, "pod": "u", **changes}
    )


def test_the_delay_doubles_up_to_five_minutes_and_costs_no_restart() -> None:
    job, now, delays = running(), NOW, []
    for number in range(9):
        pod = rejected(f"u{number}", now)
        waiting = plan_with(job, make_pod(0), pod, progress=progress(), now=now)
        assert deleted(waiting) == []
        assert waiting.requeue_after is not None
        delay = next(d for d in (10, 20, 40, 80, 160, 300) if _is_due(job, pod, now, d))
        delays.append(delay)
        now += delay
        result = plan_with(job, make_pod(0), pod, now=now)
        assert (deleted(result), result.status.attempt) == (["job-1"], 1)
        job = with_status(job, result.status)
        assert [(r.index, r.reason, r.count) for r in job.status.retries] == [
            (1, REJECTED, number + 1)
        ]
        again = plan_with(job, make_pod(0), pod, now=now + 1)
        assert again.status.retries[0].count == number + 1, "a pod counts once"
    assert delays == [10, 20, 40, 80, 160, 300, 300, 300, 300]
    assert charged_and_free(job.status)[0] == 0


def _is_due(job: Job, pod: Pod, now: float, delay: float) -> bool:
    early = plan_with(job, make_pod(0), pod, now=now + delay - 1)
    late = plan_with(job, make_pod(0), pod, now=now + delay)
    return deleted(early) == [] and deleted(late) == ["job-1"]


@pytest.mark.parametrize(
    ("before", "delay"),
    [
        ([], 10),
        ([retry(3)], 80),
        ([retry(3, "Killed")], 10),  # another reason
        ([retry(3, index=0)], 10),  # another pod
        ([retry(3, seconds_ago=3601)], 10),  # too long ago
        ([retry(3, seconds_ago=-4000)], 10),  # the clock went back
        ([retry(2**31 - 1)], 300),
        ([retry(3, time="yesterday")], 10),
        ([retry(3, pod="new")], 40),  # its own deletion was requested before
    ],
)
def test_failures_in_a_row_have_one_pod_and_one_reason(before: list[Retry], delay: float) -> None:
    assert _is_due(with_retries(running(), *before), rejected("new"), NOW, delay)


@pytest.mark.parametrize(("seconds", "count", "delay"), [(59.0, 4, 80), (60.0, 0, 0)])
def test_a_pod_that_ran_for_a_minute_is_replaced_at_once_and_begins_anew(
    seconds: float, count: int, delay: float
) -> None:
    job = with_retries(running(), retry(3, "Killed", 200))
    pod = failed(1, 137, uid="new", created=NOW - 99, started=NOW - seconds, finished=NOW)
    result = plan_with(job, make_pod(0), pod, now=NOW + delay)
    assert deleted(result) == ["job-1"]
    assert sum(r.count for r in result.status.retries) == count


@pytest.mark.parametrize(
    ("successor", "count"),
    [
        (make_pod(1, uid="new", created=NOW - 65, started=NOW - 60), 0),
        (make_pod(1, uid="new", created=NOW - 65, started=NOW - 59), 3),
        (make_pod(1, uid="u", created=NOW - 65, started=NOW - 60), 3),  # the failed pod itself
        (make_pod(1, uid="older"), 3),
        (make_pod(1, uid="new", **PENDING), 3),
        (make_pod(0), 3),
    ],
)
def test_the_count_ends_when_a_successor_has_run_for_a_minute(successor: Pod, count: int) -> None:
    job = with_retries(running(), retry(3, seconds_ago=66))
    result = plan_with(job, successor, progress=progress())
    assert sum(r.count for r in result.status.retries) == count
    if successor.uid == "new" and successor.running and count:
        assert result.requeue_after == pytest.approx(1.0)


def test_repeated_failures_are_reported_with_reason_and_count() -> None:
    job = running()
    once = plan_with(job, make_pod(0), rejected("a"), now=NOW + 1)
    assert condition(once.status, "Healthy") == ("False", REJECTED)
    assert "in a row" not in message(once.status, "Healthy")
    job = with_retries(running(), retry(3))
    waiting = plan_with(job, make_pod(0), rejected("b"), now=NOW + 1)
    assert f"4 times in a row, replaced at {stamp(NOW + 80)}" in message(waiting.status, "Healthy")
    gone = plan_with(job, make_pod(0), make_pod(1, uid="c", **PENDING), progress=progress())
    assert condition(gone.status, "Healthy") == ("False", REJECTED)
    assert (
        message(gone.status, "Healthy") == "job-1 failed 3 times in a row shortly after the start"
    )


def test_the_node_of_a_lost_pod_and_the_program_have_rules_of_their_own() -> None:
    job = with_retries(running(), retry(5, "ProgramError"))
    assert deleted(plan_with(job, make_pod(0), failed(1, 1, started=NOW - 2))) == ["job-1"]


@pytest.mark.parametrize("num_before", [0, 63, 64])
def test_the_list_is_bounded(num_before: int) -> None:
    before = [retry(1, index=n + 2, seconds_ago=60) for n in range(num_before)]
    job = with_retries(running(), *before)
    retries = plan_with(job, make_pod(0), rejected("a"), now=NOW + 10).status.retries
    assert len(retries) == min(64, num_before + 1)
    assert retries[0].index == 1
    assert [r.index for r in retries] == sorted(r.index for r in retries)


def test_pods_of_a_kueue_group_are_replaced_under_other_names_and_counted_together() -> None:
    job = running(scheduling={"queueName": "team"})
    job = with_retries(job, retry(3, index=0))
    group = {"finalizers": ("kueue.x-k8s.io/managed",)}
    pod = replace(rejected("b"), index=5, name="job-5", **group)
    assert deleted(plan_with(job, make_pod(0, job, **group), pod, now=NOW + 79)) == []
    result = plan_with(job, make_pod(0, job, **group), pod, now=NOW + 80)
    assert deleted(result) == ["job-5"]
    assert [(r.index, r.count) for r in result.status.retries] == [(0, 4)]


def test_a_suspended_job_counts_no_retry() -> None:
    job = with_retries(running(lifecycle={"suspend": True}), retry(2))
    result = plan_with(job, make_pod(0), rejected("b"), now=NOW + 99)
    assert [r.count for r in result.status.retries] == [2]
    assert created(result) == []
