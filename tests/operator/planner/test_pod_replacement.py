"""Restarts that keep pods: of the pods in which the program failed, and of processes that hang, in place.

Single pods are replaced for one restart. A job that hangs restarts its processes first, then all pods.
"""

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

from fluxtrain.contract.resource.status import Restarts
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import NO_MEMBERS, MembersReport, Progress, RankProgress
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.plan import Plan

FIXED, ELASTIC = {"nodes": {"min": 4, "max": 4}}, {"nodes": {"min": 1, "max": 4}}
OOM: dict[str, Any] = {"code": 137, "reason": "OOMKilled"}
STORAGE: dict[str, Any] = {"code": 74}
QUEUE = {"scheduling": {"queueName": "team"}}


def four(**spec: Any) -> Job:
    """Return a job that trains on four nodes."""
    return running(4, **{**FIXED, **spec})


def after(job: Job, result: Plan) -> Job:
    return with_status(job, result.status)


def others(job: Job, *ended: int, **changes: Any) -> list[Pod]:
    """Return the four pods without those with the indices ``ended``."""
    return [make_pod(index, job, **changes) for index in range(4) if index not in ended]


def successor(job: Job, index: int, number: int = 1, **changes: Any) -> Pod:
    """Return the ``number``-th pod that replaces another one."""
    new = {"uid": f"new-{number}", "replacement": number, "created": NOW + 2, "started": NOW + 3}
    return make_pod(index, job, **{**new, **changes})


def stepped(step: int, ago: float) -> Progress:
    """Return what rank 0 answers after ``step`` steps, the last one ``ago`` seconds before NOW."""
    answer = progress(ago)
    return replace(answer, status=answer.status.model_copy(update={"step": step}))


def is_gang_restart(result: Plan) -> bool:
    return result.status.attempt == 2


@pytest.mark.parametrize("spec", [FIXED, ELASTIC], ids=["fixed", "elastic"])
@pytest.mark.parametrize(
    ("end", "cause"), [(OOM, "OOMKilled"), (STORAGE, "StorageError"), ({"code": 1}, "ProgramError")]
)
def test_a_program_that_fails_in_one_pod_costs_that_pod_and_a_restart(
    spec: dict[str, Any], end: dict[str, Any], cause: str
) -> None:
    job = four(**spec)
    ended = failed(1, job=job, message="boom\n", **end)
    first = plan_with(job, *others(job, 1), ended, progress=progress())
    assert (deleted(first), created(first)) == (["job-1"], []), "its name is not free yet"
    assert (charged_and_free(first.status), causes(first.status)) == ((1, 0), {cause: 1})
    assert (first.status.attempt, num_gang_restarts(first.status)) == (1, 0)
    assert first.status.phase == ("Running" if spec is ELASTIC else "Restarting")
    assert (condition(first.status, "Healthy"), first.status.last_error) == (
        ("False", cause),
        "boom",
    )
    assert [(e.type, e.reason) for e in first.events if e.reason == cause] == [("Warning", cause)]
    job = after(job, first)
    again = plan_with(job, *others(job, 1), ended, progress=progress(), now=NOW + 1)
    assert deleted(again) == ["job-1"], "the operator was replaced before it deleted the pod"
    second = plan_with(after(job, again), *others(job, 1), progress=progress(), now=NOW + 2)
    assert (created(second), charged_and_free(second.status)) == (["job-1"], (1, 0))
    (pod,) = created_pods(second)
    labels, notes = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    assert (labels[names.LABEL_ATTEMPT], notes[names.ANNOTATION_REPLACEMENT]) == ("1", "1")
    (trainer,) = pod["spec"]["containers"]
    left = next(v["value"] for v in trainer["env"] if v["name"] == "PET_MAX_RESTARTS")
    assert left == "10", "one of ten is used; one more for failures of peers"


