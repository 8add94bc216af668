"""The watchdog: a job without progress is restarted, but not one whose trainers do not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    condition,
    lost,
    make_job,
    make_pod,
    make_pods,
    message,
    num_gang_restarts,
    plan_with,
    progress,
    rendezvous,
    running,
    started,
    with_status,
)

from fluxtrain.contract.process import Phase
from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.base.reports import Heard, Progress, RankProgress
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import plan

ONE_MINUTE = {"restart": {"noProgressSeconds": 60}}


def rank(
    number: int = 0, phase: Phase = "step", silent: float = 0.0, **changes: Any
) -> RankProgress:
    """Return a rank in step 7 whose steps take a second: it may be silent for 70 seconds."""
    step_seconds = 1.0 if phase == "step" else None
    defaults = {"step": 7, "step_seconds": step_seconds, "pod": f"pod-{number}"}
    return RankProgress(number, phase, **{**defaults, **changes, "seconds_since_progress": silent})


def answer(*ranks: RankProgress, age: float = 0.0) -> Progress:
    """Return what rank 0 answers; by the trainers' wall clocks, the last step was long ago."""
    return replace(progress(7000, phase=ranks[0].phase), ranks=ranks, age=age)


def test_a_job_without_progress_is_restarted_and_uses_a_restart() -> None:
    job = running(**ONE_MINUTE)
    before = plan_with(job, *make_pods(), progress=answer(rank(silent=50)))
    assert (before.status.attempt, before.requeue_after) == (1, pytest.approx(10.0))
    stalled = plan_with(job, *make_pods(), progress=answer(rank(silent=61)))
    assert (stalled.status.attempt, num_gang_restarts(stalled.status)) == (2, 1)
    assert condition(stalled.status, "Progressing") == ("False", "NoProgress")
    assert {delete.grace_seconds for delete in stalled.delete} == {30}


LIMITS: list[tuple[Phase, float | None, float]] = [
    ("import", None, 1200),
    ("load", None, 1800),
    ("compile", None, 3600),
    ("step", None, 1800),  # before the first step
    ("step", 0.02, 60.2),
    ("step", 1.0, 70),
    ("step", 60.0, 660),
    ("step", 1000.0, 3600),
    ("evaluate", 1.0, 1800),  # the last one, over the whole validation set
    ("save", 1.0, 3600),  # the last one, of 143 GB
    ("sample", 1.0, 1800),  # the gallery
    ("finish", 1.0, 1800),
]
FIXED = [("step", 1.0, 90), ("step", None, 1800), ("load", None, 1800), ("save", 1.0, 3600)]


@pytest.mark.parametrize(
    ("fixed", "phase", "step_seconds", "limit"),
    [*((None, *row) for row in LIMITS), *((90, *row) for row in FIXED), (7200, "save", 1.0, 7200)],
)
def test_each_phase_has_its_own_limit(
    fixed: int | None, phase: Phase, step_seconds: float | None, limit: float
) -> None:
    job = running(restart={"noProgressSeconds": fixed} if fixed else {})
    for silent, attempt in ((limit - 1, 1), (limit, 2)):
        for age in (0.0, 30.0):  # since the answer, by the operator's clock
            present = rank(0, phase, silent - age, step_seconds=step_seconds)
            result = plan_with(job, *make_pods(), progress=answer(present, age=age))
            assert result.status.attempt == attempt, (silent, age)


@pytest.mark.parametrize(
    ("ranks", "attempt", "culprit"),
    [
        ([rank(0, silent=100), rank(1, silent=69)], 1, ""),
        ([rank(0, silent=100), rank(1, "save", 100)], 1, ""),
        ([rank(0, "finish", 3000), rank(1, "sample", 5)], 1, ""),
        ([rank(0, silent=90), rank(1, silent=90)], 2, "rank 0 of job-0 on node-0 is in"),
        ([rank(0, silent=90), rank(1, silent=95)], 2, "rank 1 of job-1 on node-1 stopped first"),
        (
            [rank(0, silent=95), rank(1, silent=90, step=6)],
            2,
            "rank 1 of job-1 on node-1 stopped first, in phase step at step 6",
        ),
        (
            [rank(0, silent=90), rank(1, silent=99, stack="wait (queue:7)", pod="gone")],
            2,
            "no progress for 90 s; rank 1 stopped first, in phase step at step 7: wait (queue:7)",
        ),
    ],
)
def test_a_job_has_stalled_if_all_its_ranks_have_and_the_first_of_them_is_named(
    ranks: list[RankProgress], attempt: int, culprit: str
) -> None:
    result = plan_with(running(), *make_pods(), progress=answer(*ranks))
    assert result.status.attempt == attempt
    if attempt == 2:
        assert culprit in message(result.status, "Progressing")
        assert culprit in message(result.status, "Healthy")
        assert any(culprit in event.message for event in result.events)


