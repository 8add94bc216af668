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
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain.contract.resource.status import Restarts
from fluxtrain_operator.job import Job
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.resources import Slot, training_pod


def restarted(number: int, older: bool = False) -> Progress:
    """Return what rank 0 reports after ``number`` restarts of its processes."""
    answer = progress(process_restarts=number)
    phases = {} if older else {"step": 9.0}
    status = answer.status.model_copy(update={"phase_seconds": phases})
    return replace(answer, status=status)


def with_restarts(job: Job, **counts: Any) -> Job:
    return with_status(job, job.status.model_copy(update={"restarts": Restarts(**counts)}))


def test_restarts_of_processes_are_charged_once() -> None:
    job = running()
    for reported, total in ((2, 2), (2, 2), (3, 3), (0, 3)):
        status = plan_with(job, *make_pods(), progress=restarted(reported)).status
        assert charged_and_free(status) == (total, 0)
        assert causes(status) == {"ProcessFailed": total}
        job = with_status(job, status)


def test_older_trainers_and_operators_charge_restarts_of_all_pods_only() -> None:
    job = with_restarts(running(), process=9, gang=1)
    status = plan_with(job, *make_pods(), progress=restarted(12, older=True)).status
    assert charged_and_free(status) == (1, 0)
    status = plan_with(with_status(job, status), *make_pods(), progress=restarted(13)).status
    assert charged_and_free(status) == (2, 0)


@pytest.mark.parametrize(("used", "phase"), [(8, "Restarting"), (9, "Restarting"), (10, "Failed")])
def test_the_budget_counts_lives_of_the_program(used: int, phase: str) -> None:
    job = with_restarts(running(), process=2, gang=4, charged=6)
    pod = failed(0, 1, process_restarts=used - 4)
    status = plan_with(job, pod, make_pod(1)).status
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
    pods = failed(0, 1, started=NOW - 3, finished=NOW - 1), make_pod(1)
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
    job = with_status(job, plan_with(job).status)
    before = plan_with(job, *waiting, now=NOW + 599)
    assert (before.status.phase, before.requeue_after) == ("Pending", pytest.approx(1.0))
    late = plan_with(with_status(job, before.status), *waiting, now=NOW + 600)
    assert condition(late.status, "Failed") == ("True", "PendingDeadlineExceeded")
    one_runs = make_pod(0, job, started=NOW + 590), waiting[1]
    assert plan_with(job, *one_runs, now=NOW + 600).status.phase != "Failed"
    gated = make_pods(2, job, **PENDING, gated=True)
    queued = with_status(job, plan_with(job, *gated).status)
    assert plan_with(queued, *gated, now=NOW + 6000).status.phase == "Pending", "it is not admitted"
    forever = with_status(make_job(), plan_with(make_job()).status)
    assert plan_with(forever, *waiting, now=NOW + 10**6).status.phase == "Pending"


def test_a_job_that_lost_all_nodes_later_has_no_pending_deadline() -> None:
    job = running(lifecycle={"pendingDeadlineSeconds": 600})
    waiting = make_pods(2, job, **PENDING)
    assert plan_with(job, *waiting, now=NOW + 6000).status.phase == "Restarting"