@pytest.mark.parametrize("seconds_later", [0.0, 1.0, 20.0, 900.0])
def test_pods_that_fail_one_after_the_other_without_a_step_between_use_one_restart(
    seconds_later: float,
) -> None:
    job = running(6, nodes={"min": 6, "max": 6})
    pods = [make_pod(index, job) for index in range(6)]
    first = plan_with(job, failed(0, job=job, **STORAGE), *pods[1:], progress=progress())
    job, now = after(job, first), NOW + seconds_later
    ended = failed(1, job=job, **{**OOM, "finished": now - 1})
    second = plan_with(job, *pods[2:], ended, progress=progress(), now=now)
    assert (deleted(second), is_gang_restart(second)) == (["job-1"], False)
    assert charged_and_free(second.status) == (1, 0)
    assert second.status.pod_replacement is not None
    assert second.status.pod_replacement.pods == ["pod-0", "pod-1"]
    quiet = plan_with(after(job, second), *pods[2:], progress=progress(), now=now + 1)
    assert charged_and_free(quiet.status) == (1, 0)


def test_a_pod_that_ended_before_the_restart_was_charged_is_part_of_it_despite_later_steps() -> (
    None
):
    job = four(**ELASTIC)
    job = after(job, plan_with(job, *others(job, 0), failed(0, job=job), progress=progress()))
    late = failed(1, job=job, finished=NOW - 1)
    result = plan_with(job, *others(job, 0, 1), late, progress=stepped(99, -30), now=NOW + 31)
    assert charged_and_free(result.status) == (1, 0)
    peer = replace(late, finished=NOW + 30)
    result = plan_with(job, *others(job, 0, 1), peer, progress=stepped(99, -20), now=NOW + 31)
    assert charged_and_free(result.status) == (1, 0), "the others step, and it failed soon after"
    unlike = replace(late, finished=NOW + 40)
    result = plan_with(job, *others(job, 0, 1), unlike, progress=stepped(99, -20), now=NOW + 41)
    assert charged_and_free(result.status) == (2, 0), "it has trained since"
    assert (deleted(result), is_gang_restart(result)) == (["job-1"], False)


@pytest.mark.parametrize(
    ("nodes", "num_failed", "restarts_all"),
    [
        (1, 1, True),
        (2, 1, False),
        (2, 2, True),
        (3, 1, False),
        (3, 2, True),
        (3, 3, True),
        (4, 2, True),
        (5, 2, False),
        (5, 3, True),
        (64, 15, False),
        (64, 16, True),
        (64, 64, True),
    ],
)
@pytest.mark.parametrize("low", [1, None], ids=["elastic", "fixed"])
def test_all_pods_restart_if_the_program_fails_in_half_of_them(
    nodes: int, num_failed: int, restarts_all: bool, low: int | None
) -> None:
    """Half of at most 32: an error that is not of one node."""
    job = running(nodes, nodes={"min": low or nodes, "max": nodes})
    ended = [failed(index, job=job) for index in range(num_failed)]
    pods = [make_pod(index, job) for index in range(num_failed, nodes)]
    result = plan_with(job, *ended, *pods, progress=progress())
    assert is_gang_restart(result) is restarts_all
    assert charged_and_free(result.status) == (1, 0), "never one for each"
    assert len(deleted(result)) == (nodes if restarts_all else num_failed)
    assert num_gang_restarts(result.status) == restarts_all


def test_all_pods_that_fail_one_after_the_other_use_one_restart_in_each_life() -> None:
    """Also with the delays between lives, until the budget is used up."""
    job, now, attempt = running(3, nodes={"min": 3, "max": 3}, restart={"maxRestarts": 3}), NOW, 1
    charged, waits = list[int | None](), list[float]()
    while job.status.phase != "Failed":
        born = {"attempt": attempt, "created": now - 9, "started": now - 8}
        ended = [failed(i, job=job, finished=now - 2 + i, **born) for i in range(3)]
        alive = [make_pod(i, job, **born) for i in range(3)]
        began = now
        for number in (1, 2, 3):
            pods = (*ended[:number], *alive[number:])
            job, now = after(job, plan_with(job, *pods, now=now)), now + 1
            if job.status.attempt > attempt or job.status.phase == "Failed":
                break
        while job.status.attempt == attempt and job.status.phase != "Failed":
            result = plan_with(job, *ended, now=now)
            job, now = after(job, result), now + (result.requeue_after or 0.0)
        charged.append(charged_and_free(job.status)[0])
        waits.append(now - began)
        attempt, now = job.status.attempt, now + 60
    assert charged == [1, 2, 3, 3]
    assert condition(job.status, "Failed") == ("True", "RestartsExhausted")
    assert 5 < waits[1] < 15 < waits[2] < 25, "the delay doubles"


