"""A job's lifecycle on a real cluster: gated, scaled, changed, failed, waiting for others, deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import layout, processes
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.nodes import fake_gpus
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.jobs import ENDLESS, Jobs, expected_samples, used_samples
from tests.end_to_end.stage import RUN, condition, is_complete, job, losses, wait_for

NAMESPACE = "life"
HERE = f"--namespace={NAMESPACE}"
GATE = {"name": "example.org/not-yet"}
NOWHERE = {"scheduling": {"nodeSelector": {"example.org/place": "nowhere"}}, "storage": {}}
"""For jobs whose pods must not run: no node matches."""
SHORT: dict[str, Any] = {
    "run": {**RUN, "schedule": {"steps": 2}},
    "nodes": {"min": 1, "max": 1},
    "storage": {},
    "lifecycle": {"cleanPods": "None"},
}
MAPPED = "example.org/gpu"
WRONG = {**RUN, "model": {"num_heads": 5}}
"""A spec that only the operator can refuse, from the preset's width."""


@pytest.fixture(scope="module")
def jobs(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(kubectl, tmp_path_factory.mktemp("life"), NAMESPACE)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, jobs.output)
    jobs.operator.start()
    jobs.apply("again", **SHORT)  # for a later test
    try:
        yield jobs
    finally:
        jobs.operator.stop()
        stage.clear(kubectl, NAMESPACE)


@pytest.mark.proof
def test_a_gated_job_starts_and_is_scaled_and_changed_while_it_trains(jobs: Jobs) -> None:
    gated = job("elastic")["spec"]["podTemplate"]
    gated["spec"]["schedulingGates"] = [GATE]
    jobs.apply("elastic", nodes={"min": 2, "max": 2}, run=ENDLESS, podTemplate=gated)
    message = jobs.wait_for_condition("elastic", "Admitted", "SchedulingGated")
    assert message.startswith("2 pods wait at a scheduling gate")
    open_gate(jobs, "elastic-0")
    jobs.wait("elastic", lambda s: "1 of at least 2" in condition(s, "Training").get("message", ""))
    assert jobs.status("elastic")["phase"] == "Pending"
    assert condition(jobs.status("elastic"), "Admitted")["status"] == "False"
    assert losses(jobs.output) == {}, "one node of two takes no step"
    open_gate(jobs, "elastic-1")
    jobs.wait_for_steps("elastic", 10, "gates opened")
    check_scale(jobs, "elastic", 2)

    before = jobs.uids("elastic")
    jobs.patch("elastic", restart={"maxRestarts": 3}, lifecycle={"cleanPods": "All"})
    jobs.wait_for_steps("elastic", 5, "changed outside the pods")
    assert jobs.uids("elastic") == before, "other changes do not replace pods"
    with pytest.raises(ClusterError, match=r"spec\.nodes\.min.*min must be at most max"):
        jobs.scale("elastic", 1)

    ungated = {"spec": {"schedulingGates": None}}
    variable = {"name": "NCCL_DEBUG", "value": "WARN"}
    jobs.patch("elastic", podTemplate=ungated, network={"env": [variable]}, nodes={"min": 1})
    jobs.wait("elastic", lambda s: s["attempt"] == 2 and s["nodes"]["ready"] == 2)
    jobs.wait_for_steps("elastic", 5, "changed inside the pods")
    assert not set(jobs.uids("elastic").values()) & set(before.values())
    environment = jobs.pods("elastic")["elastic-0"]["spec"]["containers"][0]["env"]
    assert variable in environment

    before = jobs.uids("elastic")
    jobs.scale("elastic", 1)
    jobs.wait("elastic", lambda s: s["nodes"] == {"ready": 1, "desired": 1})
    jobs.wait_for_steps("elastic", 10, "scaled to 1")
    assert jobs.uids("elastic")["elastic-0"] == before["elastic-0"], "it only goes on alone"
    check_scale(jobs, "elastic", 1)
    jobs.scale("elastic", 2)
    jobs.wait("elastic", lambda s: s["nodes"] == {"ready": 2, "desired": 2})
    jobs.wait_for_steps("elastic", 10, "scaled to 2")
    check_scale(jobs, "elastic", 2)
    assert jobs.uids("elastic")["elastic-0"] == before["elastic-0"]

    jobs.patch("elastic", lifecycle={"activeDeadlineSeconds": 1})
    assert "active for more than 1 s" in jobs.wait_for_condition(
        "elastic", "Failed", "DeadlineExceeded"
    )
    seconds = wait_for(
        lambda: jobs.pods("elastic") == {},
        lambda: jobs.debug_text("elastic", jobs.status("elastic")),
        seconds=200,  # more than the pods' grace period
    )
    print(f"stopped with a checkpoint in {seconds:.1f} s")
    assert jobs.status("elastic")["restarts"]["gang"] == 0
    steps = list(losses(jobs.output))
    assert steps == list(range(1, steps[-1] + 1))
    saved = max(int(path.name[5:]) for path in (jobs.output / "checkpoints").glob("step_*"))
    assert saved == steps[-1], "a checkpoint of the last step is saved"
    assert used_samples(jobs.output) == expected_samples(ENDLESS, steps[-1]), (
        "no sample is lost or repeated"
    )


