"""Jobs in a queue: a real Kueue admits, preempts and readmits their pod groups."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.integrations.kueue import FINALIZER, GATES, RESOURCE, Kueue
from tests.end_to_end.jobs import ENDLESS, Jobs, expected_samples, used_samples
from tests.end_to_end.stage import RUN, condition, is_complete, job, losses, wait_for
from tests.faults.injections.processes import AGENT, RANK, kill_for_memory, pids

pytestmark = pytest.mark.proof

NAMESPACE = "queued"
HERE = f"--namespace={NAMESPACE}"
QUEUE = "team"
URGENT = "queued-urgent"
RACK = "example.com/rack"
SHORT = {**RUN, "schedule": {"steps": 2}}


class QueuedJobs(Jobs):
    """The jobs of a namespace with a queue for two GPUs, the operator and Kueue."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        super().__init__(kubectl, folder, NAMESPACE)
        self.kueue = Kueue(kubectl, NAMESPACE, folder / "kueue")
        self.sizes: dict[str, int] = {}

    def apply(self, name: str, num_nodes: int = 1, fewest: int = 1, **spec: Any) -> None:
        """Create a job of ``fewest`` to ``num_nodes`` pods in the queue; without ``run`` it is short."""
        self.sizes[name] = num_nodes
        scheduling = {"queueName": QUEUE, **spec.pop("scheduling", {})}
        gpus = {RESOURCE: str(spec.pop("gpus", 1))}
        fixed = {"nodes": {"min": fewest, "max": num_nodes}, "scheduling": scheduling}
        own = {} if "run" in spec else {"run": SHORT, "storage": {}}
        manifest = job(name, **fixed, **own, **spec)
        # the nodes' GPUs are fake: the quota counts them, the trainer must not expect any
        (trainer,) = manifest["spec"]["podTemplate"]["spec"]["containers"]
        trainer["resources"] = {"requests": gpus, "limits": gpus}
        self.kubectl.apply(manifest, namespace=NAMESPACE)

    def suspend(self, name: str, suspend: bool) -> None:
        stage.suspend(self.kubectl, NAMESPACE, name, suspend)

    def training_pods(self, name: str) -> dict[str, Manifest]:
        return {pod: each for pod, each in self.pods(name).items() if "rendezvous" not in pod}

    def training_uids(self, name: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.training_pods(name).values()}

    def wait_until(self, name: str, done: Callable[[Manifest], bool], what: str) -> Manifest:
        """Return the job's status once ``done`` accepts it; print the seconds."""
        began = time.monotonic()
        status = self.wait(name, done)
        print(f"{name} {what} after {time.monotonic() - began:.1f} s")
        return status

    def wait_until_runs(self, name: str) -> Manifest:
        return self.wait_until(name, lambda s: s.get("phase") == "Running", "runs")

    def wait_until_gated(self, name: str) -> Manifest:
        """Wait until the job waits for admission and reports it."""
        message = f"{self.sizes[name]} pods wait at a scheduling gate: {', '.join(GATES)}"
        status = self.wait_until(
            name,
            lambda s: condition(s, "Admitted").get("message") == message,
            "waits for admission",
        )
        admitted = condition(status, "Admitted")
        assert (admitted["status"], admitted["reason"]) == ("False", "SchedulingGated")
        for pod in self.training_pods(name).values():
            assert [gate["name"] for gate in pod["spec"]["schedulingGates"]] == GATES
            assert FINALIZER in pod["metadata"]["finalizers"]
        return status

    def wait_until_suspended(self, name: str) -> None:
        """Wait until Kueue has released all pods of the job."""
        self.wait_until(
            name, lambda s: condition(s, "Suspended").get("status") == "True", "is suspended"
        )
        assert self.training_pods(name) == {}

    def group(self, name: str) -> str:
        """Return the pod group of a job's training pods."""
        labels = (pod["metadata"]["labels"] for pod in self.training_pods(name).values())
        (group,) = {each["kueue.x-k8s.io/pod-group-name"] for each in labels}
        return str(group)

    def workload_uid(self, name: str) -> str:
        """Return the uid of Kueue's Workload of a job's training pods."""
        workload = self.kubectl.get("workload", self.group(name), HERE)
        return str(workload["metadata"]["uid"])

    def debug_text(self, name: str, status: Manifest) -> str:
        workloads = self.kubectl("get", "workloads.kueue.x-k8s.io", "-o", "wide", HERE)
        return f"{super().debug_text(name, status)}\n{workloads}\n{self.kueue.log()}"