FROZEN: dict[str, Any] = {"frozen": True, "stack": "its state is T (stopped)"}
ONE_NODE: dict[str, Any] = {"nodes": {"min": 1, "max": 1}}


@pytest.mark.parametrize(
    ("ranks", "attempt", "culprit"),
    [
        ([rank(0, silent=69, **FROZEN)], 1, ""),
        ([rank(0, silent=70, **FROZEN)], 2, "rank 0 of job-0 on node-0 is in phase step at step 7"),
        ([rank(0, silent=90, **FROZEN)], 2, ": its state is T (stopped)"),
        ([rank(0, "save", 3599, **FROZEN)], 1, ""),
        ([rank(0, "save", 3600, **FROZEN)], 2, "is in phase save"),
        ([rank(0, silent=90, **FROZEN), rank(1, silent=69)], 1, ""),
        (
            [rank(0, silent=90), rank(1, silent=90, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 stopped first",
        ),
        (
            [rank(0, silent=90, step=6), rank(1, silent=80, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 stopped first",
        ),
        (
            [rank(0, silent=90, **FROZEN), rank(1, silent=91, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 is in",
        ),
        (
            [rank(0, silent=90, **FROZEN), rank(1, silent=95, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 stopped first",
        ),
    ],
)
def test_agents_report_the_stall_of_ranks_that_do_not_answer(
    ranks: list[RankProgress], attempt: int, culprit: str
) -> None:
    reported = replace(Progress(ProgressStatus(), by_agents=True), ranks=tuple(ranks))
    pods = make_pods()[: len(ranks)]
    job = running(nodes={"min": len(ranks), "max": len(ranks)})
    result = plan_with(job, *pods, any_progress=reported)
    assert (result.status.attempt, num_gang_restarts(result.status)) == (attempt, attempt - 1)
    assert result.status.progress == job.status.progress, "nothing of the run is known"
    if attempt == 2:
        assert condition(result.status, "Progressing") == ("False", "NoProgress")
        assert culprit in message(result.status, "Progressing")


def test_a_job_of_one_node_whose_agent_reports_progress_answers() -> None:
    job = running(**ONE_NODE)
    reported = replace(Progress(ProgressStatus(), by_agents=True), ranks=(rank(silent=5),))
    by_agents = ("True", "ReportedByAgents")
    rows = [
        (reported, 290, ("True", "Stepping")),
        (reported, 3600, by_agents),
        (None, 3600, ("Unknown", "NoAnswer")),
    ]
    for answered, seconds, expected in rows:
        result = plan_with(job, make_pod(0, job), any_progress=answered, now=NOW + seconds)
        assert condition(result.status, "Progressing") == expected
        assert (result.status.attempt, num_gang_restarts(result.status)) == (1, 0)
        told = [event.reason for event in result.events]
        assert told == [expected[1]] * (expected[1] != "Stepping")
        outdated = "step, loss and speed are outdated" in message(result.status, "Progressing")
        assert outdated == (expected == by_agents)


def test_of_a_job_without_a_first_step_agents_do_not_tell_that_it_steps() -> None:
    job = started(nodes={"min": 1, "max": 1})
    reported = replace(Progress(ProgressStatus(), by_agents=True), ranks=(rank(silent=5),))
    result = plan_with(job, make_pod(0, job), any_progress=reported, now=NOW + 3600)
    assert condition(result.status, "Progressing") == ("Unknown", "ReportedByAgents")


def test_a_job_with_a_wrong_clock_is_not_stalled() -> None:
    job = running()
    for seconds in (-86_400, 86_400):  # by which the trainers' clocks differ from the operator's
        present = replace(progress(seconds), ranks=(rank(silent=5),))
        assert plan_with(job, *make_pods(), progress=present).status.attempt == 1


@pytest.mark.parametrize(
    ("phase", "silent", "attempt"),
    [("step", 79, 1), ("step", 81, 2), ("load", 1799, 1), (None, 1799, 1), (None, 1801, 2)],
)
def test_older_trainers_report_times_of_their_own_clock(
    phase: Phase | None, silent: float, attempt: int
) -> None:
    result = plan_with(running(), *make_pods(), progress=progress(silent, phase=phase))
    assert result.status.attempt == attempt


def test_any_rank_may_report_a_stall() -> None:
    other = replace(answer(rank(4, silent=71)), rank=4)
    assert plan_with(running(), *make_pods(), any_progress=other).status.attempt == 2


def test_older_trainers_that_never_step_have_longer() -> None:
    new = make_job(plan(make_job(), Observed(), NOW).status)
    pods, loading = make_pods(started=NOW), Progress(ProgressStatus(), phase="load")
    assert plan_with(new, *pods, progress=loading, now=NOW + 1799).status.attempt == 1
    assert plan_with(new, *pods, progress=loading, now=NOW + 1801).status.attempt == 2


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


SILENT_SERVICE: dict[str, Any] = {"heard": Heard(silent=frozenset({"rdzv"}))}
SILENT_NODE: dict[str, Any] = {"heard": Heard(frozenset({"pod-0"}), frozenset({"pod-1"}))}
LEAVING: dict[str, Any] = {"deleting": True, "deletion_deadline": NOW + 100}


@pytest.mark.parametrize(
    "replaced",
    [
        {"rendezvous": None},
        {"rendezvous": rendezvous(**PENDING)},
        {"rendezvous": rendezvous(**LEAVING)},
        {"rendezvous": rendezvous(phase="Failed", exit_code=1)},
        {"rendezvous": rendezvous(started=NOW + 3600)},
        {"nodes": lost("node-s")},
        {"nodes": lost("node-1")},
        SILENT_SERVICE,
        SILENT_NODE,
    ],
    ids=[
        "no rendezvous pod",
        "one that is pending",
        "one that is being deleted",
        "one that has failed",
        "one whose clock is wrong",
        "its node is lost",
        "a node is lost",
        "a silent service",
        "a silent node",
    ],
)
def test_a_stall_is_not_acted_on_while_its_cause_is_replaced_but_not_for_ever(
    replaced: dict[str, Any],
) -> None:
    for silent, attempt in ((71, 1), (369, 1), (371, 2)):
        ranks = answer(rank(0, silent=silent), rank(1, silent=500))
        result = plan_with(running(), *make_pods(), progress=ranks, **replaced)
        assert (result.status.attempt, num_gang_restarts(result.status)) == (attempt, attempt - 1)


@pytest.mark.parametrize(
    ("up", "silent", "attempt", "wait"),
    [
        (1000.0, 69, 1, 1.0),
        (1000.0, 71, 2, None),
        (61.0, 71, 2, None),
        (59.0, 71, 1, 1.0),
        (5.0, 71, 1, 55.0),
        (5.0, 10, 1, 60.0),
        (5.0, 369, 1, 1.0),
        (5.0, 371, 2, None),
    ],
)
def test_agents_have_the_time_to_join_a_new_rendezvous_pod(
    up: float, silent: float, attempt: int, wait: float | None
) -> None:
    present = {"progress": answer(rank(silent=silent)), "rendezvous": rendezvous(started=NOW - up)}
    result = plan_with(running(), *make_pods(), **present)
    assert (result.status.attempt, num_gang_restarts(result.status)) == (attempt, attempt - 1)
    if wait is not None:
        assert result.requeue_after == pytest.approx(wait)


def test_a_lost_pod_that_is_being_deleted_no_longer_delays_the_watchdog() -> None:
    job = running()
    pods = make_pod(0), make_pod(1, **LEAVING)
    result = plan_with(job, *pods, progress=answer(rank(silent=71)), nodes=lost("node-1"))
    assert result.status.attempt == 2
