"""Pods that end: replaced at once or after a delay, all restarted, or the job complete or failed.

Which restarts count towards maxRestarts, and by which cause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    SUCCEEDED,
    causes,
    charged_and_free,
    condition,
    created,
    created_pods,
    deleted,
    failed,
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
    with_status,
)

from fluxtrain.contract.resource.status import Restarts, Retry
from fluxtrain.errors import EXIT_STOPPED
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import MembersReport, ProcessRestart, Progress
from fluxtrain_operator.planner.observed import Pod
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
    waiting = make_pods(2, job, **PENDING, waiting="Unschedulable: 0/3 nodes are available")
    new = with_status(job, plan_with(job).status)
    job = with_status(job, plan_with(new, *waiting).status)
    before = plan_with(job, *waiting, now=NOW + 599)
    assert (before.status.phase, before.requeue_after) == ("Pending", pytest.approx(1.0))
    late = plan_with(with_status(job, before.status), *waiting, now=NOW + 600)
    assert condition(late.status, "Failed") == ("True", "PendingDeadlineExceeded")
    text = "no node has run for 600 s; job-0: 0/3 nodes are available"
    assert message(late.status, "Failed") == text
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


def told(*generations: int, attempt: int = 1, cause: str = "ProcessKilled") -> MembersReport:
    """Return the answer of a rendezvous service that lists restarts after these generations."""
    restarts = tuple(ProcessRestart(generation, cause, "pod-1") for generation in generations)
    return MembersReport(attempt=attempt, restarts=restarts)


SILENCE = MembersReport()
KILLED, FAILED = "ProcessKilled", "ProcessFailed"
Reports = list[tuple[MembersReport, int]]
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


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        ({"code": 143, "disruption": "PreemptionByScheduler"}, "PreemptionByScheduler"),
        ({"code": 75}, "Stopped"),
        ({"code": 69, "message": "fluxtrain: rank 0 on job-0 is unfit"}, "UnfitNode"),
        ({"code": 137}, "Killed"),
        ({"code": None, "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({"code": 1, "disruption": "TerminationByKubelet"}, "TerminationByKubelet"),
    ],
    ids=["preempted", "stopped", "unfit", "killed", "rejected by kubelet", "disrupted"],
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


@pytest.mark.parametrize(
    ("pods", "phase", "attempt"),
    [
        ([make_pod(0, **SUCCEEDED)], "Complete", 1),
        ([failed(1, EXIT_STOPPED, deleting=True)], "Restarting", 1),
        ([make_pod(1, **SUCCEEDED, deleting=True)], "Complete", 1),
        ([make_pod(0, **SUCCEEDED), failed(1, 74)], "Restarting", 2),
        ([make_pod(0), failed(1, 3, deleting=True)], "Running", 1),
    ],
    ids=[
        "a missing pod is not replaced once another has succeeded",
        "a pod that is stopped before the end does not complete the job",
        "a pod that succeeds while it is being deleted does",
        "a job with a failed pod is not complete",
        "a pod that fails while it is being deleted does not count",
    ],
)
def test_how_pods_end_decides_how_the_job_does(pods: list[Pod], phase: str, attempt: int) -> None:
    result = plan_with(running(), *pods, progress=progress())
    assert (result.status.phase, result.status.attempt) == (phase, attempt)
    assert phase != "Complete" or created(result) == []
    assert phase != "Running" or num_gang_restarts(result.status) == 0


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
