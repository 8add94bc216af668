"""Pods that end: replaced, the gang restarted, or the job complete or failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    SUCCEEDED,
    causes,
    charged_and_free,
    condition,
    created,
    created_pods,
    deleted,
    failed,
    make_pod,
    make_pods,
    num_gang_restarts,
    plan_with,
    progress,
    rendezvous,
    running,
    with_status,
)

from fluxtrain.errors import EXIT_STOPPED


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        ({"code": None, "reason": "Evicted"}, "Evicted"),
        ({"code": 143, "disrupted": True}, "Disrupted"),
        ({"code": 75}, "Stopped"),
        ({"code": 69, "message": "fluxtrain: rank 0 on job-0 is unfit"}, "UnfitNode"),
        ({"code": 137}, "Killed"),
        ({"code": None, "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({"code": 1, "disrupted": True}, "Disrupted"),
    ],
    ids=["evicted", "preempted", "stopped", "unfit", "killed", "rejected by kubelet", "disrupted"],
)
def test_infrastructure_failures_use_no_restart(pod: dict[str, Any], cause: str) -> None:
    job = running(restart={"maxRestarts": 0})
    first = plan_with(job, failed(0, **pod), make_pod(1), progress=progress())
    assert deleted(first) == ["job-0"]
    assert (charged_and_free(first.status), causes(first.status)) == ((0, 1), {cause: 1})
    second = plan_with(with_status(job, first.status), make_pod(1), progress=progress())
    assert created(second) == ["job-0"]
    (manifest,) = created_pods(second)
    assert manifest["metadata"]["annotations"]["fluxtrain.dev/replacement"] == "1"
    assert second.status.phase == "Running", "the other node goes on"
    assert charged_and_free(second.status) == (0, 1)


def test_an_unfit_node_is_named_with_the_figures_of_the_preflight() -> None:
    pod = failed(0, 69, message="log\nfluxtrain: rank 0 on job-0 is unfit: 2.1 times the median\n")
    result = plan_with(running(), pod, make_pod(1), progress=progress())
    text = "job-0: node node-0 is unfit: fluxtrain: rank 0 on job-0 is unfit: 2.1 times the median"
    healthy = next(c for c in result.status.conditions if c.type == "Healthy")
    assert (healthy.reason, healthy.message) == ("UnfitNode", text)


def test_a_deleted_pod_is_replaced_once_its_name_is_free() -> None:
    deleting = make_pod(1, deleting=True, deletion_deadline=NOW + 100)
    assert created(plan_with(running(), make_pod(0), deleting, progress=progress())) == []
    assert created(plan_with(running(), make_pod(0), progress=progress())) == ["job-1"]


def test_the_number_of_replaced_pods_is_read_from_the_pods() -> None:
    pods = make_pod(0), make_pod(1, replacement=2)
    status = plan_with(running(), *pods, progress=progress()).status
    assert status.restarts is not None
    assert status.restarts.pod == 2


@pytest.mark.parametrize("code", [1, 74])
def test_a_program_that_fails_in_all_pods_restarts_the_gang_and_uses_a_restart(code: int) -> None:
    job = running()
    result = plan_with(job, failed(0, code, message="boom\n"), failed(1, code))
    assert sorted(deleted(result)) == ["job-0", "job-1"]
    assert created(result) == [], "the names are not free yet"
    restarts = result.status.restarts
    assert restarts is not None
    assert (result.status.attempt, restarts.gang, restarts.pod) == (2, 1, 0)
    assert (charged_and_free(result.status), list(causes(result.status).values())) == ((1, 0), [1])
    assert (result.status.phase, result.status.last_error) == ("Restarting", "boom")
    job = with_status(job, result.status)
    again = plan_with(job, failed(0, code), failed(1, code))
    assert again.status.restarts == restarts, "the same failure counts once"
    metadata = [pod["metadata"] for pod in created_pods(plan_with(job))]
    assert {m["labels"]["fluxtrain.dev/attempt"] for m in metadata} == {"2"}
    assert {m["annotations"]["fluxtrain.dev/replacement"] for m in metadata} == {"0"}


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (2, "", "InvalidJob"),
        (3, "", "Diverged"),
        (127, "", "ProgramError"),
    ],
)
def test_other_exit_codes_fail_the_job(code: int, reason: str, expected: str) -> None:
    pod = failed(0, code, reason=reason, message="a line\nfluxtrain: the last line\n\n")
    result = plan_with(running(), pod, make_pod(1))
    status = result.status
    assert (status.phase, condition(status, "Failed")) == ("Failed", ("True", expected))
    assert (status.exit_code, status.last_error) == (code, "fluxtrain: the last line")
    assert deleted(result) == ["job-1"], "the failed pod keeps its log"
    assert [event.type for event in result.events] == ["Warning"]


def test_a_container_that_is_out_of_memory_is_restarted_while_restarts_are_left() -> None:
    job = running(restart={"maxRestarts": 1})
    first = plan_with(job, failed(0, 137, reason="OOMKilled"), make_pod(1))
    assert (first.status.attempt, first.status.phase) == (1, "Running")
    assert first.status.restarts is not None
    assert (first.status.restarts.charged, first.status.restarts.causes) == (1, {"OOMKilled": 1})
    job = with_status(job, first.status)
    again = failed(0, 137, reason="OOMKilled", uid="new", replacement=1)
    second = plan_with(job, again, make_pod(1))
    assert condition(second.status, "Failed") == ("True", "RestartsExhausted")


def test_a_container_that_is_out_of_memory_fails_a_job_without_restarts() -> None:
    job = running(restart={"maxRestarts": 0})
    status = plan_with(job, failed(0, 137, reason="OOMKilled"), make_pod(1)).status
    assert condition(status, "Failed") == ("True", "RestartsExhausted")
    assert (status.attempt, status.exit_code) == (1, 137)


def test_a_job_fails_when_its_restarts_are_used_up() -> None:
    job = running(restart={"maxRestarts": 1})
    job = with_status(job, plan_with(job, failed(0), failed(1)).status)
    second = plan_with(job, failed(0, attempt=2), make_pod(1, attempt=2))
    assert condition(second.status, "Failed") == ("True", "RestartsExhausted")
    assert (second.status.attempt, second.status.exit_code) == (2, 1)


def test_a_short_lived_pod_delays_the_next_restart() -> None:
    job = running()
    job = with_status(job, plan_with(job, failed(0), failed(1)).status)
    pods = [failed(index, attempt=2, started=NOW - 3) for index in range(2)]
    result = plan_with(job, *pods)
    assert (result.delete, result.create, result.status.attempt) == ((), (), 2)
    assert result.requeue_after == pytest.approx(9.0)
    assert plan_with(job, *pods, now=NOW + 10).status.attempt == 3


def test_a_job_is_complete_when_all_pods_succeeded() -> None:
    result = plan_with(running(), *make_pods(**SUCCEEDED))
    assert result.status.phase == "Complete"
    assert condition(result.status, "Complete") == ("True", "Succeeded")
    assert (deleted(result), result.status.exit_code) == (["job-rendezvous"], 0)


def test_a_job_waits_for_its_last_pods_for_a_limited_time() -> None:
    pods = make_pod(0, **SUCCEEDED), make_pod(1)
    soon = plan_with(running(), *pods, now=NOW + 1)
    assert (soon.status.phase, soon.delete, soon.create) == ("Running", (), ())
    assert soon.requeue_after == pytest.approx(29.0)
    assert plan_with(running(), *pods, now=NOW + 30).status.phase == "Complete"


def test_a_missing_pod_is_not_replaced_once_another_has_succeeded() -> None:
    result = plan_with(running(), make_pod(0, **SUCCEEDED))
    assert (result.status.phase, created(result)) == ("Complete", [])


def test_a_pod_that_is_stopped_before_the_end_of_the_run_does_not_complete_the_job() -> None:
    drained = failed(1, EXIT_STOPPED, deleting=True)
    assert plan_with(running(), drained).status.phase == "Restarting"


def test_a_pod_that_succeeds_while_it_is_being_deleted_completes_the_job() -> None:
    drained = make_pod(1, **SUCCEEDED, deleting=True)
    assert plan_with(running(), drained).status.phase == "Complete"


def test_a_job_with_a_failed_pod_is_not_complete() -> None:
    assert plan_with(running(), make_pod(0, **SUCCEEDED), failed(1, 74)).status.attempt == 2


def test_a_pod_that_fails_while_it_is_being_deleted_does_not_count() -> None:
    pods = make_pod(0), failed(1, 3, deleting=True)
    result = plan_with(running(), *pods, progress=progress())
    assert (result.status.phase, result.status.attempt) == ("Running", 1)
    assert num_gang_restarts(result.status) == 0


@pytest.mark.parametrize(
    ("clean_pods", "expected"),
    [("None", []), ("Running", ["job-1"]), ("All", ["job-0", "job-1"])],
)
def test_clean_pods_selects_the_deleted_pods_of_a_finished_job(
    clean_pods: str, expected: list[str]
) -> None:
    job = running(lifecycle={"cleanPods": clean_pods})
    pods = failed(0, 3), make_pod(1)
    job = with_status(job, plan_with(job, *pods).status)
    assert [name for name in deleted(plan_with(job, *pods)) if name != "job-rendezvous"] == expected


def test_a_pod_whose_phase_lags_behind_its_exit_code_keeps_its_log() -> None:
    """Kubelet reports the exit code before the final phase, which a running sidecar prevents."""
    job, ended = running(), make_pod(0, exit_code=0, ready=False, finished=NOW - 1)
    first = plan_with(job, ended)
    assert (first.status.phase, deleted(first)) == ("Complete", ["job-rendezvous"])
    assert first.requeue_after == pytest.approx(29.0)
    job = with_status(job, first.status)
    later = plan_with(job, ended, rendezvous=None, now=NOW + 10)
    assert (deleted(later), later.requeue_after) == ([], pytest.approx(19.0))
    assert deleted(plan_with(job, ended, rendezvous=None, now=NOW + 30)) == ["job-0"]
    final = plan_with(job, replace(ended, phase="Succeeded"), rendezvous=None, now=NOW + 60)
    assert (deleted(final), final.requeue_after) == ([], None)


@pytest.mark.parametrize(
    ("changes", "since_deadline", "grace_seconds"),
    [
        ({"phase": "Failed", "exit_code": 75, "finished": NOW - 200}, 60, [0]),
        ({"phase": "Failed", "exit_code": 75, "finished": NOW - 200, "forced": True}, 60, []),
        ({"phase": "Failed", "exit_code": 75, "finished": NOW - 200}, -10, []),
    ],
    ids=["kubelet does not delete it", "forced already", "kubelet has time"],
)
def test_an_ended_rendezvous_pod_that_no_kubelet_deletes_is_forced_out_of_the_way(
    changes: dict[str, Any], since_deadline: float, grace_seconds: list[int]
) -> None:
    stuck = rendezvous(deleting=True, deletion_deadline=NOW - since_deadline, **changes)
    result = plan_with(running(), *make_pods(), rendezvous=stuck)
    assert [act.grace_seconds for act in result.delete if act.name == stuck.name] == grace_seconds
    if since_deadline < 0:
        assert result.requeue_after is not None
        assert result.requeue_after <= 60
