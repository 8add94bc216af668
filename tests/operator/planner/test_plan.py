"""The planner: creation, admission, starts, suspension, deadlines, changes of the spec, and the end of a job.

Whatever a job's status says, a plan takes no time that it names, and its own status can be written.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from tests.api_server.attacks import FORGED
from tests.operator.jobs import make_job as job_manifest
from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    PENDING,
    causes,
    charged_and_free,
    condition,
    created,
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

from fluxtrain.contract.resource.status import Status, read_status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.planner.observed import CreateFailure, Observed, Pod, name_conflict
from fluxtrain_operator.planner.plan import Plan, load, plan, plan_invalid

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
    assert (status.phase, condition(status, "Training")) == ("Running", ("True", "Training"))
    assert status.progress is not None
    assert status.progress.step == 7


def test_an_unschedulable_job_has_the_schedulers_message() -> None:
    waiting = "Unschedulable: 0/2 nodes are available: 2 Insufficient amd.com/gpu."
    status = plan_with(started(), *make_pods(**PENDING, waiting=waiting)).status
    assert (status.phase, condition(status, "Training")[1]) == ("Pending", "Unschedulable")
    assert "0 of at least 1 nodes are up" in message(status, "Training")
    assert "Insufficient amd.com/gpu" in message(status, "Training")


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


def of_a_lost_revision(*pods: Pod) -> list[Pod]:
    return [replace(pod, revision="job-lost") for pod in pods]


def test_pods_of_a_lost_revision_go_on_undisturbed() -> None:
    job = running()
    (store,) = of_a_lost_revision(rendezvous(job))
    result = plan_with(
        job, *of_a_lost_revision(*make_pods()), rendezvous=store, progress=progress()
    )
    assert (result.delete, result.create, result.status.attempt) == ((), (), 1)


@pytest.mark.parametrize(
    "change",
    ["a pod is lost", "a pod is new", "the store is lost", "the store is new", "scaled"],
)
def test_pods_of_a_lost_revision_restart_once_they_need_a_pod(change: str) -> None:
    job = running()
    (store, *pods) = of_a_lost_revision(rendezvous(job), *make_pods())
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


def test_a_rendezvous_of_a_lost_revision_is_replaced_if_no_agent_uses_it() -> None:
    job = running()
    (store,) = of_a_lost_revision(rendezvous(job))
    result = plan_with(job, *make_pods(), rendezvous=store, progress=progress())
    assert (deleted(result), result.status.attempt) == (["job-rendezvous"], 1)


GONE = "failed to create shim task: open /dev/dri/renderD129: no such file or directory"
NOT_STARTED: dict[str, Any] = {"reason": "StartError", "message": GONE, "started": None}


def init_failed(index: int = 0, code: int = 7, **changes: Any) -> Pod:
    """Return a pod whose init container exited with ``code``."""
    return failed(index, code, **{"init_container": "fetch", "reason": "Error", **changes})


@pytest.mark.parametrize("reason", ["StartError", "ContainerCannotRun"])
def test_a_container_that_starts_on_other_nodes_is_replaced_at_no_charge(reason: str) -> None:
    job = running(restart={"maxRestarts": 0})
    broken = failed(1, 128, **{**NOT_STARTED, "reason": reason})
    soon = plan_with(job, make_pod(0), broken, progress=progress())
    assert (soon.status.phase, deleted(soon)) == ("Running", [])
    result = plan_with(job, make_pod(0), broken, progress=progress(), now=NOW + 10)
    assert (result.status.phase, deleted(result)) == ("Running", ["job-1"])
    assert (charged_and_free(result.status), causes(result.status)) == ((0, 1), {"StartError": 1})
    assert [(f.node, f.reason) for f in result.status.node_faults] == [("node-1", "StartError")]
    assert GONE in next(e.message for e in result.events if e.reason == "StartError")


def test_a_container_that_starts_nowhere_fails_a_new_job() -> None:
    job = started()
    result = plan_with(job, failed(0, 128, **NOT_STARTED), failed(1, 128, **NOT_STARTED))
    assert condition(result.status, "Failed") == ("True", "StartError")
    assert (result.status.exit_code, result.status.node_faults) == (128, [])


def test_a_job_that_has_trained_is_restarted_if_its_only_container_does_not_start() -> None:
    nodes = {"min": 1, "max": 1}
    job, broken = running(1, nodes=nodes), failed(0, 128, **NOT_STARTED)
    result = plan_with(job, broken)
    assert (result.status.phase, result.status.attempt) == ("Restarting", 2)
    assert (charged_and_free(result.status), result.status.node_faults) == ((1, 0), [])
    last = running(1, nodes=nodes, restart={"maxRestarts": 0})
    assert condition(plan_with(last, broken).status, "Failed") == ("True", "RestartsExhausted")


@pytest.mark.parametrize("code", [1, 2, 7, 69, 75, 128])
def test_an_init_container_that_fails_is_charged_and_no_fault_of_its_node(code: int) -> None:
    job = running(restart={"maxRestarts": 1})
    first = plan_with(job, init_failed(1, code), make_pod(0), progress=progress())
    assert (first.status.phase, charged_and_free(first.status)) == ("Running", (1, 0))
    assert causes(first.status) == {"InitContainerFailed": 1}
    assert first.status.node_faults == []
    assert f"job-1: exit code {code}, init container fetch failed" in message(
        first.status, "Healthy"
    )
    again = init_failed(1, code, uid="new", replacement=1)
    second = plan_with(with_status(job, first.status), again, make_pod(0), progress=progress())
    assert condition(second.status, "Failed") == ("True", "RestartsExhausted")


def test_an_init_container_that_is_killed_costs_no_restart() -> None:
    result = plan_with(running(), init_failed(1, 137), make_pod(0), progress=progress())
    assert (charged_and_free(result.status), causes(result.status)) == ((0, 1), {"Killed": 1})
    assert result.status.node_faults == []


def ended(code: int, second: int, reason: str = "Error") -> dict[str, Any]:
    """Return the state of a container that ran for a second."""
    times = {"startedAt": stamp(NOW + second - 1), "finishedAt": stamp(NOW + second)}
    return {"terminated": {"exitCode": code, "reason": reason, "message": "curl: no\n", **times}}


def manifest(phase: str, main: dict[str, Any], *init: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    labels = {names.LABEL_COMPONENT: names.TRAINER}
    status = {
        "phase": phase,
        "initContainerStatuses": [{"name": name, "state": state} for name, state in init],
        "containerStatuses": [{"name": names.TRAINER, "state": main}],
    }
    return {"metadata": {"name": "job-0", "labels": labels}, "status": status}


WAITING = {"waiting": {"reason": "PodInitializing"}}


def test_the_init_container_that_failed_first_is_read() -> None:
    sidecar, fetch = ("proxy", ended(143, 9)), ("fetch", ended(7, 5))
    pod = Pod.from_object(manifest("Failed", WAITING, ("prepare", ended(0, 2)), sidecar, fetch))
    assert (pod.init_container, pod.exit_code, pod.message) == ("fetch", 7, "curl: no\n")
    assert (pod.started, pod.finished, pod.ended) == (NOW + 4, NOW + 5, True)


@pytest.mark.parametrize(
    ("phase", "main", "code"),
    [
        ("Pending", WAITING, None),
        ("Failed", ended(1, 20), 1),
        ("Failed", ended(128, 20, "StartError"), 128),
        ("Running", {"running": {"startedAt": stamp(NOW)}}, None),
    ],
)
def test_the_main_container_counts_once_it_was_started(
    phase: str, main: dict[str, Any], code: int | None
) -> None:
    pod = Pod.from_object(manifest(phase, main, ("proxy", ended(143, 9))))
    assert (pod.init_container, pod.exit_code) == ("", code)


@pytest.mark.parametrize("code", [132, 135, 139])
def test_a_pod_that_the_hardware_ends_is_replaced_and_charged(code: int) -> None:
    result = plan_with(running(), failed(1, code), make_pod(0), progress=progress())
    assert (result.status.phase, deleted(result)) == ("Running", ["job-1"])
    assert charged_and_free(result.status) == (1, 0)


LIMIT = 3600
TWO: dict[str, Any] = {"nodes": {"min": 2, "max": 2}}
QUEUED: dict[str, Any] = {**TWO, "scheduling": {"queueName": "team"}}
MEMBER: dict[str, Any] = {"finalizers": (names.KUEUE_FINALIZER,)}
GATE: dict[str, Any] = {"gated": True, "gates": (names.KUEUE_GATE,)}
GATED: dict[str, Any] = {**PENDING, **MEMBER, **GATE, "node": ""}


class Story:
    """A job and the plans of it, one after the other; times are seconds after NOW."""

    def __init__(self, spec: dict[str, Any], **lifecycle: Any) -> None:
        self.spec, self.lifecycle = spec, lifecycle
        self.job: Job = make_job(**spec, lifecycle=lifecycle)
        self.plan(0)

    def plan(self, at: float, *pods: Pod, **observed: Any) -> Plan:
        """Plan with ``pods`` of the present attempt, and keep the status."""
        result = plan_with(self.job, *pods, now=NOW + at, **observed)
        self.job = with_status(self.job, result.status)
        return result

    def pods(self, count: int = 2, **changes: Any) -> list[Pod]:
        """Return pods of the present attempt."""
        return make_pods(count, self.job, attempt=self.job.status.attempt, **changes)

    def suspend(self, suspend: bool) -> None:
        """Suspend or resume the job."""
        lifecycle = {**self.lifecycle, "suspend": suspend}
        self.job = make_job(self.job.status, **self.spec, lifecycle=lifecycle)

    @property
    def active_since(self) -> float | None:
        """Return the status's time after NOW."""
        time = seconds(self.job.status.active_since)
        return None if time is None else time - NOW

    @property
    def failure(self) -> str:
        """Return why the job has failed; empty if it has not."""
        value, reason = condition(self.job.status, "Failed")
        return reason if value == "True" else ""


