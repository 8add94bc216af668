"""The watchdog: a job without progress is restarted, but not one whose trainers do not answer."""

from __future__ import annotations

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    condition,
    make_job,
    make_pod,
    make_pods,
    num_gang_restarts,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import plan
from fluxtrain_operator.progress import Progress

ONE_MINUTE = {"restart": {"noProgressSeconds": 60}}


def test_a_job_without_progress_is_restarted_and_uses_a_restart() -> None:
    job = running(**ONE_MINUTE)
    before = plan_with(job, *make_pods(), progress=progress(50))
    assert (before.status.attempt, before.requeue_after) == (1, pytest.approx(10.0, abs=1))
    stalled = plan_with(job, *make_pods(), progress=progress(61))
    assert (stalled.status.attempt, num_gang_restarts(stalled.status)) == (2, 1)
    assert condition(stalled.status, "Progressing") == ("False", "NoProgress")
    assert {delete.grace_seconds for delete in stalled.delete} == {30}


def test_the_step_timeout_is_learned_and_the_first_step_has_longer() -> None:
    job = running()
    # 60 s, ten steps of 8 samples, and half of the time between evaluations, at 8 samples/s
    assert plan_with(job, *make_pods(), progress=progress(30)).status.attempt == 1
    assert plan_with(job, *make_pods(), progress=progress(3601)).status.attempt == 2
    new = make_job(plan(make_job(), Observed(), NOW).status)
    pods, loading = make_pods(started=NOW), Progress(ProgressStatus(), phase="loading")
    assert plan_with(new, *pods, progress=loading, now=NOW + 1799).status.attempt == 1
    assert plan_with(new, *pods, progress=loading, now=NOW + 1801).status.attempt == 2


@pytest.mark.parametrize("phase", ["evaluating", "saving", "sampling", "finishing"])
def test_other_phases_than_training_have_their_own_timeout(phase: str) -> None:
    job = running(**ONE_MINUTE)
    alive = progress(7000, phase=phase, alive_time=NOW - 1700)
    assert plan_with(job, *make_pods(), progress=alive).status.attempt == 1
    stalled = progress(7000, phase=phase, alive_time=NOW - 1801)
    assert plan_with(job, *make_pods(), progress=stalled).status.attempt == 2
    other = progress(7000, phase=phase, alive_time=NOW - 1801, rank=4)
    result = plan_with(job, *make_pods(), any_progress=other, now=NOW + 1800)
    assert result.status.attempt == 2, "any rank may report it"


def test_a_job_whose_trainers_do_not_answer_is_reported_and_not_restarted() -> None:
    job = running(**ONE_MINUTE)
    for seconds in (298, 301, 86_400):
        result = plan_with(job, *make_pods(), now=NOW + seconds)
        assert (result.status.attempt, result.delete, result.create) == (1, (), ())
        assert num_gang_restarts(result.status) == 0
        no_answer = condition(result.status, "Progressing") == ("Unknown", "NoAnswer")
        assert no_answer == (seconds > 299)
        assert [event.reason for event in result.events] == ["NoAnswer"] * (seconds == 301)
        job = with_status(job, result.status)
        assert plan_with(job, *make_pods(), now=NOW + seconds).events == ()
    answered = plan_with(job, *make_pods(), progress=progress())
    assert condition(answered.status, "Progressing") == ("True", "Stepping")


def test_a_job_with_too_few_nodes_has_no_deadline() -> None:
    job = running(nodes={"min": 2, "max": 2})
    pods = make_pod(0, job), make_pod(1, job, **PENDING)
    assert plan_with(job, *pods, now=NOW + 10**6).status.attempt == 1