def test_a_successor_that_fails_without_a_new_step_is_another_life_and_restarts_all_pods() -> None:
    job = four()
    job = after(
        job, plan_with(job, *others(job, 1), failed(1, job=job, **OOM), progress=stepped(7, 1))
    )
    again = failed(1, job=job, **{**OOM, "finished": NOW + 90, "uid": "new-1"}, replacement=1)
    result = plan_with(job, *others(job, 1), again, progress=stepped(7, 1), now=NOW + 91)
    assert (is_gang_restart(result), charged_and_free(result.status)) == (True, (2, 0))
    assert result.status.pod_replacement is None, "the next attempt begins with single pods"
    job = after(job, result)
    pods = make_pods(4, job, attempt=2, created=NOW + 95, started=NOW + 99)
    ended = failed(2, job=job, **OOM, attempt=2, created=NOW + 95, started=NOW + 99)
    ended = replace(ended, finished=NOW + 199)
    third = plan_with(job, *pods[:2], ended, pods[3], progress=stepped(7, 1), now=NOW + 200)
    assert (third.status.attempt, charged_and_free(third.status)) == (2, (3, 0))
    assert [d for d in deleted(third) if d != "job-rendezvous"] == ["job-2"]


@pytest.mark.parametrize(("step", "restarts_all"), [(6, True), (7, True), (8, False), (500, False)])
def test_a_failure_after_steps_beyond_those_before_is_replaced_alone_again(
    step: int, restarts_all: bool
) -> None:
    job = four()
    job = after(
        job, plan_with(job, *others(job, 1), failed(1, job=job, **OOM), progress=stepped(7, 1))
    )
    again = failed(2, job=job, **{**OOM, "finished": NOW + 300})
    pods = [*others(job, 1, 2), successor(job, 1), again]
    result = plan_with(job, *pods, progress=stepped(step, -299), now=NOW + 301)
    assert charged_and_free(result.status) == (2, 0)
    assert is_gang_restart(result) is restarts_all


def test_a_short_lived_pod_is_replaced_with_a_delay_that_doubles_and_charged_once() -> None:
    job = four(**ELASTIC)
    counts = Restarts(charged=2, causes={"StorageError": 2})
    job = with_status(job, job.status.model_copy(update={"restarts": counts}))
    ended = failed(1, job=job, **STORAGE, started=NOW - 4)
    pods = (*others(job, 1), ended)
    waiting = plan_with(job, *pods, progress=progress())
    assert (deleted(waiting), waiting.requeue_after) == ([], pytest.approx(19.0))
    assert (charged_and_free(waiting.status), waiting.status.phase) == ((2, 0), "Running")
    assert condition(waiting.status, "Healthy") == ("False", "StorageError")
    due = plan_with(after(job, waiting), *pods, progress=progress(), now=NOW + 19)
    assert (deleted(due), charged_and_free(due.status)) == (["job-1"], (3, 0))
    again = plan_with(after(job, due), *pods, progress=progress(), now=NOW + 20)
    assert deleted(again) == ["job-1"], "the delay has not begun anew"


def test_other_faults_are_handled_during_the_delay() -> None:
    job = four(**ELASTIC)
    counts = Restarts(charged=2, causes={"StorageError": 2})
    job = with_status(job, job.status.model_copy(update={"restarts": counts}))
    pods = *others(job, 1), failed(1, job=job, **STORAGE, started=NOW - 4)
    result = plan_with(job, *pods, nodes=lost("node-0"), progress=progress(120))
    assert (deleted(result), causes(result.status)["NodeLost"]) == (["job-0"], 1)


