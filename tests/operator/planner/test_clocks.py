"""No decision depends on the clock of a node: each is the same an hour ahead and an hour behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.jobs import KEY, OWNER, Clock, make_node, make_training
from tests.operator.planner.invariants import as_manifest
from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    PENDING,
    SUCCEEDED,
    condition,
    deleted,
    failed,
    make_pod,
    make_pods,
    message,
    observe,
    plan_with,
    progress,
    rendezvous,
    running,
    with_status,
)

from fluxtrain.contract.resource.status import InPlaceRestart, ProgressStatus
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import Progress, RankProgress
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.plan import plan

HOUR = 3600.0
clocks = pytest.mark.parametrize("offset", [HOUR, 0.0, -HOUR], ids=["ahead", "right", "behind"])
"""Seconds by which the clock of a node is ahead."""


def seen(*versions: tuple[float, Pod], offset: float) -> Pod:
    """Return the pod as a leader sees its ``versions`` at these times; its kubelet tells other times."""
    clock = Clock(NOW)
    cache = Cache(clock=clock)
    cache.set_job(make_training())
    for clock.now, pod in versions:
        told = replace(
            pod,
            started=None if pod.started is None else pod.started + offset,
            finished=None if pod.finished is None else pod.finished + offset,
        )
        cache.set_pod(as_manifest(told, [OWNER]))
    (manifest,) = cache.pods(KEY)
    return Pod.from_object(manifest)


def watched(pod: Pod, offset: float) -> Pod:
    """Return ``pod`` as a leader that saw each of its changes when it happened."""
    alive: dict[str, Any] = {"exit_code": None, "finished": None, "phase": "Running"}
    versions = [(pod.created, replace(pod, **alive | PENDING))]
    if pod.started is not None:
        versions.append((pod.started, replace(pod, **alive)))
    if pod.finished is not None:
        versions.append((pod.finished, pod))
    return seen(*versions, offset=offset)


def answer(offset: float, seconds_ago: float = 1.0, **status: Any) -> Progress:
    """Return the answer of rank 0, received now, whose first step was a minute before its last one."""
    told = NOW - seconds_ago + offset
    times = {"first_step_time": stamp(told - 60), "last_step_time": stamp(told)}
    changed = progress().status.model_copy(update={**times, **status})
    return Progress(changed, seconds_since_step=seconds_ago)


@clocks
@pytest.mark.parametrize("code", [1, 74])
def test_a_program_that_fails_restarts_at_once(code: int, offset: float) -> None:
    job = running(2)
    pods = [watched(failed(index, code, job), offset) for index in range(2)]
    one = plan_with(job, pods[0], make_pod(1, job), progress=progress())
    assert one.decision is not None
    assert (one.decision.action, deleted(one)) == ("run", ["job-0"])
    both = plan_with(job, *pods, progress=progress())
    assert both.decision is not None
    assert (both.decision.action, deleted(both)) == ("restart", ["job-0", "job-1"])


@clocks
@pytest.mark.parametrize(("seconds_later", "charged"), [(5.0, 1), (60.0, 2)])
def test_a_second_failure_is_charged_after_steps_only(
    seconds_later: float, charged: int, offset: float
) -> None:
    """The last step was made 30 s after the first failure, or before it."""
    job = running(4, nodes={"min": 1, "max": 4})
    others = [make_pod(index, job) for index in (2, 3)]
    pods = watched(failed(0, 74, job), offset), make_pod(1, job), *others
    job = with_status(job, plan_with(job, *pods, progress=answer(offset)).status)
    now = NOW + seconds_later
    ended = {"finished": now - 1, "started": NOW - 600, "created": NOW - 601}
    ago = seconds_later - 30 if charged == 2 else seconds_later + 1
    told = stamp(now - ago + offset)
    progress_now = Progress(
        answer(offset, step=99).status.model_copy(update={"last_step_time": told}),
        seconds_since_step=ago,
    )
    pod = watched(failed(1, 74, job, **ended), offset)
    status = plan_with(job, pod, *others, progress=progress_now, now=now).status
    assert status.restarts is not None
    assert status.restarts.charged == charged


@clocks
def test_a_killed_pod_is_replaced_at_once(offset: float) -> None:
    job = running(2)
    pod = watched(failed(0, 137, job), offset)
    result = plan_with(job, pod, make_pod(1, job), progress=progress())
    assert deleted(result) == ["job-0"]
    assert result.status.node_faults[0].time == stamp(NOW - 1)


@clocks
def test_a_pod_that_soon_fails_is_replaced_after_a_delay(offset: float) -> None:
    job = running(2)
    soon = {"created": NOW - 20, "started": NOW - 15, "finished": NOW - 2}
    pod = watched(failed(0, 137, job, **soon), offset)
    early = plan_with(job, pod, make_pod(1, job), progress=progress())
    assert (deleted(early), early.requeue_after) == ([], 8.0)
    late = plan_with(job, pod, make_pod(1, job), progress=progress(), now=NOW + 8)
    assert deleted(late) == ["job-0"]
    assert [retry.count for retry in late.status.retries] == [1]


@clocks
def test_a_replacement_that_runs_for_a_minute_ends_the_delays(offset: float) -> None:
    job = running(2)
    soon = {"created": NOW - 20, "started": NOW - 15, "finished": NOW - 12}
    pod = watched(failed(0, 137, job, **soon), offset)
    job = with_status(job, plan_with(job, pod, make_pod(1, job), progress=progress()).status)
    assert len(job.status.retries) == 1
    again = watched(make_pod(0, job, uid="again", created=NOW + 2, started=NOW + 5), offset)
    for after, count in ((64, 1), (65, 0)):
        result = plan_with(job, again, make_pod(1, job), progress=progress(), now=NOW + after)
        assert len(result.status.retries) == count, after


@clocks
def test_a_job_completes_although_a_pod_does_not_end(offset: float) -> None:
    job = running(2)
    pod = watched(make_pod(0, job, **{**SUCCEEDED, "finished": NOW - 20}), offset)
    early = plan_with(job, pod, make_pod(1, job), progress=progress())
    assert (early.status.phase, early.requeue_after) == ("Running", 10.0)
    late = plan_with(job, pod, make_pod(1, job), progress=progress(), now=NOW + 10)
    assert late.status.phase == "Complete"


@pytest.mark.parametrize("offsets", [(0.0, HOUR), (-HOUR, 0.0), (HOUR, -HOUR), (HOUR, HOUR)])
def test_a_job_that_trains_is_running(offsets: tuple[float, float]) -> None:
    job = running(2, nodes={"min": 2, "max": 2})
    pods = [watched(pod, offsets[pod.index]) for pod in make_pods(2, job, started=NOW - 100)]
    result = plan_with(job, *pods, progress=answer(offsets[0]))
    assert result.status.phase == "Running"
    assert condition(result.status, "Progressing") == ("True", "Stepping")
    assert result.status.progress is not None
    assert result.status.progress.last_step_time == stamp(NOW - 1)
    assert result.first_step_time == NOW - 61
    silent = plan_with(with_status(job, result.status), *pods)
    assert silent.status.phase == "Running", "without an answer, by the time in the status"


@clocks
def test_a_job_whose_pods_have_just_started_is_not_running(offset: float) -> None:
    job = running(2, nodes={"min": 2, "max": 2})
    pods = [watched(pod, offset) for pod in make_pods(2, job, started=NOW - 5)]
    result = plan_with(job, *pods, progress=answer(offset, seconds_ago=20))
    assert result.status.phase == "Restarting"


@clocks
def test_a_job_that_restarted_in_place_is_running_after_another_step(offset: float) -> None:
    last = InPlaceRestart(
        attempt=1,
        generation=1,
        step=7,
        time=stamp(NOW - 90),
        lastStepTime=stamp(NOW - 100),
    )
    job = running(2)
    job = with_status(job, job.status.model_copy(update={"in_place_restart": last}))
    pods = make_pods(2, job)
    before = plan_with(job, *pods, progress=answer(offset, seconds_ago=100.4))
    assert before.status.phase == "Restarting"
    after = plan_with(job, *pods, progress=answer(offset, seconds_ago=40))
    assert after.status.phase == "Running"


@clocks
def test_the_same_step_in_several_answers_changes_nothing(offset: float) -> None:
    job = running(2)
    told = replace(answer(offset, 400, samples=57), age=0.0)
    job = with_status(job, plan_with(job, *make_pods(2, job), progress=told, now=NOW + 60).status)
    assert job.status.progress is not None
    assert job.status.progress.last_step_time == stamp(NOW - 340)
    for late in (0.2, 0.7, 1.3, 4.0, 0.4):
        later = NOW + 460 + late
        same = replace(told, seconds_since_step=700.0, age=100.0)
        result = plan_with(job, *make_pods(2, job), progress=same, now=later)
        assert result.status == job.status, late


@clocks
def test_a_task_whose_steps_have_no_number_makes_progress(offset: float) -> None:
    job = running(2)
    for later in (10.0, 70.0, 140.0):
        report = replace(answer(offset, later + 1), age=2 * later)
        result = plan_with(job, *make_pods(2, job), progress=report, now=NOW + 4 * later)
        job = with_status(job, result.status)
        assert job.status.progress is not None
        assert job.status.progress.last_step_time == stamp(NOW + later - 1)


@clocks
def test_the_newest_of_several_termination_messages_counts(offset: float) -> None:
    job = running(2)

    def ended(index: int, step: int, finished: float, told: float) -> Pod:
        final = Progress(ProgressStatus(step=step, lastStepTime=stamp(finished - 2 + told)))
        pod = watched(failed(index, 137, job, finished=finished), told)
        return replace(pod, final_progress=final.ended_at(finished + told))

    job = with_status(job, job.status.model_copy(update={"progress": None}))
    pods = (ended(0, 100, NOW - 60, offset), ended(1, 120, NOW - 30, -offset))
    result = plan_with(job, *pods)
    assert result.status.progress is not None
    assert result.status.progress.step == 120
    assert result.status.progress.last_step_time == stamp(NOW - 32)


@clocks
def test_a_node_counts_as_lost_after_a_grace_time(offset: float) -> None:
    job, clock = running(2), Clock(LONG_AGO)
    cache = Cache(clock=clock)
    for name in ("node-0", "node-1", "node-s", "spare"):
        cache.set_node(node(name, True, LONG_AGO + offset))
    clock.now = NOW - 5
    cache.set_node(node("node-1", False, clock.now + offset))
    observed = observe(job, *make_pods(2, job), nodes=cache.nodes)
    early = plan(job, observed, NOW)
    assert (deleted(early), early.requeue_after) == ([], 15.0)
    assert deleted(plan(job, observed, NOW + 15)) == ["job-1"]


@clocks
def test_nodes_that_were_lost_together_are_an_outage_for_an_hour(offset: float) -> None:
    job, clock = running(2), Clock(LONG_AGO)
    cache = Cache(clock=clock)
    names = ("node-0", "node-1", "node-s")
    for name in names:
        cache.set_node(node(name, True, LONG_AGO + offset))
    clock.now = NOW - 600
    for name in names[:2]:
        cache.set_node(node(name, False, clock.now + offset))
    result = plan(job, observe(job, *make_pods(2, job), nodes=cache.nodes), NOW)
    assert deleted(result) == []
    assert message(result.status, "Healthy").startswith("2 of 3 nodes are not ready")


def node(name: str, ready: bool, told: float) -> dict[str, Any]:
    manifest = make_node(name, ready)
    manifest["status"]["conditions"][0]["lastTransitionTime"] = stamp(told)
    return manifest


@pytest.mark.parametrize(("offset", "delay"), [(HOUR, 10.0), (0.0, 8.0), (-HOUR, 8.0 - 18.0)])
def test_a_new_leader_delays_at_most_as_if_the_pod_had_ended_now(
    offset: float, delay: float
) -> None:
    job = running(2)
    soon = {"created": NOW - 20, "started": NOW - 15, "finished": NOW - 2}
    pod = seen((NOW, failed(0, 137, job, **soon)), offset=offset)
    result = plan_with(job, pod, make_pod(1, job), progress=progress())
    if delay > 0:
        assert (deleted(result), result.requeue_after) == ([], delay)
    else:
        assert pod.finished == pod.created
        assert deleted(result) == ["job-0"], "created that long ago"


@clocks
def test_agents_have_a_minute_to_join_a_new_rendezvous_pod(offset: float) -> None:
    job = running(2)
    service = watched(rendezvous(job, created=NOW - 25, started=NOW - 20), offset)
    hung = RankProgress(0, "step", 7, 99.0, 1.0)
    for after, restarts in ((39, 0), (40, 1)):
        report = replace(answer(offset, 99), ranks=(hung,), phase="step")
        seen_by = {"rendezvous": service, "progress": report, "now": NOW + after}
        result = plan_with(job, *make_pods(2, job), **seen_by)
        assert result.status.restarts is not None
        assert result.status.restarts.charged == restarts, after