def quota(at: float, *indices: int) -> dict[str, Any]:
    """Return the failures to create the pods at ``indices``."""
    failures = (
        CreateFailure("Pod", f"job-{index}", "QuotaExceeded", "exceeded quota", NOW + at + 5)
        for index in indices
    )
    return {"create_failures": tuple(failures)}


def test_a_job_that_exceeds_its_active_deadline_fails() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    assert story.active_since is None
    before = story.plan(10, *story.pods(), progress=progress(-10))
    assert (story.active_since, story.job.status.start_time) == (10, stamp(NOW + 10))
    before = story.plan(LIMIT + 9, *story.pods(), progress=progress(-LIMIT - 9))
    assert (before.requeue_after, story.failure) == (1.0, "")
    story.plan(LIMIT + 10, *story.pods(), progress=progress(-LIMIT - 10))
    assert story.failure == "DeadlineExceeded"


@pytest.mark.parametrize("at", [20, 1800, LIMIT])
def test_a_moment_without_admission_does_not_begin_the_active_time_anew(at: float) -> None:
    """A quota that refuses one replacement for ten seconds."""
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(), progress=progress(-10))
    left = make_pod(0, story.job)
    story.plan(at, left, **quota(at, 1))
    assert condition(story.job.status, "Admitted") == ("False", "QuotaExceeded")
    assert story.active_since == 10
    story.plan(at + 5, *story.pods(), progress=progress(-at - 5))
    assert condition(story.job.status, "Admitted")[0] == "True"
    story.plan(LIMIT + 10, *story.pods(), progress=progress(-LIMIT - 10))
    assert story.failure == "DeadlineExceeded"