@pytest.mark.parametrize("maximum", [0, 1, 2])
def test_a_failure_beyond_the_budget_fails_the_job_but_not_another_one_of_that_life(
    maximum: int,
) -> None:
    job = running(6, nodes={"min": 1, "max": 6}, restart={"maxRestarts": maximum})
    pods = [make_pod(index, job) for index in range(6)]
    first = plan_with(job, failed(0, job=job, **OOM), *pods[1:], progress=progress())
    if maximum == 0:
        assert condition(first.status, "Failed") == ("True", "RestartsExhausted")
        assert first.status.exit_code == 137
        return
    job = after(job, first)
    second = plan_with(job, failed(1, job=job, **OOM), *pods[2:], progress=progress(), now=NOW + 3)
    assert (second.status.phase, deleted(second)) == ("Running", ["job-1"])
    job = after(job, second)
    new = failed(0, job=job, **{**OOM, "finished": NOW + 99}, uid="new", replacement=1)
    third = plan_with(job, new, *pods[2:], progress=stepped(50, -98), now=NOW + 100)
    assert (third.status.phase == "Failed") is (maximum == 1)


@pytest.mark.parametrize("code", [2, 3])
@pytest.mark.parametrize("index", [0, 3])
def test_a_final_exit_code_ends_the_job_whatever_the_others_ended_with(
    code: int, index: int
) -> None:
    job = four(**ELASTIC)
    pods = *others(job, 1, index), failed(1, job=job), failed(index, code, job=job)
    status = plan_with(job, *pods, progress=progress()).status
    assert (status.phase, status.exit_code) == ("Failed", code)


def test_a_job_that_is_suspended_replaces_nothing_and_charges_nothing() -> None:
    job = four(lifecycle={"suspend": True})
    result = plan_with(job, *others(job, 1), failed(1, job=job, **OOM), progress=progress())
    assert (created(result), charged_and_free(result.status)) == ([], (0, 0))
    assert result.status.phase == "Suspended"


def test_the_group_of_kueue_is_kept() -> None:
    job = four(**QUEUE)
    member: dict[str, Any] = {"finalizers": (names.KUEUE_FINALIZER,)}
    ended = failed(1, job=job, **OOM, **member)
    first = plan_with(job, *others(job, 1, **member), ended, progress=progress())
    assert (deleted(first), is_gang_restart(first)) == (["job-1"], False)
    job = after(job, first)
    kept = replace(ended, deleting=True, deletion_deadline=NOW + 30)
    second = plan_with(job, *others(job, 1, **member), kept, progress=progress(), now=NOW + 1)
    (pod,) = created_pods(second)
    labels = pod["metadata"]["labels"]
    assert (pod["metadata"]["name"], labels[names.KUEUE_GROUP]) == ("job-4", "job-1")
    assert charged_and_free(second.status) == (1, 0)


def test_a_group_that_cannot_replace_a_pod_is_queued_again_and_charged() -> None:
    job = four(**QUEUE)
    member: dict[str, Any] = {"finalizers": (names.KUEUE_FINALIZER,)}
    pods = *others(job, 1, **member), failed(1, job=job, **OOM, **member)
    result = plan_with(job, *pods, nodes=lost("node-0"), progress=progress(120))
    assert (is_gang_restart(result), charged_and_free(result.status)) == (True, (1, 0))


OPEN = MembersReport(attempt=1)


@pytest.mark.parametrize(
    "heard", [OPEN, MembersReport(attempt=0)], ids=["this attempt", "no agent yet"]
)
def test_the_others_regroup_whatever_attempt_the_service_knows(heard: MembersReport) -> None:
    job = four()
    pods = *others(job, 1), failed(1, job=job, **OOM)
    result = plan_with(job, *pods, heard=heard, progress=progress())
    assert not is_gang_restart(result)
    assert charged_and_free(result.status) == (1, 0)


def test_the_answer_of_a_service_that_runs_is_awaited_for_a_limited_time() -> None:
    """A new leader has not asked it yet."""
    job = four()
    pods = *others(job, 1), failed(1, job=job, **OOM)
    waiting = plan_with(job, *pods, heard=NO_MEMBERS, progress=progress())
    assert (waiting.delete, charged_and_free(waiting.status)) == ((), (0, 0))
    assert waiting.requeue_after == pytest.approx(29.0)
    answered = plan_with(job, *pods, heard=OPEN, progress=progress(), now=NOW + 20)
    assert (deleted(answered), is_gang_restart(answered)) == (["job-1"], False)
    late = plan_with(job, *pods, heard=NO_MEMBERS, progress=progress(), now=NOW + 29)
    assert is_gang_restart(late)
    for service in (None, rendezvous(job, **PENDING), rendezvous(job, deleting=True)):
        result = plan_with(job, *pods, heard=NO_MEMBERS, rendezvous=service, progress=progress())
        assert not is_gang_restart(result), "the next one answers"
        assert "job-1" in deleted(result)