def open_gate(jobs: Jobs, pod: str) -> None:
    wait_for(lambda: pod in jobs.pods("elastic"), f"{pod} is there")
    patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    jobs.kubectl("patch", "pod", pod, HERE, "--type=json", f"--patch={patch}")


def check_scale(jobs: Jobs, name: str, count: int) -> None:
    """Check the scale subresource: the replicas, and a selector of the training pods."""
    path = f"/apis/fluxtrain.dev/v1alpha1/namespaces/{NAMESPACE}/fluxtrainings/{name}/scale"
    scale = json.loads(jobs.kubectl("get", f"--raw={path}"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (count, count)
    selected = jobs.kubectl.get("pods", f"--selector={scale['status']['selector']}", HERE)
    names = {pod["metadata"]["name"] for pod in selected["items"]}
    assert names == {f"{name}-{index}" for index in range(count)}


def test_a_job_waits_for_others_and_is_cleaned_up_by_its_lifecycle(
    jobs: Jobs,
) -> None:
    jobs.apply("broken", run=WRONG)
    jobs.apply("second", lifecycle={"startAfter": ["broken", "first"]}, **NOWHERE)
    message = jobs.wait_for_condition("second", "Admitted", "WaitingForFailedJobs")
    assert "broken is Failed; recreate it, or take it out of spec.lifecycle.startAfter" in message
    assert "first does not exist" in message
    jobs.patch("second", lifecycle={"startAfter": ["first"]})
    assert "first does not exist" in jobs.wait_for_condition("second", "Admitted", "WaitingForJobs")
    jobs.apply("first", **SHORT)
    jobs.wait("second", lambda s: "first is Starting" in condition(s, "Admitted")["message"])
    assert jobs.pods("second") == {}
    jobs.wait("first", is_complete)
    wait_for(lambda: len(jobs.pods("second")) == 3, jobs.operator.log, seconds=15)
    assert condition(jobs.status("second"), "Admitted")["status"] == "True"

    assert set(jobs.pods("first")) == {"first-0", "first-rendezvous"}, (
        "cleanPods None keeps all pods"
    )
    jobs.patch("first", lifecycle={"cleanPods": "Running"})
    wait_for(lambda: set(jobs.pods("first")) == {"first-0"}, jobs.operator.log)
    jobs.patch("first", lifecycle={"cleanPods": "All"})
    wait_for(lambda: jobs.pods("first") == {}, jobs.operator.log)
    jobs.patch("first", lifecycle={"ttlSecondsAfterFinished": 0})
    wait_for(lambda: not jobs.exists("first"), jobs.operator.log)
    assert jobs.pods("second"), "a job that has started does not wait"


def test_a_job_that_the_operator_refused_is_deleted_after_its_ttl(jobs: Jobs) -> None:
    jobs.apply("refused", run=WRONG, lifecycle={"ttlSecondsAfterFinished": 3})
    message = jobs.wait_for_condition("refused", "Failed", "InvalidSpec")
    assert "spec.run.model.hidden_size: got 32; must be a multiple of num_heads" in message
    wait_for(lambda: not jobs.exists("refused"), jobs.operator.log, seconds=20)
    assert jobs.exists("broken"), "a refused job without a TTL is kept"


def test_a_job_exceeds_its_deadline_before_it_runs(jobs: Jobs) -> None:
    jobs.apply("late", lifecycle={"activeDeadlineSeconds": 2}, **NOWHERE)
    message = jobs.wait_for_condition("late", "Failed", "DeadlineExceeded")
    assert message == "active for more than 2 s"
    wait_for(lambda: jobs.pods("late") == {}, jobs.operator.log)


def test_an_unschedulable_job_has_the_schedulers_message(
    jobs: Jobs,
) -> None:
    jobs.apply("greedy", gpusPerNode=64, storage={})
    message = jobs.wait_for_condition("greedy", "Training", "Unschedulable")
    assert message.startswith("0 of at least 1 nodes are up; greedy-0: 0/")
    assert "3 Insufficient amd.com/gpu" in message
    assert jobs.status("greedy")["phase"] == "Pending"


@pytest.mark.proof
def test_gpus_come_from_a_driver_of_resource_claims(jobs: Jobs) -> None:
    node = next(node for node in layout.nodes() if node.name == "node-1")
    fake_gpus.offer_to_claims(node, 2)
    try:
        templates = [claim_template("one", 1), claim_template("three", 3)]
        jobs.kubectl.apply(device_class(), *templates, namespace=NAMESPACE)
        gpus = {**SHORT, "gpusPerNode": 1, "resources": {"requests": {"cpu": "0", "memory": "0"}}}
        jobs.apply("claims", **gpus, gpuClaimTemplate="one")
        jobs.apply("mapped", **gpus, gpuResource=MAPPED)
        for name in ("claims", "mapped"):
            message = jobs.wait_for_condition(name, "Failed", "InvalidJob")
            assert "torch sees 0 GPUs in this pod" in message, "it ran, but there are no devices"
            assert jobs.pods(name)[f"{name}-0"]["spec"]["nodeName"] == node.name
        jobs.apply("greedier", **{**gpus, "gpusPerNode": 3}, gpuClaimTemplate="three")
        message = jobs.wait_for_condition("greedier", "Training", "Unschedulable")
        assert "cannot allocate all claims" in message
    finally:
        processes.stop([node.process("fake-gpu-driver")])


def device_class() -> Manifest:
    """Return the class of the driver's GPUs, which also answers requests of an extended resource."""
    selectors = [{"cel": {"expression": f"device.driver == '{fake_gpus.DRIVER}'"}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": fake_gpus.DRIVER},
        "spec": {"selectors": selectors, "extendedResourceName": MAPPED},
    }


def claim_template(name: str, count: int) -> Manifest:
    exactly = {"deviceClassName": fake_gpus.DRIVER, "count": count}
    requests = [{"name": "gpus", "exactly": exactly}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": requests}}},
    }


FIXED: list[tuple[str, dict[str, Any]]] = [
    ("spec.gpusPerNode", {"gpusPerNode": 8}),
    ("spec.managedBy", {"managedBy": "example.org/other"}),
    ("spec.scheduling.gang", {"scheduling": {"gang": "Volcano"}}),
    (
        "spec.storage.output.emptyDir.sizeLimit",
        {"storage": {"output": {"emptyDir": {"sizeLimit": "1Gi"}}}},
    ),
    ("spec.run.preset", {"run": {"preset": "openmoji"}}),
    ("spec.run.seed", {"run": {"seed": 7}}),
    ("spec.run.optim.learning_rate", {"run": {"optim": {"learning_rate": 1.0}}}),
    ("spec.run.schedule.global_batch_size", {"run": {"schedule": {"global_batch_size": 32}}}),
]


@pytest.mark.parametrize(("path", "change"), FIXED, ids=[path for path, _ in FIXED])
def test_a_change_of_an_immutable_field_is_refused_with_its_path(
    jobs: Jobs, path: str, change: dict[str, Any]
) -> None:
    with pytest.raises(ClusterError) as refused:
        jobs.patch("second", **change)
    message = str(refused.value)
    assert f"{path}: Invalid value" in message
    assert "stays as it was created; another value is another job" in message


@pytest.mark.proof
def test_a_new_job_with_the_name_of_a_deleted_one_is_trained(jobs: Jobs) -> None:
    jobs.wait("again", is_complete)

    before = jobs.uids("again")
    jobs.kubectl("delete", "ft", "again", HERE)  # its pods are deleted while the new job starts
    jobs.apply("again", **SHORT)
    assert jobs.wait("again", is_complete)["progress"]["step"] == 2
    assert not set(jobs.uids("again").values()) & set(before.values()), "new pods"

    before = jobs.uids("again")
    jobs.kubectl("delete", "ft", "again", HERE, "--cascade=orphan")
    jobs.apply("again", **SHORT)  # adopts what is there, but for pods
    assert jobs.wait("again", is_complete)["progress"]["step"] == 2
    assert not set(jobs.uids("again").values()) & set(before.values()), "new pods"

    jobs.kubectl("delete", "ft", "again", HERE, "--cascade=orphan")
    other = {"requests": {"cpu": "1m", "memory": "1Mi"}}
    jobs.apply("again", **SHORT, resources=other)
    message = jobs.wait_for_condition("again", "Training", "NameConflict")
    assert "without an owner; delete or rename them" in message
    status = jobs.status("again")
    assert (status["phase"], status.get("progress")) == ("Pending", None)
    _, command = message.split(": kubectl ")
    jobs.kubectl(*command.split(), seconds=120)
    assert jobs.wait("again", is_complete)["progress"]["step"] == 2
    jobs.kubectl("delete", "ft", "again", HERE)


def test_a_job_of_another_controller_is_left_alone(jobs: Jobs) -> None:
    theirs = {"managedBy": "example.org/other"}
    jobs.apply("theirs", **theirs)
    jobs.apply("theirs-and-wrong", run=WRONG, **theirs)
    jobs.apply("ours", run=WRONG)
    jobs.wait_for_condition("ours", "Failed", "InvalidSpec")  # so the others were reconciled too
    for name in ("theirs", "theirs-and-wrong"):
        manifest = jobs.kubectl.get("ft", name, HERE)
        assert {entry["manager"] for entry in manifest["metadata"]["managedFields"]} == {
            "kubectl-client-side-apply"
        }
        assert jobs.pods(name) == {}
        assert manifest["status"]["observedGeneration"] == -1, "nobody has written a status"
    objects = jobs.kubectl("get", "cm,svc,netpol,pdb", "--selector=fluxtrain.dev/job=theirs", HERE)
    assert objects == ""