@pytest.fixture(scope="module")
def jobs(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueuedJobs]:
    jobs = QueuedJobs(kubectl, tmp_path_factory.mktemp("queued"))
    try:
        jobs.kueue.prepare()
    except ClusterError as error:
        pytest.skip(f"Kueue cannot be built here: {error}")
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, jobs.output)
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 10}
    kubectl.apply({**urgent, "metadata": {"name": URGENT}})
    with ExitStack() as undo:  # Kueue releases pods and queues only while it runs
        undo.callback(kubectl, "delete", "priorityclass", URGENT)
        undo.callback(jobs.kueue.stop)
        jobs.kueue.start()
        undo.callback(jobs.kueue.remove_queue, QUEUE)
        jobs.kueue.create_queue(QUEUE, gpus=2)
        undo.callback(stage.clear, kubectl, NAMESPACE)
        undo.callback(jobs.kueue.remove_workloads)
        undo.callback(jobs.operator.stop)
        jobs.operator.start()
        yield jobs


def test_a_job_waits_at_its_gate_and_one_of_a_higher_priority_preempts_the_first(
    jobs: QueuedJobs,
) -> None:
    jobs.apply("first", num_nodes=2, run=ENDLESS)
    jobs.wait_until_runs("first")
    jobs.apply("second")
    status = jobs.wait_until_gated("second")
    assert (status["phase"], status.get("startTime")) == ("Pending", None)
    store = jobs.kubectl.get("pod", "second-rendezvous", HERE)
    assert FINALIZER not in store["metadata"].get("finalizers", []), "it needs no quota"

    jobs.apply("urgent", scheduling={"priorityClassName": URGENT})
    jobs.wait_until("first", lambda s: s["phase"] == "Restarting", "is preempted")
    jobs.wait_until_gated("first")
    assert jobs.group("first") == "first-2"
    jobs.wait_until("urgent", is_complete, "is complete")
    jobs.wait_until("second", is_complete, "is complete")
    jobs.wait_until_runs("first")
    jobs.wait_for_steps("first", 3, "running")


def test_a_job_whose_workload_is_deleted_is_queued_again_and_resumes(
    jobs: QueuedJobs,
) -> None:
    jobs.kueue.set_policy(QUEUE, "Hold")
    workload = f"workload.kueue.x-k8s.io/{jobs.group('first')}"
    jobs.kubectl("delete", workload, HERE, "--wait=false")
    jobs.wait_until("first", lambda s: s["phase"] == "Restarting", "lost its workload")
    status = jobs.wait_until_gated("first")
    assert jobs.group("first") == "first-3"
    counts = status["restarts"]
    assert (counts["charged"], counts["pod"], counts["gang"]) == (0, 0, 0), "none is charged"
    named = [name for name in counts["causes"] if name.startswith(("GroupEnded", "Workload", "No"))]
    assert named, "the end of the group counts under Kueue's reason"
    before = max(losses(jobs.output))
    jobs.kueue.set_policy(QUEUE, "None")
    jobs.wait_until_runs("first")
    jobs.wait_for_steps("first", 3, "running")
    assert list(losses(jobs.output))[:before] == list(range(1, before + 1))


def test_a_suspended_job_releases_its_quota_whether_it_trains_or_waits(jobs: QueuedJobs) -> None:
    jobs.apply("third")
    jobs.wait_until_gated("third")
    jobs.suspend("third", True)
    replace_a_pod(jobs)
    jobs.wait_until_suspended("third")
    jobs.suspend("third", False)
    jobs.wait_until_gated("third")
    jobs.suspend("first", True)
    jobs.wait_until_suspended("first")
    jobs.wait_until("third", is_complete, "is complete")
    steps = list(losses(jobs.output))
    assert steps == list(range(1, steps[-1] + 1))
    assert used_samples(jobs.output) == expected_samples(ENDLESS, steps[-1]), (
        "no sample is lost or repeated"
    )


def test_a_job_that_hangs_restarts_in_place_and_keeps_its_quota_while_another_waits(
    jobs: QueuedJobs,
) -> None:
    restart = {"noProgressSeconds": 30}
    jobs.suspend("first", False)
    jobs.wait_until_runs("first")
    patch = json.dumps({"spec": {"restart": restart}})
    jobs.kubectl("patch", "ft", "first", HERE, "--type=merge", f"--patch={patch}")
    jobs.apply("fourth")
    jobs.wait_until_gated("fourth")
    jobs.wait_for_steps("first", 3, "running")
    group, uids = jobs.group("first"), jobs.training_uids("first")
    *_, pod = jobs.training_pods("first").values()
    (rank,) = pids(pod, RANK)
    os.kill(rank, signal.SIGSTOP)
    jobs.wait_until("first", lambda s: "NoProgress" in s["restarts"]["causes"], "is restarted")
    jobs.wait_for_steps("first", 3, "restarted")
    assert (jobs.group("first"), jobs.training_uids("first")) == (group, uids)
    assert jobs.status("first")["restarts"]["gang"] == 0
    assert condition(jobs.status("fourth"), "Admitted")["reason"] == "SchedulingGated"
    steps = list(losses(jobs.output))
    assert steps == list(range(1, steps[-1] + 1))
    jobs.suspend("first", True)
    jobs.wait_until("fourth", is_complete, "is complete")