def test_pods_that_the_new_one_cannot_join_restart_too() -> None:
    job = four()
    pods = *others(job, 1, revision="job-lost"), failed(1, job=job, revision="job-lost", **OOM)
    result = plan_with(job, *pods, progress=progress())
    assert (is_gang_restart(result), charged_and_free(result.status)) == (True, (1, 0))


def test_a_job_that_stalls_after_a_replacement_is_restarted_by_the_watchdog() -> None:
    job = four()
    job = after(
        job, plan_with(job, *others(job, 1), failed(1, job=job, **OOM), progress=progress())
    )
    hung = replace(progress(-100), phase="step")
    pods = *others(job, 1), successor(job, 1)
    result = plan_with(job, *pods, progress=hung, now=NOW + 9000)
    assert (is_gang_restart(result), charged_and_free(result.status)) == (True, (2, 0))
    assert causes(result.status) == {"OOMKilled": 1, "NoProgress": 1}


def test_the_others_restarts_that_agents_tell_before_are_counted_beside_it() -> None:
    job = four()
    pods = *others(job, 1), failed(1, job=job, **OOM, process_restarts=0)
    result = plan_with(job, *pods, heard=OPEN, progress=progress(process_restarts=0))
    assert charged_and_free(result.status) == (1, 0)
    status = result.status.model_copy(update={"conditions": []})
    again = plan_with(with_status(job, status), *others(job, 1), heard=OPEN, progress=progress())
    assert charged_and_free(again.status) == (1, 0)


def test_a_job_that_waits_for_its_failed_pod_names_it() -> None:
    job = four()
    first = plan_with(job, *others(job, 1), failed(1, job=job, **OOM), progress=progress())
    assert message(first.status, "Training") == "job-1: exit code 137, out of memory"
    assert first.status.pod_replacement is not None
    assert first.status.pod_replacement.time == stamp(NOW)


LATER = NOW + 100
"""The rendezvous pod that was created at NOW is not new any more."""


def hung(generation: int = 1, step: int = 7, ago: float = 7000.0, silent: float = 99) -> Progress:
    """Return what the two ranks of ``generation`` answer; they may be silent for 70 seconds."""
    ranks = tuple(
        RankProgress(number, "step", step, silent, 1.0, pod=f"pod-{number}", generation=generation)
        for number in range(2)
    )
    return replace(progress(ago, phase="step"), ranks=ranks)


def new_service(job: Job, ended: tuple[int, int] = (1, 1), created: float = NOW) -> Pod:
    return rendezvous(job, uid="rdzv-2", created=created, started=created, ended_generation=ended)


def ordered(**spec: Any) -> Job:
    """Return a job whose generation 1 was ended at step 7."""
    job = running(**spec)
    return after(job, plan_with(job, *make_pods(2, job), progress=hung()))


def ended_argument(result: Plan) -> str:
    """Return the argument of the rendezvous pod that ``result`` creates."""
    (pod,) = [pod for pod in created_pods(result) if pod["metadata"]["name"] == "job-rendezvous"]
    (container,) = pod["spec"]["containers"]
    (argument,) = [a for a in container["args"] if a.startswith("--ended=")]
    assert Pod.from_object(pod).ended_generation == _pair(argument.partition("=")[2])
    return str(argument)


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    return int(first or 0), int(second or 0)


def test_a_job_that_hangs_restarts_its_processes_and_keeps_its_pods() -> None:
    job = running()
    result = plan_with(job, *make_pods(2, job), progress=hung())
    assert deleted(result) == ["job-rendezvous"]
    assert [str(delete.reason) for delete in result.delete] == ["Outdated"]
    assert (result.status.attempt, num_gang_restarts(result.status)) == (1, 0)
    assert (charged_and_free(result.status), causes(result.status)) == ((1, 0), {"NoProgress": 1})
    assert result.status.phase == "Restarting"
    assert condition(result.status, "Progressing") == ("False", "NoProgress")
    assert condition(result.status, "Healthy") == ("False", "NoProgress")
    (event,) = result.events
    assert (event.type, event.reason) == ("Warning", "NoProgress")
    assert event.message.startswith("all processes restart in place: no progress for 99 s; rank 0")
    last = result.status.in_place_restart
    assert last is not None
    assert (last.attempt, last.generation, last.step) == (1, 1, 7)


