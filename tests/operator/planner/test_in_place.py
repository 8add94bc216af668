"""Restarts in place: a job that hangs restarts its processes in the living pods first, then all pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    causes,
    charged_and_free,
    condition,
    created_pods,
    deleted,
    lost,
    make_job,
    make_pod,
    make_pods,
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
from fluxtrain_operator.base.reports import Progress, RankProgress
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.plan import Plan

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


def after(job: Job, result: Plan) -> Job:
    return with_status(job, result.status)


def ordered(**spec: Any) -> Job:
    """Return a job whose generation 1 was ended at step 7."""
    job = running(**spec)
    return after(job, plan_with(job, *make_pods(2, job), progress=hung()))


def is_gang_restart(result: Plan) -> bool:
    return result.status.attempt == 2


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