def test_the_deadline_passes_while_the_job_is_not_admitted_too() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods())
    story.plan(20, make_pod(0, story.job), **quota(20, 1))
    story.plan(LIMIT + 10, make_pod(0, story.job), **quota(LIMIT + 10, 1))
    assert story.failure == "DeadlineExceeded"


def test_the_wait_for_the_first_pods_does_not_count() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT, pendingDeadlineSeconds=LIMIT)
    for at in (10, LIMIT, 3 * LIMIT):
        story.plan(at, **quota(at, 0, 1))
        assert (story.active_since, story.failure) == (None, "")
    story.plan(4 * LIMIT, *story.pods())
    assert story.active_since == 4 * LIMIT


def test_the_active_time_begins_anew_when_the_job_is_resumed() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods())
    story.suspend(True)
    story.plan(1000, *story.pods())
    assert story.active_since is None
    story.plan(5000)
    assert (condition(story.job.status, "Suspended")[0], story.failure) == ("True", "")
    story.suspend(False)
    story.plan(9000)
    story.plan(9010, *story.pods())
    assert story.active_since is not None
    assert 9000 <= story.active_since <= 9010
    story.plan(9000 + LIMIT - 1, *story.pods())
    assert story.failure == ""
    story.plan(9010 + LIMIT, *story.pods())
    assert story.failure == "DeadlineExceeded"