def test_the_order_is_an_argument_of_the_next_rendezvous_pod() -> None:
    job = ordered()
    result = plan_with(job, *make_pods(2, job), progress=hung(), rendezvous=None)
    assert ended_argument(result) == "--ended=1:1"
    assert charged_and_free(result.status) == (1, 0), "it is charged once"
    resized = with_status(make_job(nodes={"min": 1, "max": 3}), job.status)
    result = plan_with(resized, *make_pods(2, job), progress=hung(), rendezvous=None)
    (container,) = created_pods(result)[0]["spec"]["containers"]
    assert {"--nodes=1:3", "--ended=1:1"} <= set(container["args"])


@pytest.mark.parametrize(
    ("service", "replaced"),
    [
        ({}, True),  # the operator was restarted before it deleted the pod
        ({"deleting": True, "deletion_deadline": NOW + 5}, False),
        ({"ended_generation": (1, 1)}, False),
        ({"ended_generation": (1, 1), "created": NOW, "started": NOW}, False),
        ({"ended_generation": (1, 0)}, True),
    ],
)
def test_an_order_is_carried_out_once(service: dict[str, Any], replaced: bool) -> None:
    job = ordered()
    old = rendezvous(job, **service)
    result = plan_with(job, *make_pods(2, job), progress=None, rendezvous=old)
    assert deleted(result) == ["job-rendezvous"] * replaced
    assert charged_and_free(result.status) == (1, 0)
    assert result.status.in_place_restart == job.status.in_place_restart


def test_while_the_agents_change_over_the_job_is_not_restarted_again() -> None:
    job = ordered()
    for service in (None, rendezvous(job), rendezvous(job, deleting=True), new_service(job)):
        result = plan_with(job, *make_pods(2, job), progress=hung(), rendezvous=service)
        assert not is_gang_restart(result)
        assert charged_and_free(result.status) == (1, 0)
        assert result.requeue_after is not None


def test_a_service_that_starts_late_has_as_much_time() -> None:
    job = ordered()
    pending = replace(new_service(job), phase="Pending", started=None)
    late = replace(new_service(job), started=LATER - 59)
    for service in (pending, late):
        result = plan_with(job, *make_pods(2, job), progress=hung(), rendezvous=service, now=LATER)
        assert (result.status.attempt, deleted(result)) == (1, [])


def test_an_order_that_no_agent_obeys_restarts_all_pods_and_uses_no_other_restart() -> None:
    job = ordered()
    service = new_service(job)
    result = plan_with(job, *make_pods(2, job), progress=hung(), rendezvous=service, now=LATER)
    assert is_gang_restart(result)
    assert (charged_and_free(result.status), num_gang_restarts(result.status)) == ((1, 0), 0)
    assert {
        delete.grace_seconds for delete in result.delete if delete.name != "job-rendezvous"
    } == {30}
    assert result.status.in_place_restart is None


@pytest.mark.parametrize(("step", "in_place"), [(0, False), (6, False), (7, False), (8, True)])
def test_a_job_that_hangs_again_restarts_all_pods_unless_it_made_a_new_step(
    step: int, in_place: bool
) -> None:
    job = ordered()
    again = hung(generation=2, step=step, ago=5.0)
    result = plan_with(
        job, *make_pods(2, job), progress=again, rendezvous=new_service(job), now=LATER
    )
    assert is_gang_restart(result) != in_place
    assert charged_and_free(result.status) == (2, 0)
    assert causes(result.status) == {"NoProgress": 2}
    assert num_gang_restarts(result.status) == (0 if in_place else 1)
    last = result.status.in_place_restart
    assert (last and last.generation) == (2 if in_place else None)


