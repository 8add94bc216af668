"""Jobs in a queue: a real Kueue admits their pods group by group, sends them away, and has them back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, Manifest
from tests.end_to_end import stage
from tests.end_to_end.kueue import FINALIZER, GATE, RESOURCE, Kueue
from tests.end_to_end.stage import RUN, Operator, condition, is_complete, job, losses, wait_for
from tests.end_to_end.test_life import ledger, wanted

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes and Kueue
]

NAMESPACE = "queued"
HERE = f"--namespace={NAMESPACE}"
QUEUE = "team"
URGENT = "queued-urgent"
ENDLESS = {**RUN, "schedule": {"steps": 100_000}}
SHORT = {**RUN, "schedule": {"steps": 2}}


class Scene:
    """The namespace with its queue for two GPUs, the operator, and Kueue."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self.kubectl, self.output = kubectl, folder / "output"
        self.operator = Operator(kubectl, NAMESPACE, folder)
        self.kueue = Kueue(kubectl, NAMESPACE, folder / "kueue")
        self.sizes: dict[str, int] = {}

    def apply(self, name: str, num_nodes: int = 1, **spec: Any) -> None:
        """Create a job in the queue; a short one keeps its output to itself."""
        self.sizes[name] = num_nodes
        scheduling = {"queueName": QUEUE, **spec.pop("scheduling", {})}
        fixed = {"nodes": {"min": 1, "max": num_nodes}, "scheduling": scheduling}
        own = {} if "run" in spec else {"run": SHORT, "storage": {}}
        wanted = job(name, **fixed, **own, **spec)
        # The nodes' GPUs are made up: the quota counts them, and the trainer is told of none.
        (trainer,) = wanted["spec"]["podTemplate"]["spec"]["containers"]
        trainer["resources"] = {"requests": {RESOURCE: "1"}, "limits": {RESOURCE: "1"}}
        self.kubectl.apply(wanted, namespace=NAMESPACE)

    def suspend(self, name: str, suspend: bool) -> None:
        stage.suspend(self.kubectl, NAMESPACE, name, suspend)

    def pods(self, name: str) -> dict[str, Manifest]:
        """Return the job's training pods by name."""
        chosen = f"fluxtrain.dev/job={name},app.kubernetes.io/component=trainer"
        found = self.kubectl.get("pods", f"--selector={chosen}", HERE)
        return {pod["metadata"]["name"]: pod for pod in found["items"]}

    def wait(self, name: str, done: Callable[[Manifest], bool], what: str) -> Manifest:
        """Return the job's status once ``done`` says so; print the seconds."""
        found: list[Manifest] = [{}]

        def check() -> bool:
            found[0] = stage.status(self.kubectl, NAMESPACE, name)
            return done(found[0])

        seconds = wait_for(check, lambda: self.told(name), seconds=180)
        print(f"{name} {what} after {seconds:.1f} s")
        return found[0]

    def wait_until_runs(self, name: str) -> Manifest:
        return self.wait(name, lambda s: s.get("phase") == "Running", "runs")

    def wait_until_gated(self, name: str) -> Manifest:
        """Wait until the job waits for its turn, and says so."""
        told = f"{self.sizes[name]} pods wait at a scheduling gate: {GATE}"
        found = self.wait(
            name, lambda s: condition(s, "Admitted").get("message") == told, "waits for its turn"
        )
        admitted = condition(found, "Admitted")
        assert (admitted["status"], admitted["reason"]) == ("False", "SchedulingGated")
        for pod in self.pods(name).values():
            assert [gate["name"] for gate in pod["spec"]["schedulingGates"]] == [GATE]
            assert FINALIZER in pod["metadata"]["finalizers"]
        return found

    def wait_until_suspended(self, name: str) -> None:
        """Wait until Kueue has let go of all pods of the job."""
        self.wait(name, lambda s: condition(s, "Suspended").get("status") == "True", "is suspended")
        assert self.pods(name) == {}

    def wait_for_steps(self, count: int) -> None:
        """Wait for so many further steps of the first job."""
        stage.wait_for_steps(self.output, count, lambda: self.told("first"), seconds=180)

    def group(self, name: str) -> str:
        """Return the pod group of a job's training pods."""
        labels = (pod["metadata"]["labels"] for pod in self.pods(name).values())
        (group,) = {found["kueue.x-k8s.io/pod-group-name"] for found in labels}
        return str(group)

    def told(self, name: str) -> str:
        """Return everything that helps where a wait was in vain."""
        found = stage.status(self.kubectl, NAMESPACE, name)
        pods = self.kubectl("get", "pods,workloads.kueue.x-k8s.io", "-o", "wide", HERE)
        words = stage.logs(self.kubectl, NAMESPACE, name)
        logs = f"{self.operator.log()}\n{self.kueue.log()}"
        return f"{json.dumps(found, indent=1)}\n{pods}\n{logs}\n{words}"