def test_time_in_kueues_queue_does_not_count_and_a_new_group_begins_anew() -> None:
    story = Story(QUEUED, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(**GATED))
    story.plan(2 * LIMIT, *story.pods(**GATED))
    assert (story.active_since, story.failure) == (None, "")
    story.plan(2 * LIMIT + 10, *story.pods(**MEMBER))
    assert story.active_since == 2 * LIMIT + 10
    evicted = {"deleting": True, "deletion_deadline": NOW + 3 * LIMIT, **MEMBER}
    story.plan(2 * LIMIT + 20, *story.pods(**evicted))
    story.plan(2 * LIMIT + 30)
    story.plan(2 * LIMIT + 40, *story.pods(**GATED))
    assert (story.job.status.attempt, story.active_since) == (2, None)
    story.plan(4 * LIMIT, *story.pods(**GATED))
    assert story.failure == ""
    story.plan(4 * LIMIT + 10, *story.pods(**MEMBER))
    assert story.active_since == 4 * LIMIT + 10


def test_a_replacement_at_the_gate_of_a_running_group_does_not_begin_anew() -> None:
    story = Story(QUEUED, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(**MEMBER))
    story.plan(20, make_pod(0, story.job, **MEMBER), make_pod(1, story.job, **GATED))
    assert condition(story.job.status, "Admitted") == ("False", "SchedulingGated")
    assert story.active_since == 10


def test_gates_of_others_do_not_begin_the_active_time_anew() -> None:
    story = Story({"nodes": {"min": 1, "max": 1}}, activeDeadlineSeconds=LIMIT)
    theirs = {**GATED, "gates": ("example.com/wait",)}
    story.plan(10, *story.pods(1, **theirs))
    assert story.active_since is None
    story.plan(20, *story.pods(1))
    story.plan(30, *story.pods(1, **theirs))
    assert story.active_since == 20


def test_a_restart_after_an_error_of_the_program_does_not_begin_anew() -> None:
    story = Story(TWO, activeDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods())
    end = {"phase": "Failed", "exit_code": 1, "finished": NOW + 100, "ready": False}
    story.plan(120, *story.pods(**end))
    assert (story.job.status.attempt, story.active_since) == (2, 10)
    story.plan(130)
    story.plan(140, *story.pods())
    assert story.active_since == 10


@pytest.mark.parametrize("kind", ["activeDeadlineSeconds", "pendingDeadlineSeconds"])
def test_a_deadline_is_met_if_nothing_happens_after_the_job_became_active(kind: str) -> None:
    story = Story(TWO, **{kind: 5})
    waits = story.plan(1, *story.pods(**PENDING, node="")).requeue_after
    assert (story.active_since, waits) == (1, 5)
    assert story.plan(6, *story.pods(**PENDING, node="")).status.phase == "Failed"


def test_a_moment_without_admission_does_not_begin_the_pending_deadline_anew() -> None:
    story = Story(TWO, pendingDeadlineSeconds=LIMIT)
    story.plan(10, *story.pods(**PENDING))
    for at in range(100, LIMIT, 100):
        story.plan(at, make_pod(0, story.job, **PENDING), **quota(at, 1))
        assert condition(story.job.status, "Admitted") == ("False", "QuotaExceeded")
        story.plan(at + 10, *story.pods(**PENDING))
    assert (story.active_since, story.failure) == (10, "")
    story.plan(LIMIT + 10, *story.pods(**PENDING))
    assert story.failure == "PendingDeadlineExceeded"