def test_in_the_next_attempt_the_first_restart_is_in_place_again() -> None:
    job = ordered()
    service = new_service(job)
    gang = plan_with(job, *make_pods(2, job), progress=hung(2), rendezvous=service, now=LATER)
    assert is_gang_restart(gang)
    job = after(job, gang)
    pods = make_pods(2, job, attempt=2)
    result = plan_with(job, *pods, progress=hung(1, step=3), rendezvous=service, now=LATER)
    assert (result.status.attempt, deleted(result)) == (2, ["job-rendezvous"])
    replaced = plan_with(after(job, result), *pods, rendezvous=None, now=LATER)
    assert ended_argument(replaced) == "--ended=2:1"


def test_the_order_of_an_earlier_attempt_replaces_no_rendezvous_pod() -> None:
    job = with_status(running(), running().status.model_copy(update={"attempt": 2}))
    pods = make_pods(2, job, attempt=2)
    result = plan_with(job, *pods, progress=progress(), rendezvous=new_service(job, (1, 5)))
    assert deleted(result) == []


def test_a_lost_status_forgets_the_order_which_restarts_nothing() -> None:
    job = make_job()
    pods, service = make_pods(2, job), new_service(job)
    result = plan_with(job, *pods, progress=progress(), rendezvous=service)
    assert (result.status.attempt, deleted(result)) == (1, [])
    hangs = plan_with(job, *pods, progress=hung(2), rendezvous=service, now=LATER)
    assert deleted(hangs) == ["job-rendezvous"], "the next order"


def test_a_budget_that_is_used_up_fails_the_job() -> None:
    job = running(restart={"maxRestarts": 1})
    first = plan_with(job, *make_pods(2, job), progress=hung())
    assert first.status.phase == "Restarting"
    job = after(job, first)
    again = hung(generation=2, step=9)
    result = plan_with(
        job, *make_pods(2, job), progress=again, rendezvous=new_service(job), now=LATER
    )
    assert condition(result.status, "Failed") == ("True", "RestartsExhausted")
    none = running(restart={"maxRestarts": 0})
    assert plan_with(none, *make_pods(2, none), progress=hung()).status.phase == "Failed"


def test_all_pods_restart_at_once_without_a_generation() -> None:
    result = plan_with(running(), *make_pods(), progress=hung(generation=0))
    assert is_gang_restart(result)
    assert charged_and_free(result.status) == (1, 0)


def test_pods_of_a_revision_that_is_lost_restart_together() -> None:
    job = running()
    pods = [replace(pod, revision="job-lost") for pod in make_pods(2, job)]
    service = rendezvous(job, revision="job-lost")
    result = plan_with(job, *pods, progress=hung(), rendezvous=service)
    assert is_gang_restart(result)


def test_nothing_is_restarted_while_the_control_plane_cannot_be_trusted() -> None:
    job = running()
    nodes = lost("node-0", "node-1", "node-s", *(f"spare-{number}" for number in range(4)))
    result = plan_with(job, *make_pods(2, job), progress=hung(), nodes=nodes)
    assert deleted(result) == []
    assert result.status.in_place_restart is None


def test_a_suspension_ends_an_order() -> None:
    job = ordered()
    paused = with_status(make_job(lifecycle={"suspend": True}), job.status)
    stopping = plan_with(paused, *make_pods(2, job), progress=hung(), rendezvous=new_service(job))
    assert set(deleted(stopping)) == {"job-0", "job-1"}
    suspended = plan_with(after(paused, stopping), rendezvous=None)
    assert suspended.status.phase == "Suspended"
    resumed = plan_with(after(make_job(), suspended), rendezvous=None)
    assert (resumed.status.attempt, resumed.status.in_place_restart) == (2, None)
    assert ended_argument(resumed) == "--ended="
    assert charged_and_free(resumed.status) == (1, 0)


def test_a_changed_spec_wins_over_a_stall() -> None:
    job = ordered()
    changed = with_status(make_job(image="trainer:2"), job.status)
    result = plan_with(changed, *make_pods(2, job), progress=hung(), rendezvous=new_service(job))
    assert (result.status.attempt, result.status.in_place_restart) == (2, None)
    assert charged_and_free(result.status) == (1, 0)


