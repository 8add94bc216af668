"""Which restarts count towards maxRestarts, and by which cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    causes,
    charged_and_free,
    condition,
    created_pods,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    message,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain.contract.resource.status import Restarts
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import Heard, ProcessRestart, Progress
from fluxtrain_operator.resources import Slot, training_pod


def restarted(number: int) -> Progress:
    """Return what rank 0 reports after ``number`` restarts of its processes."""
    return progress(process_restarts=number)


def with_restarts(job: Job, **counts: Any) -> Job:
    return with_status(job, job.status.model_copy(update={"restarts": Restarts(**counts)}))


def test_restarts_of_processes_are_charged_once() -> None:
    job = running()
    for reported, total in ((2, 2), (2, 2), (3, 3), (0, 3)):
        status = plan_with(job, *make_pods(), progress=restarted(reported)).status
        assert charged_and_free(status) == (total, 0)
        assert causes(status) == {"ProcessFailed": total}
        job = with_status(job, status)


@pytest.mark.parametrize(("used", "phase"), [(8, "Restarting"), (9, "Restarting"), (10, "Failed")])
def test_the_budget_counts_lives_of_the_program(used: int, phase: str) -> None:
    job = with_restarts(running(), process=2, gang=4, charged=6)
    pod = failed(0, 1, process_restarts=used - 4)
    status = plan_with(job, pod, failed(1, 1)).status
    assert status.phase == phase
    assert charged_and_free(status) == (used + (phase == "Restarting"), 0)
    if phase == "Failed":
        assert condition(status, "Failed") == ("True", "RestartsExhausted")


@pytest.mark.parametrize(
    ("maximum", "nodes", "used", "left"),
    [(10, 1, 0, 10), (10, 8, 0, 11), (10, 8, 7, 4), (10, 1, 10, 0), (3, 1, 7, 0), (0, 2, 0, 1)],
)
def test_a_pod_has_the_rest_of_the_budget(maximum: int, nodes: int, used: int, left: int) -> None:
    job = make_job(restart={"maxRestarts": maximum}, nodes={"min": 1, "max": nodes})
    (trainer,) = training_pod(job, Slot(0, charged_restarts=used))["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    assert environment["PET_MAX_RESTARTS"] == str(left)


def test_a_lost_node_counts_once_while_its_pod_is_deleted() -> None:
    job = running()
    first = plan_with(job, *make_pods(), nodes=lost("node-1"))
    assert (charged_and_free(first.status), causes(first.status)) == ((0, 1), {"NodeLost": 1})
    deleting = make_pod(1, deleting=True, deletion_deadline=NOW + 180)
    job = with_status(job, first.status)
    again = plan_with(job, make_pod(0), deleting, nodes=lost("node-1"))
    assert charged_and_free(again.status) == (0, 1)


def test_each_kind_of_failure_has_its_own_delay() -> None:
    pods = [failed(index, 1, started=NOW - 3, finished=NOW - 1) for index in range(2)]
    job = with_restarts(running(), gang=5, charged=5, causes={"NoProgress": 5})
    assert plan_with(job, *pods).status.attempt == 2, "the first of its kind restarts at once"
    job = with_restarts(running(), gang=5, charged=5, causes={"ProgramError": 3})
    waiting = plan_with(job, *pods)
    assert (waiting.status.attempt, waiting.requeue_after) == (1, pytest.approx(39.0))
    assert plan_with(job, *pods, now=NOW + 40).status.attempt == 2


def test_a_change_by_the_user_is_neither_charged_nor_free() -> None:
    job = running()
    changed = with_status(make_job(image="trainer:2"), job.status)
    result = plan_with(changed, *make_pods(2, job))
    assert (result.status.attempt, charged_and_free(result.status)) == (2, (0, 0))


def test_a_job_of_which_no_node_ever_runs_fails_if_it_says_so() -> None:
    job = make_job(lifecycle={"pendingDeadlineSeconds": 600})
    waiting = make_pods(2, job, **PENDING)
    new = with_status(job, plan_with(job).status)
    job = with_status(job, plan_with(new, *waiting).status)
    before = plan_with(job, *waiting, now=NOW + 599)
    assert (before.status.phase, before.requeue_after) == ("Pending", pytest.approx(1.0))
    late = plan_with(with_status(job, before.status), *waiting, now=NOW + 600)
    assert condition(late.status, "Failed") == ("True", "PendingDeadlineExceeded")
    one_runs = make_pod(0, job, started=NOW + 590), waiting[1]
    assert plan_with(job, *one_runs, now=NOW + 600).status.phase != "Failed"
    gated = make_pods(2, job, **PENDING, gated=True)
    queued = with_status(job, plan_with(new, *gated).status)
    assert plan_with(queued, *gated, now=NOW + 6000).status.phase == "Pending", "it is not admitted"
    forever = with_status(make_job(), plan_with(make_job()).status)
    assert plan_with(forever, *waiting, now=NOW + 10**6).status.phase == "Pending"


def test_a_job_that_lost_all_nodes_later_has_no_pending_deadline() -> None:
    job = running(lifecycle={"pendingDeadlineSeconds": 600})
    waiting = make_pods(2, job, **PENDING)
    assert plan_with(job, *waiting, now=NOW + 6000).status.phase == "Restarting"


def told(*generations: int, attempt: int = 1, cause: str = "ProcessKilled") -> Heard:
    """Return the answer of a rendezvous service that lists restarts after these generations."""
    restarts = tuple(ProcessRestart(generation, cause, "pod-1") for generation in generations)
    return Heard(attempt=attempt, restarts=restarts)


SILENCE = Heard()
KILLED, FAILED = "ProcessKilled", "ProcessFailed"
Reports = list[tuple[Heard, int]]
"""What the service and rank 0, by number of its restarts, report one after the other."""


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(told(), 0)], {}),
        ([(told(1), 0)], {KILLED: 1}),
        ([(told(1), 0), (told(1), 0), (told(1), 1)], {KILLED: 1}),
        ([(told(1), 1)], {KILLED: 1}),
        ([(told(), 1), (told(1), 1)], {FAILED: 1}),
        ([(SILENCE, 1), (told(1), 1)], {FAILED: 1}),
        ([(told(1), 1), (told(1, 2), 1), (told(1, 2, 5), 1)], {KILLED: 3}),
        ([(told(1), 1), (SILENCE, 1), (told(), 1), (told(1), 0), (told(1, 4), 0)], {KILLED: 2}),
        ([(told(1, 2), 0), (told(5), 0)], {KILLED: 3}),
        ([(told(7, attempt=2), 0), (told(7, attempt=0), 0)], {}),
        ([(told(2**31 - 1), 0), (told(1, 2**31 - 1), 0)], {KILLED: 1}),
        ([(told(3, cause="ProcessOutOfMemory"), 0)], {"ProcessOutOfMemory": 1}),
    ],
    ids=[
        "none",
        "on another node than rank 0's",
        "told again",
        "rank 0 and the service tell it at once",
        "rank 0 tells it first",
        "rank 0 tells it, then the service answers",
        "several",
        "the service is replaced, and the agents tell theirs again",
        "the agent that told the first ones has ended",
        "other attempts",
        "a huge number, as often as it is told",
        "out of memory",
    ],
)
def test_a_restart_is_charged_once_whoever_tells_it(
    reports: Reports, expected: dict[str, int]
) -> None:
    job = running(restart={"maxRestarts": 10})
    for heard, of_rank_0 in reports:
        status = plan_with(job, *make_pods(), progress=restarted(of_rank_0), heard=heard).status
        job = with_status(job, status)  # an operator that was replaced knows no more
    assert causes(status) == expected
    assert charged_and_free(status) == (sum(expected.values()), 0)
    assert status.restarts is not None
    assert status.restarts.process == sum(expected.values())


def test_a_pod_that_ended_with_a_restart_that_was_told_adds_nothing() -> None:
    job = running()
    job = with_status(job, plan_with(job, *make_pods(), heard=told(2)).status)
    ended = failed(1, 137, process_restarts=1)
    replaced = plan_with(job, make_pod(0), ended, heard=told(2))
    assert charged_and_free(replaced.status) == (1, 1)
    (pod,) = created_pods(plan_with(with_status(job, replaced.status), make_pod(0)))
    (trainer,) = pod["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    assert environment["FLUXTRAIN_PROCESS_RESTARTS"] == "1", "the next one counts from there"


def test_each_attempt_counts_its_generations_anew() -> None:
    job = running()
    job = with_status(job, plan_with(job, *make_pods(), heard=told(1, 4)).status)
    pods = failed(0, 1, process_restarts=2), failed(1, 1)
    restarted_all = plan_with(job, *pods, heard=told(1, 4)).status
    assert (restarted_all.attempt, charged_and_free(restarted_all)) == (2, (3, 0))
    job = with_status(job, restarted_all)
    again = make_pods(2, attempt=2)
    for heard, charged in ((told(1, 4), 3), (told(1, attempt=2), 4), (told(1, 4, attempt=2), 5)):
        status = plan_with(job, *again, heard=heard).status
        assert charged_and_free(status) == (charged, 0)
        job = with_status(job, status)


def test_generations_before_those_that_are_counted_are_not_charged() -> None:
    job = with_restarts(running(), process=3, charged=3, causes={FAILED: 3})
    for heard, charged in (
        (SILENCE, 3),
        (told(1, 2, 3, 4, 5), 3),
        (told(2, 3, 4, 5), 3),
        (told(3, 4, 5, 6), 4),
    ):
        status = plan_with(job, *make_pods(), heard=heard).status
        assert charged_and_free(status) == (charged, 0)
        job = with_status(job, status)
    assert causes(status) == {FAILED: 3, KILLED: 1}


@pytest.mark.parametrize(
    ("limit", "phase"), [(3, "Running"), (2, "Running"), (1, "Failed"), (0, "Failed")]
)
def test_agents_that_use_more_than_the_budget_together_fail_the_job(limit: int, phase: str) -> None:
    job = running(restart={"maxRestarts": limit})
    result = plan_with(job, *make_pods(), progress=progress(), heard=told(1, 2))
    assert (result.status.phase, charged_and_free(result.status)) == (phase, (2, 0))
    if phase == "Failed":
        assert condition(result.status, "Failed") == ("True", "RestartsExhausted")
        text = f"ProcessKilled in job-1 on node-1; {limit} restarts are used up"
        assert message(result.status, "Failed") == text


def test_the_time_after_a_restart_on_another_node_is_lost_by_the_start_and_what_is_done_again() -> (
    None
):
    job = running()
    before = replace(
        progress(),
        status=progress().status.model_copy(
            update={
                "phase_seconds": {"step": 60.0},
                "train_seconds": 60.0,
                "first_step_time": stamp(NOW + 6),
            }
        ),
    )
    job = with_status(
        job, plan_with(job, *make_pods(), progress=before, heard=told(), now=NOW + 66).status
    )
    after = replace(
        progress(),
        train_seconds_before=50.0,
        status=progress().status.model_copy(
            update={
                "phase_seconds": {"import": 8.0, "step": 2.0},
                "train_seconds": 52.0,
                "first_step_time": stamp(NOW + 78),
            }
        ),
    )
    status = plan_with(job, *make_pods(), progress=after, heard=told(1), now=NOW + 90).status
    assert causes(status) == {KILLED: 1}
    assert status.time_spent is not None
    spent = status.time_spent
    assert (spent.redone, spent.start) == (pytest.approx(10.0), pytest.approx(28.0))


@pytest.mark.parametrize(
    ("codes", "cause", "fails"),
    [
        ([74], FAILED, True),
        ([], FAILED, True),
        ([1], FAILED, False),
        ([74], KILLED, False),
        ([74], "ProcessOutOfMemory", False),
    ],
)
def test_an_error_of_a_process_ends_a_job_that_no_exit_code_1_restarts(
    codes: list[int], cause: str, fails: bool
) -> None:
    job = running(restart={"onExitCodes": codes})
    result = plan_with(job, *make_pods(), heard=told(1, cause=cause), progress=progress())
    assert (result.status.phase == "Failed") == fails
    if fails:
        assert condition(result.status, "Failed") == ("True", "ProgramError")
        assert result.status.exit_code == 1
        assert "job-1" in message(result.status, "Failed")