@pytest.mark.parametrize(
    ("name", "waits"),
    [("another's", [5, 10, 20, 40, 60, 60]), ("being deleted", [2, 4, 8, 10, 10, 10])],
)
def test_what_waits_for_a_name_is_tried_less_and_less_often(name: str, waits: list[int]) -> None:
    taken: dict[str, Any] = {"metadata": {"name": "job-0"}}
    if name == "being deleted":
        taken["metadata"]["deletionTimestamp"] = stamp(NOW)
    failure, times = None, []
    for _ in waits:
        failure = name_conflict("Pod", taken, "job").with_backoff(failure, NOW)
        times.append(failure.retry_time - NOW)
    assert times == waits


UNPULLED = "rpc error: code = NotFound desc = trainer:2: not found"
STORE_WAITS: dict[str, tuple[dict[str, Any], str]] = {
    "ImagePullBackOff": ({"waiting": f"ImagePullBackOff: {UNPULLED}"}, UNPULLED),
    "ErrImagePull": ({"waiting": f"ErrImagePull: {UNPULLED}"}, UNPULLED),
    "InvalidImageName": ({"waiting": "InvalidImageName"}, "InvalidImageName"),
    "Unschedulable": ({"waiting": "Unschedulable: 0/8 nodes", "node": ""}, "0/8 nodes"),
    "CreateContainerConfigError": (
        {"waiting": 'CreateContainerConfigError: secret "s" not found'},
        'secret "s" not found',
    ),
    "CrashLoopBackOff": (
        {"waiting": "CrashLoopBackOff: back-off 40s", "phase": "Running"},
        "back-off 40s",
    ),
    "ProgramError": (
        {"phase": "Running", "exit_code": 1, "started": NOW, "finished": NOW + 5},
        "exit code 1",
    ),
}
"""States of a rendezvous pod that cannot start, by reason, with a part of the message."""


@pytest.mark.parametrize("reason", STORE_WAITS)
@pytest.mark.parametrize("before", ["never", "once"])
def test_a_rendezvous_pod_that_cannot_start_is_told_and_meets_the_pending_deadline(
    reason: str, before: str
) -> None:
    changes, text = STORE_WAITS[reason]
    story = Story(TWO, pendingDeadlineSeconds=LIMIT)
    if before == "once":  # it ran, but no trainer has answered
        story.plan(5, *story.pods())
        assert story.job.status.phase == "Starting"
    store = rendezvous(story.job, **{**PENDING, **changes})
    story.plan(10, *story.pods(), rendezvous=store)
    status = story.job.status
    assert status.phase == "Pending"
    assert condition(status, "Training")[0] == "False"
    assert condition(status, "Healthy") == ("False", reason)
    assert text in message(status, "Healthy")
    if store.waiting:
        assert condition(status, "Training")[1] == reason
        assert message(status, "Training").startswith(
            "2 of at least 2 nodes are up; job-rendezvous: "
        )
    start = story.active_since
    assert start is not None
    waits = story.plan(start + LIMIT - 9, *story.pods(), rendezvous=store).requeue_after
    assert story.failure == ""
    assert waits is not None
    assert waits <= 9
    story.plan(start + LIMIT, *story.pods(), rendezvous=store)
    assert story.failure == "PendingDeadlineExceeded"
    assert text in message(story.job.status, "Failed")