def test_a_deadline_ends_the_job_during_an_order() -> None:
    job = ordered(lifecycle={"activeDeadlineSeconds": 60})
    result = plan_with(job, *make_pods(2, job), progress=hung(), now=NOW + 10**5)
    assert condition(result.status, "Failed") == ("True", "DeadlineExceeded")


def test_the_phase_is_restarting_until_another_step() -> None:
    job = ordered()
    service = new_service(job)
    loading = Progress(progress().status.model_copy(update={"last_step_time": None}), phase="load")
    for answer in (None, loading):
        result = plan_with(job, *make_pods(2, job), progress=answer, rendezvous=service)
        assert result.status.phase == "Restarting"
    result = plan_with(job, *make_pods(2, job), progress=progress(), rendezvous=service)
    assert result.status.phase == "Running"
    assert condition(result.status, "Progressing") == ("True", "Stepping")
    assert condition(result.status, "Healthy") == ("True", "AsExpected")


def test_new_processes_have_time_to_answer() -> None:
    job, silent = ordered(), {"rendezvous": new_service(ordered())}
    early = plan_with(job, *make_pods(2, job), now=NOW + 299, **silent)
    assert condition(early.status, "Progressing")[1] != "NoAnswer"
    late = plan_with(job, *make_pods(2, job), now=NOW + 301, **silent)
    assert condition(late.status, "Progressing")[1] == "NoAnswer"


def test_a_stall_that_a_lost_node_explains_is_not_charged() -> None:
    """The agents have just found a new service, and are about to go on without the node."""
    job = running()
    service = new_service(job, (0, 0))
    result = plan_with(job, *make_pods(2, job), progress=hung(), rendezvous=service, now=NOW + 59)
    assert (deleted(result), charged_and_free(result.status)) == ([], (0, 0))
    later = plan_with(job, *make_pods(2, job), progress=hung(), rendezvous=service, now=NOW + 60)
    assert charged_and_free(later.status) == (1, 0)


def test_a_pod_whose_agent_is_silent_is_replaced_whatever_was_ordered() -> None:
    job = ordered()
    pods = make_pods(2, job)
    result = plan_with(
        job, *pods, progress=hung(), rendezvous=new_service(job), nodes=lost("node-1")
    )
    assert "job-1" in deleted(result)
    assert result.status.attempt == 1


def test_a_job_in_a_queue_keeps_its_group() -> None:
    job = running(scheduling={"queueName": "team"})
    pods = make_pods(2, job, finalizers=(names.KUEUE_FINALIZER,))
    result = plan_with(job, *pods, progress=hung())
    assert (deleted(result), result.status.attempt) == (["job-rendezvous"], 1)


def test_a_job_that_has_restarted_all_pods_restarts_in_place_too() -> None:
    before = running().status
    counts = Restarts(gang=2, charged=2, causes={"NoProgress": 2})
    job = with_status(running(), before.model_copy(update={"restarts": counts}))
    result = plan_with(job, *make_pods(2, job), progress=hung())
    assert causes(result.status) == {"NoProgress": 3}
    assert (charged_and_free(result.status), num_gang_restarts(result.status)) == ((3, 0), 2)


@pytest.mark.parametrize(
    ("text", "ended"),
    [("1:3", (1, 3)), ("", (0, 0)), ("x", (0, 0)), ("1", (1, 0)), ("-1:2", (0, 2)), (None, (0, 0))],
)
def test_a_malformed_annotation_is_no_order(text: str | None, ended: tuple[int, int]) -> None:
    metadata = {"name": "job-rendezvous", "annotations": {names.ANNOTATION_ENDED: text}}
    assert Pod.from_object({"metadata": metadata}).ended_generation == ended


def test_the_time_without_progress_is_counted_once_as_stalled() -> None:
    job = running()
    job = with_status(job, job.status.model_copy(update={"start_time": stamp(NOW - 1000)}))
    assert make_pod(0, job).running
    first = plan_with(job, *make_pods(2, job), progress=hung())
    job = after(job, first)
    second = plan_with(
        job, *make_pods(2, job), progress=hung(silent=109), rendezvous=None, now=NOW + 10
    )
    times = [result.status.time_spent for result in (first, second)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].stalled == times[0].stalled
