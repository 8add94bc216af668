"""The planner: creation, admission, suspension, changes of the spec, and the end of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    PENDING,
    charged_and_free,
    condition,
    created,
    created_pods,
    deleted,
    failed,
    make_job,
    make_pod,
    make_pods,
    message,
    observe,
    plan_with,
    progress,
    rendezvous,
    running,
    started,
    with_status,
)

from fluxtrain.contract.resource.status import Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.plan import Plan, plan, plan_invalid

ERROR = ConfigError("spec.run.model.hidden_size", 32, "must be a multiple of num_heads")


def test_a_new_job_gets_its_objects_in_order_and_pods_for_the_maximum() -> None:
    result = plan(make_job(), Observed(), NOW)
    kinds = [m["kind"] for m in result.create]
    support = ["ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Secret"]
    assert kinds == [*support, *["Pod"] * 3]
    assert created(result) == ["job-rendezvous", "job-0", "job-1"]
    assert (result.status.phase, result.status.attempt) == ("Pending", 1)
    assert result.status.nodes is not None
    assert (result.status.nodes.ready, result.status.nodes.desired) == (0, 2)


def test_a_job_is_running_once_a_step_is_reported() -> None:
    assert plan_with(started(), *make_pods(), now=LONG_AGO + 60).status.phase == "Starting"
    status = plan_with(started(), *make_pods(), progress=progress()).status
    assert (status.phase, condition(status, "Ready")) == ("Running", ("True", "Training"))
    assert status.progress is not None
    assert status.progress.step == 7


def test_an_unschedulable_job_has_the_schedulers_message() -> None:
    waiting = "Unschedulable: 0/2 nodes are available: 2 Insufficient amd.com/gpu."
    status = plan_with(started(), *make_pods(**PENDING, waiting=waiting)).status
    assert (status.phase, condition(status, "Ready")[1]) == ("Pending", "Unschedulable")
    assert "0 of at least 1 nodes are up" in message(status, "Ready")
    assert "Insufficient amd.com/gpu" in message(status, "Ready")


def test_pods_with_scheduling_gates_are_not_admitted() -> None:
    pods = make_pods(**PENDING, gated=True)
    status = plan_with(started(), *pods).status
    assert condition(status, "Admitted") == ("False", "SchedulingGated")
    pods = [replace(pod, gates=("example.org/b", names.KUEUE_GATE)) for pod in pods]
    expected = "2 pods wait at a scheduling gate: example.org/b, kueue.x-k8s.io/admission"
    assert message(plan_with(started(), *pods).status, "Admitted") == expected


def test_a_finished_job_never_restarts() -> None:
    job = running()
    job = with_status(job, plan_with(job, failed(0, 3)).status)
    assert plan(job, Observed(), NOW).create == ()
    assert plan_with(job).create == ()
    assert plan_with(job, make_pod(0)).create == ()


def test_a_finished_job_is_deleted_after_its_ttl() -> None:
    job = running(lifecycle={"ttlSecondsAfterFinished": 60, "cleanPods": "All"})
    job = with_status(job, plan_with(job, failed(0, 3)).status)
    waiting = plan_with(job, rendezvous=None, now=NOW + 10)
    assert waiting.requeue_after == pytest.approx(50.0)
    (delete,) = plan_with(job, rendezvous=None, now=NOW + 60).delete
    assert (delete.kind, delete.name, delete.uid) == ("FluxTraining", "job", "uid")


def test_an_invalid_job_is_deleted_after_its_ttl() -> None:
    manifest = {
        "metadata": {"name": "job", "uid": "uid", "generation": 1},
        "spec": {"lifecycle": {"ttlSecondsAfterFinished": 60}},
    }
    first = plan_invalid(manifest, ERROR, Observed(), NOW)
    assert (first.status.phase, first.delete, first.requeue_after) == ("Failed", (), 60.0)
    manifest["status"] = first.status.model_dump(mode="json", by_alias=True)
    later = plan_invalid(manifest, ERROR, Observed(), NOW + 10)
    assert (later.status, later.delete) == (first.status, ())
    assert later.requeue_after == pytest.approx(50.0)
    (delete,) = plan_invalid(manifest, ERROR, Observed(), NOW + 60).delete
    assert (delete.kind, delete.name, delete.uid) == ("FluxTraining", "job", "uid")


@pytest.mark.parametrize("lifecycle", [{}, None, {"ttlSecondsAfterFinished": None}, "soon"])
def test_an_invalid_job_without_a_ttl_is_kept(lifecycle: object) -> None:
    manifest = {"metadata": {"name": "job", "uid": "uid"}, "spec": {"lifecycle": lifecycle}}
    result = plan_invalid(manifest, ERROR, Observed(), NOW)
    assert (result.delete, result.requeue_after) == ((), None)


def test_a_running_job_with_an_invalid_spec_does_not_expire() -> None:
    manifest = {
        "metadata": {"name": "job", "uid": "uid"},
        "spec": {"lifecycle": {"ttlSecondsAfterFinished": 0}},
        "status": running().status.model_dump(mode="json", by_alias=True),
    }
    result = plan_invalid(manifest, ERROR, Observed(), NOW)
    assert (result.status.phase, result.delete, result.requeue_after) == ("Running", (), None)


def test_dp_replicate_must_divide_a_possible_number_of_ranks() -> None:
    run = {"preset": "micro", "parallel": {"dp_replicate": 2}}
    assert make_job(run=run, nodes={"min": 2, "max": 3})
    assert make_job(run=run, nodes={"min": 3, "max": 3}, gpusPerNode=8)
    with pytest.raises(ConfigError, match=r"got 2; must divide the number of ranks, 3$"):
        make_job(run=run, nodes={"min": 3, "max": 3})
    run = {"preset": "micro", "parallel": {"dp_replicate": 7}}
    with pytest.raises(ConfigError, match=r"got 7; must divide the number of ranks, 4 to 6"):
        make_job(run=run, nodes={"min": 4, "max": 6})


def test_an_invalid_template_is_rejected_before_anything_is_created() -> None:
    with pytest.raises(ConfigError, match=r"spec\.podTemplate\.spec\.restartPolicy"):
        make_job(podTemplate={"spec": {"restartPolicy": "Always"}})


def test_a_suspended_job_stops_gracefully_and_resumes_in_a_new_attempt() -> None:
    job = make_job(running().status, lifecycle={"suspend": True})
    stopping = plan_with(job, *make_pods(), progress=progress())
    assert deleted(stopping) == ["job-0", "job-1"], "the rendezvous stays for the checkpoint"
    assert {delete.grace_seconds for delete in stopping.delete} == {None}
    assert stopping.status.phase == "Suspended"
    assert condition(stopping.status, "Suspended") == ("False", "Stopping")
    stopped = plan_with(with_status(job, stopping.status), now=NOW + 5)
    assert deleted(stopped) == ["job-rendezvous"]
    assert condition(stopped.status, "Suspended") == ("True", "Suspended")
    resumed = plan_with(make_job(stopped.status), rendezvous=None, now=NOW + 60)
    assert (resumed.status.attempt, created(resumed)) == (2, ["job-rendezvous", "job-0", "job-1"])
    assert charged_and_free(resumed.status) == charged_and_free(stopping.status)
    assert resumed.status.progress == stopping.status.progress


def test_a_job_that_is_created_suspended_waits() -> None:
    result = plan(make_job(lifecycle={"suspend": True}), Observed(), NOW)
    assert (result.create, result.status.phase, result.status.attempt) == ((), "Suspended", 0)
    assert plan(make_job(result.status), Observed(), NOW).status.attempt == 1


def test_a_job_waits_for_the_jobs_of_start_after() -> None:
    job = make_job(lifecycle={"startAfter": ["encode", "other"]})
    waiting = plan(job, Observed(predecessors={"encode": "Running", "other": "Complete"}), NOW)
    assert waiting.create == ()
    assert condition(waiting.status, "Admitted") == ("False", "WaitingForJobs")
    job = with_status(job, waiting.status)
    ready = plan(job, Observed(predecessors={"encode": "Complete", "other": "Complete"}), NOW)
    assert "job-0" in created(ready)
    again = plan(with_status(job, ready.status), Observed(predecessors={}), NOW)
    assert again.create, "a started job waits no more"


@pytest.mark.parametrize(
    ("predecessors", "reason", "expected"),
    [
        ({"encode": "Running"}, "WaitingForJobs", "encode is Running"),
        ({"encode": ""}, "WaitingForJobs", "encode is new"),
        ({}, "WaitingForJobs", "encode does not exist"),
        ({"encode": "Failed"}, "WaitingForFailedJobs", "encode is Failed"),
    ],
)
def test_a_waiting_job_reports_the_phases_of_the_others(
    predecessors: dict[str, str], reason: str, expected: str
) -> None:
    job = make_job(lifecycle={"startAfter": ["encode"]})
    status = plan(job, Observed(predecessors=predecessors), NOW).status
    assert (status.phase, condition(status, "Admitted")) == ("Pending", ("False", reason))
    text = message(status, "Admitted")
    assert expected in text
    has_failed = reason == "WaitingForFailedJobs"
    remedy = "it, or take it out of spec.lifecycle.startAfter"
    assert (remedy in text) == (has_failed or not predecessors)


def test_a_job_of_a_series_starts_after_one_that_has_failed() -> None:
    job = make_job(lifecycle={"startAfter": ["one", "two"], "startWhen": "Ended"})
    waiting = plan(job, Observed(predecessors={"one": "Failed", "two": "Running"}), NOW)
    assert message(waiting.status, "Admitted").endswith("startAfter: two is Running")
    assert waiting.status.completed_predecessors == ["one"]
    job = with_status(job, waiting.status)
    gone = plan(job, Observed(predecessors={"two": "Running"}), NOW)
    assert condition(gone.status, "Admitted") == ("False", "WaitingForJobs")
    assert gone.status.completed_predecessors == ["one"], "it was seen, and may be removed"
    started = plan(with_status(job, gone.status), Observed(predecessors={"two": "Complete"}), NOW)
    assert "job-0" in created(started)


@pytest.mark.parametrize("manager", ["kueue.x-k8s.io/multikueue", "somebody"])
def test_a_job_with_another_manager_is_ignored(manager: str) -> None:
    assert plan_with(make_job(managedBy=manager), make_pod(0)) == Plan(Status())


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    assert plan(replace(make_job(), deleting=True), Observed(), NOW) == Plan(Status())


def test_scaling_down_deletes_the_highest_indices() -> None:
    job = running(3, nodes={"min": 1, "max": 3})
    smaller = make_job(job.status, nodes={"min": 1, "max": 2})
    result = plan_with(smaller, *make_pods(3, job), progress=progress())
    assert (deleted(result), created(result), result.status.attempt) == (["job-2"], [], 1)


@pytest.mark.parametrize(
    ("nodes", "removed", "added"),
    [
        ({"min": 1, "max": 3}, [], ["job-2"]),
        ({"min": 2, "max": 4}, [], ["job-2", "job-3"]),
        ({"min": 1, "max": 1}, ["job-1"], []),
    ],
)
def test_scaling_restarts_nothing_but_the_rendezvous_service(
    nodes: dict[str, int], removed: list[str], added: list[str]
) -> None:
    job = running()
    resized = make_job(job.status, nodes=nodes)
    result = plan_with(resized, *make_pods(), rendezvous=rendezvous(job), progress=progress())
    assert (result.status.attempt, sorted(deleted(result))) == (1, [*removed, "job-rendezvous"])
    assert created(result) == added
    assert result.status.restarts == job.status.restarts


def test_a_changed_spec_restarts_all_pods_and_an_upgraded_operator_none() -> None:
    job = running()
    changed = make_job(job.status, image="trainer:2")
    assert plan_with(changed, *make_pods(), progress=progress()).status.attempt == 2
    upgraded = replace(job, image="trainer:2")  # another default
    result = plan_with(upgraded, *make_pods(), progress=progress())
    assert (result.delete, result.create, result.status.attempt) == ((), (), 1)


def test_an_outdated_status_creates_and_deletes_nothing() -> None:
    """The API server refuses to write it; unless somebody has set the status back."""
    job = running()
    result = plan_with(job, failed(0, attempt=2, created=NOW - 50))
    newer = job.status.model_copy(update={"attempt": 2})
    assert (result.status, result.delete, result.create) == (newer, (), ())
    assert result.requeue_after == 1.0
    again = plan_with(with_status(job, newer), *make_pods(attempt=2), progress=progress())
    assert (again.status.phase, again.delete, created(again)) == ("Running", (), [])


def test_a_job_whose_status_was_lost_adopts_its_pods() -> None:
    result = plan_with(make_job(), *make_pods(attempt=4), progress=progress())
    assert (result.status.attempt, result.delete, created(result)) == (4, (), [])


def test_planning_again_from_the_same_state_changes_nothing() -> None:
    job = running()
    again = plan_with(job, *make_pods(), progress=progress(), now=NOW + 1)
    assert (again.status, again.delete, again.create, again.events) == (job.status, (), (), ())


def test_only_objects_that_differ_are_applied_and_undesired_ones_deleted() -> None:
    job = running()
    fixed = make_job(job.status, nodes={"min": 2, "max": 2})
    applied = observe(job).applied
    result = plan_with(fixed, *make_pods(2, fixed), progress=progress(), applied=applied)
    assert [(d.kind, d.name) for d in result.delete] == [("PodDisruptionBudget", "job-nodes")]
    assert result.create == ()


def test_an_object_of_a_kind_that_no_job_outlives_is_not_deleted() -> None:
    """Whoever gives a Service the job as its controller makes the operator no stronger than it is."""
    job = running()
    foreign = {("Service", "more"): "", ("NetworkPolicy", "more"): "", ("ConfigMap", "more"): ""}
    applied = {**observe(job).applied, **foreign}
    result = plan_with(job, *make_pods(), progress=progress(), applied=applied)
    assert [(d.kind, d.name) for d in result.delete] == [("ConfigMap", "more")]


def test_pods_of_a_gang_are_scheduled_one_by_one_if_its_api_is_missing() -> None:
    job = make_job(scheduling={"gang": "volcano"})
    result = plan(job, Observed(missing_apis=frozenset({"scheduling.volcano.sh/v1beta1"})), NOW)
    assert "PodGroup" not in {m["kind"] for m in result.create}
    assert all("schedulerName" not in pod["spec"] for pod in created_pods(result))
    assert condition(result.status, "Admitted") == ("True", "NoPodGroups")


def without_revision(*pods: Pod) -> list[Pod]:
    """Return ``pods`` as an operator without revisions created them, of which some use torch's c10d store."""
    return [replace(pod, revision="") for pod in pods]


