"""The planner: one table row or test for each rule of a job's life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fluxtrain.contract.resource.status import ProgressStatus, Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.job import Job
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import Plan, load, plan, refuse
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.timestamps import stamp

NOW = 1_800_000_000.0
LONG_AGO = NOW - 7200


def make_job(status: Status | None = None, **spec: Any) -> Job:
    manifest = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "job", "namespace": "team", "uid": "uid", "generation": 1},
        "spec": {"run": {"preset": "micro"}, "nodes": {"min": 1, "max": 2}, **spec},
    }
    job = load(manifest, "trainer:1")
    return replace(job, training=job.training.model_copy(update={"status": status}))


def make_pod(index: int = 0, job: Job | None = None, **changes: Any) -> Pod:
    job = job or make_job()
    pod = Pod(
        name=f"job-{index}",
        uid=f"pod-{index}",
        index=index,
        spec_hash=job.spec_hash,
        nodes=(job.spec.nodes.min, job.spec.nodes.max),
        phase="Running",
        ready=True,
        node=f"node-{index}",
        created=LONG_AGO,
        started=LONG_AGO,
    )
    return replace(pod, **changes)


def failed(index: int = 0, code: int | None = 1, **changes: Any) -> Pod:
    ended: dict[str, Any] = {
        "phase": "Failed",
        "exit_code": code,
        "finished": NOW - 1,
        "ready": False,
    }
    return make_pod(index, **{**ended, **changes})


def store(**changes: Any) -> Pod:
    return make_pod(0, **{"name": "job-rendezvous", "uid": "store", "node": "node-s", **changes})


def progress(seconds_ago: float = 1.0, **changes: Any) -> Progress:
    status = ProgressStatus(
        step=7, samples=56, samplesPerSecond=8.0, lastStepTime=stamp(NOW - seconds_ago)
    )
    return Progress(status, **changes)


def observe(*pods: Pod, job: Job | None = None, **others: Any) -> Observed:
    """Return a picture in which the objects around the pods are all in place."""
    wanted = plan(job or make_job(), Observed(), NOW).create
    applied = {
        (m["kind"], m["metadata"]["name"]): m["metadata"]["annotations"][
            "fluxtrain.dev/applied-hash"
        ]
        for m in wanted
        if m["kind"] != "Pod"
    }
    rendezvous = store(spec_hash=(job or make_job()).spec_hash)
    facts = {"pods": pods, "rendezvous": rendezvous, "applied": applied, **others}
    return Observed(**{"witness": others.get("progress"), **facts})


def running(pods: int = 2, **spec: Any) -> Job:
    """Return a job that trains, with the status that the planner itself gave it."""
    job = make_job(**spec)
    started = plan(job, Observed(), LONG_AGO).status
    job = with_status(job, started)
    picture = observe(*(make_pod(i, job) for i in range(pods)), job=job, progress=progress())
    return with_status(job, plan(job, picture, NOW).status)


def with_status(job: Job, status: Status) -> Job:
    return replace(job, training=job.training.model_copy(update={"status": status}))


def created(result: Plan) -> list[str]:
    return [m["metadata"]["name"] for m in result.create if m["kind"] == "Pod"]


def deleted(result: Plan) -> list[str]:
    return [delete.name for delete in result.delete]


def says(status: Status, kind: str) -> tuple[str, str]:
    """Return status and reason of one condition."""
    return next((c.status, c.reason) for c in status.conditions if c.type == kind)


def test_a_new_job_gets_its_objects_in_order_and_pods_for_the_maximum() -> None:
    result = plan(make_job(), Observed(), NOW)
    kinds = [m["kind"] for m in result.create]
    assert kinds == ["ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", *["Pod"] * 3]
    assert created(result) == ["job-rendezvous", "job-0", "job-1"]
    assert (result.status.phase, result.status.attempt) == ("Pending", 1)
    assert result.status.nodes is not None
    assert (result.status.nodes.ready, result.status.nodes.desired) == (0, 2)


def test_a_job_runs_once_progress_arrives() -> None:
    job = with_status(make_job(), plan(make_job(), Observed(), LONG_AGO).status)
    silent = plan(job, observe(make_pod(0), make_pod(1)), LONG_AGO + 60)
    assert silent.status.phase == "Starting"
    told = plan(job, observe(make_pod(0), make_pod(1), progress=progress()), NOW)
    assert (told.status.phase, says(told.status, "Ready")) == ("Running", ("True", "Training"))
    assert told.status.progress is not None
    assert told.status.progress.step == 7


def test_a_job_without_room_says_what_the_scheduler_says() -> None:
    job = with_status(make_job(), plan(make_job(), Observed(), NOW).status)
    words = "Unschedulable: 0/2 nodes are available: 2 Insufficient amd.com/gpu."
    pods = [
        make_pod(i, phase="Pending", started=None, ready=False, waiting=words) for i in range(2)
    ]
    status = plan(job, observe(*pods), NOW).status
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert (status.phase, ready.reason) == ("Pending", "Unschedulable")
    assert "0 of at least 1 nodes are up" in ready.message
    assert "Insufficient amd.com/gpu" in ready.message


def test_pods_at_a_scheduling_gate_are_not_admitted_yet() -> None:
    pods = [make_pod(i, phase="Pending", started=None, gated=True) for i in range(2)]
    job = with_status(make_job(), plan(make_job(), Observed(), NOW).status)
    assert says(plan(job, observe(*pods), NOW).status, "Admitted") == ("False", "SchedulingGated")
    named = [replace(pod, gates=("example.org/b", names.KUEUE_GATE)) for pod in pods]
    (said,) = (
        c.message for c in plan(job, observe(*named), NOW).status.conditions if c.type == "Admitted"
    )
    assert said == "2 pods wait at a scheduling gate: example.org/b, kueue.x-k8s.io/admission"


@pytest.mark.parametrize(
    ("name", "pod"),
    [
        ("evicted", {"code": None, "reason": "Evicted"}),
        ("preempted", {"code": 143, "disrupted": True}),
        ("stopped with a checkpoint", {"code": 75}),
        ("killed from outside", {"code": 137}),
        ("rejected by kubelet", {"code": None, "reason": "UnexpectedAdmissionError"}),
        ("disrupted while it failed", {"code": 1, "disrupted": True}),
    ],
)
def test_the_infrastructures_faults_are_free(name: str, pod: dict[str, Any]) -> None:
    job = running(restart={"maxRestarts": 0})
    first = plan(job, observe(failed(0, **pod), make_pod(1), progress=progress()), NOW)
    assert deleted(first) == ["job-0"]
    assert first.status.restarts == job.status.restarts
    second = plan(with_status(job, first.status), observe(make_pod(1), progress=progress()), NOW)
    assert created(second) == ["job-0"]
    (pod_made,) = [m for m in second.create if m["kind"] == "Pod"]
    assert pod_made["metadata"]["annotations"]["fluxtrain.dev/replacement"] == "1"
    assert second.status.phase == "Running", "the other node goes on"


def test_a_pod_that_somebody_deletes_is_replaced_when_its_name_is_free() -> None:
    job = running()
    going = make_pod(1, deleting=True, deletion_deadline=NOW + 100)
    assert created(plan(job, observe(make_pod(0), going, progress=progress()), NOW)) == []
    assert created(plan(job, observe(make_pod(0), progress=progress()), NOW)) == ["job-1"]


def test_the_count_of_replaced_pods_is_in_the_pods() -> None:
    job = running()
    pods = make_pod(0), make_pod(1, replacement=3)
    status = plan(job, observe(*pods, progress=progress()), NOW).status
    assert status.restarts is not None
    assert status.restarts.pod == 3


@pytest.mark.parametrize("code", [1, 74])
def test_a_programs_own_error_restarts_the_gang_and_counts(code: int) -> None:
    job = running()
    result = plan(job, observe(failed(0, code, message="boom\n"), make_pod(1)), NOW)
    assert sorted(deleted(result)) == ["job-0", "job-1"]
    assert created(result) == [], "the names are not free yet"
    restarts = result.status.restarts
    assert restarts is not None
    assert (result.status.attempt, restarts.gang, restarts.pod) == (2, 1, 0)
    assert (result.status.phase, result.status.last_error) == ("Restarting", "boom")
    again = plan(with_status(job, result.status), observe(failed(0, code), make_pod(1)), NOW)
    assert again.status.restarts == result.status.restarts, "an old picture counts nothing twice"
    free = plan(with_status(job, result.status), observe(), NOW)
    pods = [m for m in free.create if m["kind"] == "Pod"]
    assert {m["metadata"]["labels"]["fluxtrain.dev/attempt"] for m in pods} == {"2"}
    assert {m["metadata"]["annotations"]["fluxtrain.dev/replacement"] for m in pods} == {"0"}


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (2, "", "InvalidJob"),
        (3, "", "Diverged"),
        (137, "OOMKilled", "OOMKilled"),
        (127, "", "ProgramError"),
    ],
)
def test_an_exit_code_that_no_restart_cures_fails_the_job(
    code: int, reason: str, expected: str
) -> None:
    pod = failed(0, code, reason=reason, message="a line\nfluxtrain: the last line\n\n")
    result = plan(running(), observe(pod, make_pod(1)), NOW)
    assert (result.status.phase, says(result.status, "Failed")) == ("Failed", ("True", expected))
    assert (result.status.exit_code, result.status.last_error) == (code, "fluxtrain: the last line")
    assert deleted(result) == ["job-1"], "the failed pod keeps its log"
    assert [event.type for event in result.events] == ["Warning"]


def test_a_job_fails_when_its_restarts_are_used_up() -> None:
    job = running(restart={"maxRestarts": 1})
    first = plan(job, observe(failed(0), make_pod(1)), NOW)
    job = with_status(job, first.status)
    second = plan(job, observe(failed(0, attempt=2), make_pod(1, attempt=2)), NOW)
    assert says(second.status, "Failed") == ("True", "RestartsExhausted")
    assert (second.status.attempt, second.status.exit_code) == (2, 1)


def test_a_pod_that_dies_young_again_waits_before_the_next_restart() -> None:
    job = running()
    job = with_status(job, plan(job, observe(failed(0), make_pod(1)), NOW).status)
    young = failed(0, attempt=2, started=NOW - 3)
    result = plan(job, observe(young, make_pod(1, attempt=2)), NOW)
    assert (result.delete, result.create, result.status.attempt) == ((), (), 2)
    assert result.requeue_after == pytest.approx(9.0)
    later = plan(job, observe(young, make_pod(1, attempt=2)), NOW + 10)
    assert later.status.attempt == 3


def test_a_job_is_complete_when_every_pod_ended_well() -> None:
    done = [
        make_pod(i, phase="Succeeded", exit_code=0, finished=NOW, ready=False) for i in range(2)
    ]
    result = plan(running(), observe(*done), NOW)
    assert (result.status.phase, says(result.status, "Complete")) == (
        "Complete",
        ("True", "Succeeded"),
    )
    assert (deleted(result), result.status.exit_code) == (["job-rendezvous"], 0)


def test_a_job_waits_for_its_last_pods_but_not_for_ever() -> None:
    done = make_pod(0, phase="Succeeded", exit_code=0, finished=NOW)
    picture = observe(done, make_pod(1))
    soon = plan(running(), picture, NOW + 1)
    assert (soon.status.phase, soon.delete, soon.create) == ("Running", (), ())
    assert soon.requeue_after == pytest.approx(29.0)
    assert plan(running(), picture, NOW + 30).status.phase == "Complete"


def test_a_lost_pod_is_not_replaced_once_another_ended_well() -> None:
    done = make_pod(0, phase="Succeeded", exit_code=0, finished=NOW)
    result = plan(running(), observe(done), NOW)
    assert (result.status.phase, created(result)) == ("Complete", [])


def test_a_pod_that_is_sent_away_does_not_complete_the_job() -> None:
    drained = make_pod(1, phase="Succeeded", exit_code=0, finished=NOW, deleting=True)
    assert plan(running(), observe(drained), NOW).status.phase == "Restarting"


def test_a_failure_beside_a_success_is_not_completion() -> None:
    done = make_pod(0, phase="Succeeded", exit_code=0, finished=NOW)
    assert plan(running(), observe(done, failed(1, 74)), NOW).status.attempt == 2


@pytest.mark.parametrize(
    ("clean", "gone"),
    [("None", []), ("Running", ["job-1"]), ("All", ["job-0", "job-1"])],
)
def test_clean_pods_says_which_pods_a_finished_job_keeps(clean: str, gone: list[str]) -> None:
    job = running(lifecycle={"cleanPods": clean})
    picture = observe(failed(0, 3), make_pod(1))
    job = with_status(job, plan(job, picture, NOW).status)
    assert [name for name in deleted(plan(job, picture, NOW)) if name != "job-rendezvous"] == gone


def test_a_pod_whose_phase_lags_behind_its_exit_code_keeps_its_log() -> None:
    """Kubelet tells of the exit code first, and of the phase a moment later, unless a sidecar goes on."""
    job = running()
    ended = make_pod(0, exit_code=0, ready=False, finished=NOW - 1)
    first = plan(job, observe(ended), NOW)
    assert (first.status.phase, deleted(first)) == ("Complete", ["job-rendezvous"])
    assert first.requeue_after == pytest.approx(29.0)
    job = with_status(job, first.status)
    later = plan(job, observe(ended, rendezvous=None), NOW + 10)
    assert (deleted(later), later.requeue_after) == ([], pytest.approx(19.0))
    assert deleted(plan(job, observe(ended, rendezvous=None), NOW + 30)) == ["job-0"]
    over = replace(ended, phase="Succeeded")
    quiet = plan(job, observe(over, rendezvous=None), NOW + 60)
    assert (deleted(quiet), quiet.requeue_after) == ([], None)


def test_a_finished_job_is_never_started_again() -> None:
    job = running()
    job = with_status(job, plan(job, observe(failed(0, 3)), NOW).status)
    for picture in (Observed(), observe(), observe(make_pod(0))):
        assert plan(job, picture, NOW).create == ()


def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    job = running(lifecycle={"ttlSecondsAfterFinished": 60, "cleanPods": "All"})
    job = with_status(job, plan(job, observe(failed(0, 3)), NOW).status)
    quiet = observe(rendezvous=None)
    assert plan(job, quiet, NOW + 10).requeue_after == pytest.approx(50.0)
    (delete,) = plan(job, quiet, NOW + 60).delete
    assert (delete.kind, delete.name, delete.uid) == ("FluxTraining", "job", "uid")


def test_replicas_that_fit_no_size_of_the_job_are_refused_before_there_are_pods() -> None:
    run = {"preset": "micro", "parallel": {"dp_replicate": 2}}
    assert make_job(run=run, nodes={"min": 2, "max": 3})
    assert make_job(run=run, nodes={"min": 3, "max": 3}, gpusPerNode=8)
    with pytest.raises(ConfigError, match=r"got 2; must divide the number of ranks, 3$"):
        make_job(run=run, nodes={"min": 3, "max": 3})
    with pytest.raises(ConfigError, match=r"got 7; must divide the number of ranks, 4 to 6"):
        make_job(
            run={"preset": "micro", "parallel": {"dp_replicate": 7}}, nodes={"min": 4, "max": 6}
        )


def test_a_job_that_is_refused_is_deleted_after_its_time_to_live_too() -> None:
    error = ConfigError("spec.run.model.hidden_size", 32, "must be a multiple of num_heads")
    manifest = {
        "metadata": {"name": "job", "uid": "uid", "generation": 1},
        "spec": {"lifecycle": {"ttlSecondsAfterFinished": 60}},
    }
    first = refuse(manifest, error, NOW)
    assert (first.status.phase, first.delete, first.requeue_after) == ("Failed", (), 60.0)
    manifest["status"] = first.status.model_dump(mode="json", by_alias=True)
    later = refuse(manifest, error, NOW + 10)
    assert (later.status, later.delete) == (first.status, ())
    assert later.requeue_after == pytest.approx(50.0)
    (delete,) = refuse(manifest, error, NOW + 60).delete
    assert (delete.kind, delete.name, delete.uid) == ("FluxTraining", "job", "uid")


@pytest.mark.parametrize("lifecycle", [{}, None, {"ttlSecondsAfterFinished": None}, "soon"])
def test_a_refused_job_without_a_time_to_live_stays(lifecycle: object) -> None:
    error = ConfigError("spec.lifecycle", lifecycle, "must be a mapping")
    manifest = {"metadata": {"name": "job", "uid": "uid"}, "spec": {"lifecycle": lifecycle}}
    result = refuse(manifest, error, NOW)
    assert (result.delete, result.requeue_after) == ((), None)


def test_a_job_that_trains_and_is_then_refused_does_not_expire() -> None:
    status = running().status.model_dump(mode="json", by_alias=True)
    life = {"ttlSecondsAfterFinished": 0}
    manifest = {"metadata": {"name": "job", "uid": "uid"}, "spec": {"lifecycle": life}}
    result = refuse({**manifest, "status": status}, ConfigError("spec", 1, "no"), NOW)
    assert (result.status.phase, result.delete, result.requeue_after) == ("Running", (), None)


def test_a_suspended_job_stops_gracefully_and_goes_on_in_a_new_attempt() -> None:
    job = make_job(running().status, lifecycle={"suspend": True})
    stopping = plan(job, observe(make_pod(0), make_pod(1), progress=progress()), NOW)
    assert deleted(stopping) == ["job-0", "job-1"], "the store stays while checkpoints are written"
    assert {delete.grace_seconds for delete in stopping.delete} == {None}
    assert (stopping.status.phase, says(stopping.status, "Suspended")) == (
        "Suspended",
        ("False", "Stopping"),
    )
    job = with_status(job, stopping.status)
    gone = plan(job, observe(), NOW + 5)
    assert deleted(gone) == ["job-rendezvous"]
    assert says(gone.status, "Suspended") == ("True", "Suspended")
    awake = with_status(make_job(), gone.status)
    resumed = plan(awake, observe(rendezvous=None), NOW + 60)
    assert (resumed.status.attempt, created(resumed)) == (2, ["job-rendezvous", "job-0", "job-1"])
    assert resumed.status.restarts == job.status.restarts
    assert resumed.status.progress == job.status.progress, "nothing is lost"


def test_a_job_that_is_created_suspended_waits() -> None:
    result = plan(make_job(lifecycle={"suspend": True}), Observed(), NOW)
    assert (result.create, result.status.phase, result.status.attempt) == ((), "Suspended", 0)
    awake = with_status(make_job(), result.status)
    assert plan(awake, Observed(), NOW).status.attempt == 1


def test_a_job_waits_for_those_that_it_starts_after() -> None:
    job = make_job(lifecycle={"startAfter": ["encode", "other"]})
    waiting = plan(job, Observed(jobs_before={"encode": "Running", "other": "Complete"}), NOW)
    assert (waiting.create, says(waiting.status, "Admitted")) == ((), ("False", "WaitingForJobs"))
    job = with_status(job, waiting.status)
    ready = plan(job, Observed(jobs_before={"encode": "Complete", "other": "Complete"}), NOW)
    assert "job-0" in created(ready)
    begun = with_status(job, ready.status)
    assert plan(begun, Observed(jobs_before={}), NOW).create, "what has begun waits for nobody"


@pytest.mark.parametrize(
    ("before", "reason", "message"),
    [
        ({"encode": "Running"}, "WaitingForJobs", "encode is Running"),
        ({"encode": ""}, "WaitingForJobs", "encode is new"),
        ({}, "WaitingForJobs", "encode does not exist"),
        ({"encode": "Failed"}, "WaitingForFailedJobs", "encode is Failed"),
    ],
)
def test_a_job_that_waits_says_for_whom_and_how_they_are(
    before: dict[str, str], reason: str, message: str
) -> None:
    job = make_job(lifecycle={"startAfter": ["encode"]})
    status = plan(job, Observed(jobs_before=before), NOW).status
    admitted = next(c for c in status.conditions if c.type == "Admitted")
    assert (admitted.reason, status.phase) == (reason, "Pending")
    assert message in admitted.message
    assert ("take it out of spec.lifecycle.startAfter" in admitted.message) == (
        before == {"encode": "Failed"}
    )


def test_a_job_that_is_active_for_too_long_fails() -> None:
    job = running(lifecycle={"activeDeadlineSeconds": 7300})
    picture = observe(make_pod(0), make_pod(1), progress=progress(0))
    assert plan(job, picture, NOW).requeue_after == pytest.approx(61, abs=40)
    late = plan(job, picture, LONG_AGO + 7300)
    assert says(late.status, "Failed") == ("True", "DeadlineExceeded")


@pytest.mark.parametrize("manager", ["kueue.x-k8s.io/multikueue", "somebody"])
def test_a_job_that_somebody_else_manages_is_left_alone(manager: str) -> None:
    job = make_job(managedBy=manager)
    assert plan(job, observe(make_pod(0)), NOW) == Plan(Status())


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    assert plan(replace(make_job(), deleting=True), Observed(), NOW) == Plan(Status())


def test_a_smaller_job_gives_up_its_highest_indices() -> None:
    job = running(3, nodes={"min": 1, "max": 3})
    pods = [make_pod(i, job) for i in range(3)]
    smaller = make_job(job.status, nodes={"min": 1, "max": 2})
    result = plan(smaller, observe(*pods, job=smaller, progress=progress()), NOW)
    assert (deleted(result), created(result), result.status.attempt) == (["job-2"], [], 1)


def test_a_larger_job_starts_agents_that_know_its_size() -> None:
    # Agents with different maxima never agree on a complete rendezvous.
    job = running()
    larger = make_job(job.status, nodes={"min": 1, "max": 3})
    result = plan(larger, observe(make_pod(0), make_pod(1), job=larger, progress=progress()), NOW)
    assert (result.status.attempt, sorted(deleted(result))) == (2, ["job-0", "job-1"])
    assert created(result) == ["job-2"]
    assert result.status.restarts == job.status.restarts, "that is no failure"


def test_a_changed_spec_reaches_all_pods_together_and_an_upgraded_operator_none() -> None:
    job = running()
    pods = make_pod(0), make_pod(1)
    changed = make_job(job.status, image="trainer:2")
    assert plan(changed, observe(*pods, progress=progress()), NOW).status.attempt == 2
    upgraded = replace(job, image="trainer:2")  # another default
    result = plan(upgraded, observe(*pods, progress=progress()), NOW)
    assert (result.delete, result.create, result.status.attempt) == ((), (), 1)


def lost(*names: str) -> dict[str, NodeView]:
    """Return the nodes of a cluster of which ``names``, the smaller part, are not ready for long."""
    others = (f"spare-{number}" for number in range(4))
    ready = {name: NodeView(name) for name in ("node-0", "node-1", "node-s", *others)}
    return ready | {name: NodeView(name, ready=False, since=NOW - 60) for name in names}


def test_a_lost_nodes_pod_is_replaced_at_once_under_another_index() -> None:
    job = running()
    picture = observe(make_pod(0), make_pod(1), nodes=lost("node-1"), progress=progress())
    result = plan(job, picture, NOW)
    assert (deleted(result), created(result)) == (["job-1"], ["job-2"])
    assert result.delete[0].grace_seconds is None, "by force only where the job allows it"
    assert says(result.status, "Healthy") == ("False", "NodeLost")
    gone = make_pod(1, deleting=True, deletion_deadline=NOW + 180)
    after = observe(
        make_pod(0), gone, make_pod(2, replacement=1), nodes=lost("node-1"), progress=progress()
    )
    again = plan(with_status(job, result.status), after, NOW)
    assert (again.delete, again.create) == ((), ())
    back = observe(make_pod(0), make_pod(2, replacement=1), progress=progress())
    assert created(plan(with_status(job, again.status), back, NOW)) == []


def test_a_lost_nodes_pod_goes_by_force_where_the_job_allows_it() -> None:
    job = running(restart={"forceDeleteOnLostNode": True})
    gone = make_pod(1, deleting=True, deletion_deadline=NOW + 180)
    for pod in (make_pod(1), gone):
        picture = observe(make_pod(0), pod, nodes=lost("node-1"), progress=progress())
        assert [d.grace_seconds for d in plan(job, picture, NOW).delete] == [0]
    held = replace(gone, forced=True, queued=True)
    picture = observe(make_pod(0), held, nodes=lost("node-1"), progress=progress())
    assert deleted(plan(job, picture, NOW)) == [], "once is enough"


def test_a_pod_that_ignores_its_deletion_counts_as_lost() -> None:
    stuck = make_pod(1, deleting=True, deletion_deadline=NOW - 31)
    assert created(plan(running(), observe(make_pod(0), stuck, progress=progress()), NOW)) == [
        "job-2"
    ]


def test_a_pod_on_an_unhealthy_gpu_moves_to_another_node() -> None:
    job = running(gpusPerNode=8)
    bad = NodeView("node-1", unhealthy="GPU 3 is unhealthy", has_gpus=True)
    nodes = {"node-0": NodeView("node-0", has_gpus=True), "node-1": bad}
    pods = make_pod(0, job), make_pod(1, job)
    first = plan(job, observe(*pods, job=job, nodes=nodes, progress=progress()), NOW)
    assert (deleted(first), created(first)) == (["job-1"], [])
    assert says(first.status, "Healthy") == ("False", "UnhealthyGPU")
    second = plan(job, observe(pods[0], job=job, nodes=nodes, progress=progress()), NOW)
    (pod,) = [m for m in second.create if m["kind"] == "Pod"]
    assert "'values': ['node-1']" in str(pod["spec"]["affinity"]["nodeAffinity"])


def test_the_store_is_replaced_wherever_that_cannot_split_the_training() -> None:
    job = running(nodes={"min": 2, "max": 2})
    pods = make_pod(0, job), make_pod(1, job)
    assert created(plan(job, observe(*pods, job=job, rendezvous=None), NOW)) == ["job-rendezvous"]
    one = observe(*pods, job=job, nodes=lost("node-s"))
    assert [(d.name, d.grace_seconds) for d in plan(job, one, NOW).delete] == [
        ("job-rendezvous", 0)
    ]
    going = store(spec_hash=job.spec_hash, deleting=True, deletion_deadline=NOW + 5)
    stuck = observe(*pods, job=job, rendezvous=replace(going, node="node-s"), nodes=lost("node-s"))
    assert [d.grace_seconds for d in plan(job, stuck, NOW).delete] == [0]
    all_lost = observe(*pods, job=job, nodes=lost("node-s", "node-0", "node-1"))
    graces = {d.name: d.grace_seconds for d in plan(job, all_lost, NOW).delete}
    assert graces["job-rendezvous"] is None, "out there they may go on training"


def test_a_pod_that_fails_while_it_is_sent_away_is_nobodys_fault() -> None:
    result = plan(
        running(), observe(make_pod(0), failed(1, 3, deleting=True), progress=progress()), NOW
    )
    assert (result.status.phase, result.status.attempt) == ("Running", 1)


def test_a_job_without_progress_is_restarted_and_that_counts() -> None:
    job = running(restart={"noProgressSeconds": 60})
    pods = make_pod(0), make_pod(1)
    calm = plan(job, observe(*pods, progress=progress(50)), NOW)
    assert (calm.status.attempt, calm.requeue_after) == (1, pytest.approx(10.0, abs=1))
    hung = plan(job, observe(*pods, progress=progress(61)), NOW)
    assert hung.status.restarts is not None
    assert (hung.status.attempt, hung.status.restarts.gang) == (2, 1)
    assert says(hung.status, "Progressing") == ("False", "NoProgress")
    assert {delete.grace_seconds for delete in hung.delete} == {30}


def test_the_time_for_a_step_is_learned_and_the_first_one_has_longer() -> None:
    job = running()
    pods = make_pod(0), make_pod(1)
    # 60 s, ten steps of 8 samples, and half of the way to the next evaluation, at 8 samples/s
    assert plan(job, observe(*pods, progress=progress(30)), NOW).status.attempt == 1
    assert plan(job, observe(*pods, progress=progress(3601)), NOW).status.attempt == 2
    fresh = with_status(make_job(), plan(make_job(), Observed(), NOW).status)
    new = [make_pod(i, started=NOW) for i in range(2)]
    loading = observe(*new, progress=Progress(ProgressStatus(), phase="loading"))
    assert plan(fresh, loading, NOW + 1799).status.attempt == 1
    assert plan(fresh, loading, NOW + 1801).status.attempt == 2


@pytest.mark.parametrize("phase", ["evaluating", "saving", "sampling", "finishing"])
def test_what_comes_between_and_after_steps_has_its_own_time(phase: str) -> None:
    job = running(restart={"noProgressSeconds": 60})
    pods = make_pod(0), make_pod(1)
    lives = progress(7000, phase=phase, alive=NOW - 1700)
    assert plan(job, observe(*pods, progress=lives), NOW).status.attempt == 1
    hangs = progress(7000, phase=phase, alive=NOW - 1801)
    assert plan(job, observe(*pods, progress=hangs), NOW).status.attempt == 2
    other = progress(7000, phase=phase, alive=NOW - 1801, rank=4)
    told = observe(*pods, progress=None, witness=other)
    assert plan(job, told, NOW + 1800).status.attempt == 2, "another rank tells of it as well"


def test_a_trainer_that_cannot_be_asked_is_no_fault_and_is_told() -> None:
    job = running(restart={"noProgressSeconds": 60})
    pods = make_pod(0), make_pod(1)
    for seconds in (298, 301, 86_400):
        result = plan(job, observe(*pods), NOW + seconds)
        assert (result.status.attempt, result.delete, result.create) == (1, (), ())
        assert result.status.restarts is not None
        assert result.status.restarts.gang == 0
        silent = says(result.status, "Progressing") == ("Unknown", "NoAnswer")
        assert silent == (seconds > 299)
        assert [event.reason for event in result.events] == ["NoAnswer"] * (seconds == 301)
        job = with_status(job, result.status)
        assert [event.reason for event in plan(job, observe(*pods), NOW + seconds).events] == []
    heard = plan(job, observe(*pods, progress=progress()), NOW)
    assert says(heard.status, "Progressing") == ("True", "Stepping")


def test_a_job_with_too_few_nodes_is_not_blamed_for_making_no_steps() -> None:
    job = running(nodes={"min": 2, "max": 2})
    picture = observe(make_pod(0, job), make_pod(1, job, phase="Pending", started=None), job=job)
    assert plan(job, picture, NOW + 10**6).status.attempt == 1


def test_a_status_that_is_older_than_the_pods_changes_nothing() -> None:
    job = running()
    result = plan(job, observe(failed(0, attempt=2)), NOW)
    assert (result.status, result.delete, result.create) == (job.status, (), ())
    assert result.requeue_after == 1.0


def test_a_job_whose_status_was_lost_takes_over_its_pods() -> None:
    pods = make_pod(0, attempt=4), make_pod(1, attempt=4)
    result = plan(make_job(), observe(*pods, progress=progress()), NOW)
    assert (result.status.attempt, result.delete, created(result)) == (4, (), [])


def test_planning_again_on_the_same_picture_changes_nothing() -> None:
    job = running()
    picture = observe(make_pod(0), make_pod(1), progress=progress())
    again = plan(job, picture, NOW + 1)
    assert (again.status, again.delete, again.create, again.events) == (job.status, (), (), ())


def test_only_objects_that_differ_are_applied_and_those_unwanted_go() -> None:
    job = running()
    fixed = make_job(job.status, nodes={"min": 2, "max": 2})
    pods = [make_pod(i, fixed) for i in range(2)]
    result = plan(fixed, observe(*pods, job=job, progress=progress()), NOW)
    assert [(d.kind, d.name) for d in result.delete] == [("PodDisruptionBudget", "job-nodes")]
    assert result.create == ()


def test_a_gang_without_its_api_is_scheduled_pod_by_pod() -> None:
    job = make_job(scheduling={"gang": "volcano"})
    result = plan(job, Observed(missing_apis=frozenset({"scheduling.volcano.sh/v1beta1"})), NOW)
    assert "PodGroup" not in {m["kind"] for m in result.create}
    assert all("schedulerName" not in m["spec"] for m in result.create if m["kind"] == "Pod")
    assert says(result.status, "Admitted") == ("True", "NoPodGroups")


def test_a_template_that_breaks_the_contract_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match=r"spec\.podTemplate\.spec\.restartPolicy"):
        make_job(podTemplate={"spec": {"restartPolicy": "Always"}})