def test_a_restart_of_all_pods_keeps_the_quota_while_another_waits(jobs: QueuedJobs) -> None:
    stage.make_output(jobs.kubectl, NAMESPACE, "fifth", jobs.output.with_name("fifth"))
    storage = {"output": {"persistentVolumeClaim": {"claimName": "fifth"}}}
    jobs.apply("fifth", num_nodes=2, fewest=2, run=ENDLESS, storage=storage)
    jobs.wait_until_runs("fifth")
    jobs.wait_until("fifth", lambda s: s["progress"]["step"] >= 2, "trains")
    jobs.apply("sixth")
    jobs.wait_until_gated("sixth")
    group, workload = jobs.group("fifth"), jobs.workload_uid("fifth")
    run_out_of_memory(jobs, "fifth", "fifth-1")
    run_out_of_memory(jobs, "fifth", "fifth-2")  # the successor, before another step
    jobs.wait_until("fifth", lambda s: s["attempt"] == 2, "restarts all pods")
    status = jobs.wait_until_runs("fifth")
    assert (jobs.group("fifth"), jobs.workload_uid("fifth")) == (group, workload)
    assert (status["groupAttempt"], status["restarts"]["gang"]) == (1, 1)
    assert condition(jobs.status("sixth"), "Admitted")["reason"] == "SchedulingGated"
    jobs.suspend("fifth", True)
    jobs.wait_until("sixth", is_complete, "is complete")


def test_kueue_places_all_pods_of_a_job_in_one_rack(jobs: QueuedJobs, racks: str) -> None:
    """Each pod needs a node of its own: the only rack with two of them has room."""
    stage.make_output(jobs.kubectl, NAMESPACE, "seventh", jobs.output.with_name("seventh"))
    storage = {"output": {"persistentVolumeClaim": {"claimName": "seventh"}}}
    scheduling = {"queueName": racks, "requiredTopology": RACK}
    jobs.apply("seventh", 2, 2, run=ENDLESS, storage=storage, scheduling=scheduling, gpus=5)
    jobs.wait_until_runs("seventh")
    assert nodes_of(jobs, "seventh") == {"seventh-0": "node-1", "seventh-1": "node-2"}
    jobs.kubectl("delete", "pod", "seventh-0", HERE, "--wait=false")
    placed = {"seventh-1": "node-2", "seventh-2": "node-1"}
    wait_for(
        lambda: nodes_of(jobs, "seventh") == placed,
        lambda: jobs.debug_text("seventh", jobs.status("seventh")),
    )
    jobs.wait_until("seventh", lambda s: s["nodes"]["ready"] == 2, "has both nodes")
    jobs.suspend("seventh", True)
    jobs.wait_until_suspended("seventh")


@pytest.fixture
def racks(jobs: QueuedJobs) -> Iterator[str]:
    """Return a queue that knows the racks of nodes, one with one node and one with two."""
    for node, rack in (("node-0", "small"), ("node-1", "large"), ("node-2", "large")):
        jobs.kubectl("label", "node", node, f"{RACK}={rack}")
    jobs.kueue.create_queue("racks", gpus=10, topology=RACK)
    try:
        yield "racks"
    finally:
        jobs.kubectl("delete", "fluxtraining", "seventh", HERE, "--ignore-not-found")
        jobs.kueue.remove_workloads()
        jobs.kueue.remove_queue("racks")
        jobs.kubectl("label", "node", "--all", f"{RACK}-")


def nodes_of(jobs: QueuedJobs, name: str) -> dict[str, str]:
    pods = jobs.training_pods(name).items()
    return {pod: manifest["spec"].get("nodeName", "") for pod, manifest in pods}


def run_out_of_memory(jobs: QueuedJobs, name: str, pod: str) -> None:
    """Wait for a pod of the job, and let the kernel kill its container."""

    def agents() -> list[int]:
        pods = jobs.training_pods(name)
        return pids(pods[pod], AGENT) if pod in pods else []

    wait_for(lambda: bool(agents()), lambda: jobs.debug_text(name, jobs.status(name)))
    kill_for_memory(agents()[0])


def replace_a_pod(jobs: QueuedJobs) -> None:
    """Delete one pod of the first job: its replacement joins the group under another name."""
    group = jobs.group("first")
    jobs.kubectl("delete", "pod", "first-1", HERE, "--wait=false")
    wait_for(
        lambda: set(jobs.training_pods("first")) == {"first-0", "first-2"},
        lambda: jobs.debug_text("first", jobs.status("first")),
    )
    jobs.wait_until("first", lambda s: s["nodes"] == {"ready": 2, "desired": 2}, "has both nodes")
    assert jobs.group("first") == group
    jobs.wait_for_steps("first", 3, "running")