def test_pods_of_an_operator_without_revisions_go_on_undisturbed() -> None:
    job = running()
    (store,) = without_revision(rendezvous(job))
    result = plan_with(job, *without_revision(*make_pods()), rendezvous=store, progress=progress())
    assert (result.delete, result.create, result.status.attempt) == ((), (), 1)


@pytest.mark.parametrize(
    "change",
    ["a pod is lost", "a pod is new", "the store is lost", "the store is new", "scaled"],
)
def test_pods_without_a_revision_restart_once_they_need_a_pod(change: str) -> None:
    job = running()
    (store, *pods) = without_revision(rendezvous(job), *make_pods())
    if change == "a pod is lost":
        pods = [replace(pods[0], deleting=True), pods[1]]
    if change == "a pod is new":
        pods = [replace(pods[0], revision=job.spec_revision.name), pods[1]]
    if change == "the store is lost":
        store = replace(store, deleting=True)
    if change == "the store is new":
        store = replace(store, revision=job.spec_revision.name)
    if change == "scaled":
        job = make_job(job.status, nodes={"min": 1, "max": 3})
    result = plan_with(job, *pods, rendezvous=store, progress=progress())
    assert result.status.attempt == 2
    restarts = result.status.restarts
    assert restarts is not None
    assert restarts.gang == 0, "no budget pays for an upgrade"
    assert {pod.name for pod in pods if not pod.deleting} <= set(deleted(result))


def test_a_rendezvous_without_a_revision_is_replaced_if_no_agent_uses_it() -> None:
    job = running()
    (store,) = without_revision(rendezvous(job))
    result = plan_with(job, *make_pods(), rendezvous=store, progress=progress())
    assert (deleted(result), result.status.attempt) == (["job-rendezvous"], 1)