def test_a_rendezvous_pod_that_is_created_is_no_problem_but_no_start_either() -> None:
    story = Story(TWO, pendingDeadlineSeconds=LIMIT)
    store = rendezvous(story.job, **PENDING, waiting="ContainerCreating", created=NOW)
    story.plan(10, *story.pods(), rendezvous=store)
    status = story.job.status
    assert (status.phase, condition(status, "Healthy")) == ("Pending", ("True", "AsExpected"))
    assert condition(status, "Training") == ("False", "ContainerCreating")
    story.plan(20, *story.pods())
    assert condition(story.job.status, "Training") == ("False", "Starting")
    store = replace(store, created=NOW + LIMIT)
    for at in (LIMIT + 10, LIMIT + 20):  # it is replaced while trainers start
        story.plan(at, *story.pods(), rendezvous=store)
        assert (story.job.status.phase, story.failure) == ("Starting", "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"waiting": "ContainerCreating"}, "ContainerCreating"),
        ({"waiting": "PodInitializing"}, "PodInitializing"),
        ({}, "NoReport"),
        ({"node": ""}, "NotScheduled"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rendezvous_pod_that_does_not_start_for_minutes_is_a_problem(
    changes: dict[str, Any], reason: str
) -> None:
    story = Story(TWO)
    store = rendezvous(story.job, **{**PENDING, "created": NOW, **changes})
    result = story.plan(290, *story.pods(), rendezvous=store)
    assert condition(story.job.status, "Healthy") == ("True", "AsExpected")
    assert result.requeue_after == 10
    story.plan(300, *story.pods(), rendezvous=store)
    assert condition(story.job.status, "Healthy") == ("False", reason)
    assert message(story.job.status, "Healthy") == "job-rendezvous: has not started for 5m"
    story.plan(310, *story.pods())
    assert condition(story.job.status, "Healthy") == ("True", "AsExpected")


def test_a_supporting_object_that_vanishes_each_time_makes_no_loop_of_a_conflict() -> None:
    job = make_job()
    foreign = {"metadata": {"name": "job-0", "namespace": "team"}}
    for missing in observe(job).applied:
        applied = {name: digest for name, digest in observe(job).applied.items() if name != missing}
        conflict = name_conflict("Pod", foreign, "job")
        result = plan_with(job, applied=applied, create_failures=(conflict,))
        assert missing in [(m["kind"], m["metadata"]["name"]) for m in result.create]
        assert condition(result.status, "Admitted")[0] == "True", "not told before it was tried"
        assert result.requeue_after == 0.5


def test_a_refused_rendezvous_pod_counts_in_phase_and_deadline() -> None:
    story = Story(TWO, pendingDeadlineSeconds=LIMIT)
    for at in (10, LIMIT):
        refused = CreateFailure("Pod", "job-rendezvous", "QuotaExceeded", "no", NOW + at + 5)
        story.plan(at, *story.pods(), rendezvous=None, create_failures=(refused,))
        assert story.job.status.phase == "Pending"
        assert condition(story.job.status, "Training") == ("False", "QuotaExceeded")
    story.plan(LIMIT + 10, *story.pods(), rendezvous=None, create_failures=(refused,))
    assert story.failure == "PendingDeadlineExceeded"


def test_a_job_that_trains_is_ready_while_its_rendezvous_pod_cannot_start() -> None:
    story = Story(TWO, pendingDeadlineSeconds=LIMIT)
    store = rendezvous(story.job, **PENDING, waiting=f"ImagePullBackOff: {UNPULLED}")
    for at in (10, LIMIT + 10):
        story.plan(at, *story.pods(), rendezvous=store, progress=progress(-at))
        assert (story.job.status.phase, story.failure) == ("Running", "")
        assert condition(story.job.status, "Training") == ("True", "Training")
        assert condition(story.job.status, "Healthy") == ("False", "ImagePullBackOff")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", FORGED)
def test_a_forged_status_stops_no_plan_and_is_written_again(what: str) -> None:
    job = load({**job_manifest(), "status": FORGED[what]}, "trainer:1")
    done = plan(job, Observed.from_objects([], applied={}), time.time())
    written = done.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert Status.model_validate(written) == read_status(written)
    names = {manifest["metadata"]["name"] for manifest in done.create}
    assert all(name == "job" or name.startswith("job-") for name in names)
    assert not done.delete, "it has no pods, whatever it says"


def test_restarts_that_are_counted_ahead_are_counted_once() -> None:
    status = {"phase": "Running", "attempt": 1, "restarts": {"process": 2**31 - 1, "charged": 0}}
    job = load({**job_manifest(), "status": status}, "trainer:1")
    restarts = plan(job, Observed.from_objects([], applied={}), time.time()).status.restarts
    assert restarts is not None
    assert all(0 <= count < 2**31 for count in restarts.causes.values())