@pytest.fixture(scope="module")
def scene(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    found = Scene(kubectl, tmp_path_factory.mktemp("queued"))
    try:
        found.kueue.prepare()
    except ClusterError as error:
        pytest.skip(f"Kueue cannot be built here: {error}")
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, found.output)
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 10}
    kubectl.apply({**urgent, "metadata": {"name": URGENT}})
    with ExitStack() as undo:  # Kueue lets go of pods and queues only while it runs
        undo.callback(kubectl, "delete", "priorityclass", URGENT)
        undo.callback(found.kueue.stop)
        found.kueue.start()
        undo.callback(found.kueue.remove_queue, QUEUE)
        found.kueue.make_queue(QUEUE, gpus=2)
        undo.callback(stage.clear, kubectl, NAMESPACE)
        undo.callback(found.kueue.remove_workloads)
        undo.callback(found.operator.stop)
        found.operator.start()
        yield found


def test_a_job_waits_at_its_gate_and_one_of_a_higher_priority_sends_the_first_away(
    scene: Scene,
) -> None:
    scene.apply("first", num_nodes=2, run=ENDLESS)
    scene.wait_until_runs("first")
    scene.apply("second")
    found = scene.wait_until_gated("second")
    assert (found["phase"], found.get("startTime")) == ("Pending", None)
    store = scene.kubectl.get("pod", "second-rendezvous", HERE)
    assert FINALIZER not in store["metadata"].get("finalizers", []), "it needs no quota"

    scene.apply("urgent", scheduling={"priorityClassName": URGENT})
    scene.wait("first", lambda s: s["phase"] == "Restarting", "is preempted")
    scene.wait_until_gated("first")
    assert scene.group("first") == "first-2"
    scene.wait("urgent", is_complete, "is complete")
    scene.wait("second", is_complete, "is complete")
    scene.wait_until_runs("first")
    scene.wait_for_steps(3)


def test_a_job_whose_workload_is_deleted_is_queued_anew_and_goes_on_where_it_was(
    scene: Scene,
) -> None:
    scene.kueue.set_policy(QUEUE, "Hold")
    workload = f"workload.kueue.x-k8s.io/{scene.group('first')}"
    scene.kubectl("delete", workload, HERE, "--wait=false")
    scene.wait("first", lambda s: s["phase"] == "Restarting", "lost its workload")
    found = scene.wait_until_gated("first")
    assert scene.group("first") == "first-3"
    assert found["restarts"] == {"process": 0, "pod": 0, "gang": 0}, "nobody's fault"
    at = max(losses(scene.output))
    scene.kueue.set_policy(QUEUE, "None")
    scene.wait_until_runs("first")
    scene.wait_for_steps(3)
    assert list(losses(scene.output))[:at] == list(range(1, at + 1))


def test_a_suspended_job_makes_room_whether_it_trains_or_waits(scene: Scene) -> None:
    scene.apply("third")
    scene.wait_until_gated("third")
    scene.suspend("third", True)
    replace_a_pod(scene)
    scene.wait_until_suspended("third")
    scene.suspend("third", False)
    scene.wait_until_gated("third")
    scene.suspend("first", True)
    scene.wait_until_suspended("first")
    scene.wait("third", is_complete, "is complete")
    steps = list(losses(scene.output))
    assert steps == list(range(1, steps[-1] + 1))
    assert ledger(scene.output) == wanted(steps[-1]), "no sample is lost or used twice"


def replace_a_pod(scene: Scene) -> None:
    """Lose one pod of the first job: another takes its place in the group, under another name."""
    group = scene.group("first")
    scene.kubectl("delete", "pod", "first-1", HERE, "--wait=false")
    wait_for(
        lambda: set(scene.pods("first")) == {"first-0", "first-2"}, lambda: scene.told("first")
    )
    scene.wait("first", lambda s: s["nodes"] == {"ready": 2, "desired": 2}, "has both nodes")
    assert scene.group("first") == group
    scene.wait_for_steps(3)
