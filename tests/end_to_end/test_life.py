"""A job's life on a real cluster: gated, scaled, changed, late, waiting for others, over, and gone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, Manifest
from tests.end_to_end import stage
from tests.end_to_end.stage import (
    RUN,
    Operator,
    condition,
    is_complete,
    job,
    losses,
    wait_for,
)

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.order import Order

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

NAMESPACE = "life"
HERE = f"--namespace={NAMESPACE}"
GATE = {"name": "example.org/not-yet"}
NOWHERE = {"scheduling": {"nodeSelector": {"example.org/place": "nowhere"}}, "storage": {}}
"""For jobs whose pods need not run: no node will do."""
ENDLESS = {**RUN, "schedule": {"steps": 100_000}}
WRONG = {**RUN, "model": {"num_heads": 5}}
"""What the operator alone can refuse, as it knows the preset's width."""


class Scene:
    """The namespace, its operator, and its jobs by name."""

    def __init__(self, kubectl: Kubectl, folder: Path, namespace: str = NAMESPACE) -> None:
        self.kubectl, self.output = kubectl, folder / "output"
        self.operator = Operator(kubectl, namespace, folder)
        self.namespace, self.here = namespace, f"--namespace={namespace}"

    def apply(self, name: str, **spec: Any) -> None:
        self.kubectl.apply(job(name, **spec), namespace=self.namespace)

    def patch(self, name: str, **spec: Any) -> None:
        change = json.dumps({"spec": spec})
        self.kubectl("patch", "ft", name, self.here, "--type=merge", f"--patch={change}")

    def scale(self, name: str, replicas: int) -> None:
        self.kubectl("scale", f"ft/{name}", f"--replicas={replicas}", self.here)

    def status(self, name: str) -> Manifest:
        return stage.status(self.kubectl, self.namespace, name)

    def pods(self, name: str, *more: str) -> dict[str, Manifest]:
        """Return the job's pods by name."""
        found = self.kubectl.get("pods", f"--selector=fluxtrain.dev/job={name}", self.here, *more)
        return {pod["metadata"]["name"]: pod for pod in found["items"]}

    def uids(self, name: str) -> dict[str, str]:
        return {pod: manifest["metadata"]["uid"] for pod, manifest in self.pods(name).items()}

    def exists(self, name: str) -> bool:
        return bool(self.kubectl("get", "ft", name, self.here, "--ignore-not-found"))

    def wait(self, name: str, done: Callable[[Manifest], bool]) -> Manifest:
        """Return the job's status once ``done`` says so."""
        found: list[Manifest] = [{}]

        def check() -> bool:
            found[0] = self.status(name)
            return done(found[0])

        wait_for(check, lambda: self.told(name, found[0]), seconds=240)
        return found[0]

    def wait_for_condition(self, name: str, kind: str, reason: str) -> str:
        """Return the message of the condition ``kind`` once it has this ``reason``."""
        found = self.wait(name, lambda s: condition(s, kind).get("reason") == reason)
        return str(condition(found, kind)["message"])

    def wait_for_steps(self, name: str, count: int, after: str) -> None:
        """Wait for so many further steps; print the seconds."""
        seconds = stage.wait_for_steps(
            self.output, count, lambda: self.told(name, self.status(name))
        )
        print(f"{after}: {count} further steps after {seconds:.1f} s")

    def told(self, name: str, found: Manifest) -> str:
        """Return everything that helps where a wait was in vain."""
        pods = self.kubectl("get", "pods", "-o", "wide", self.here)
        words = stage.logs(self.kubectl, self.namespace, name)
        return f"{json.dumps(found, indent=1)}\n{pods}\n{self.operator.log()}\n{words}"


@pytest.fixture(scope="module")
def scene(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    found = Scene(kubectl, tmp_path_factory.mktemp("life"))
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, found.output)
    found.operator.start()
    try:
        yield found
    finally:
        found.operator.stop()
        stage.clear(kubectl, NAMESPACE)


def test_a_job_starts_at_its_gate_is_scaled_and_changed_between_two_steps(scene: Scene) -> None:
    gated = job("elastic")["spec"]["podTemplate"]
    gated["spec"]["schedulingGates"] = [GATE]
    scene.apply("elastic", nodes={"min": 2, "max": 2}, run=ENDLESS, podTemplate=gated)
    told = scene.wait_for_condition("elastic", "Admitted", "SchedulingGated")
    assert told.startswith("2 pods wait at a scheduling gate")
    open_gate(scene, "elastic-0")
    scene.wait("elastic", lambda s: "1 of at least 2" in condition(s, "Ready").get("message", ""))
    assert scene.status("elastic")["phase"] == "Pending"
    assert condition(scene.status("elastic"), "Admitted")["status"] == "False"
    assert losses(scene.output) == {}, "one node of two makes no step"
    open_gate(scene, "elastic-1")
    scene.wait_for_steps("elastic", 10, "gates opened")
    check_scale(scene, "elastic", 2)

    before = scene.uids("elastic")
    scene.patch("elastic", restart={"maxRestarts": 3}, lifecycle={"cleanPods": "All"})
    scene.wait_for_steps("elastic", 5, "changed outside the pods")
    assert scene.uids("elastic") == before, "what does not concern the pods leaves them alone"
    with pytest.raises(ClusterError, match=r"spec\.nodes\.min.*min must be at most max"):
        scene.scale("elastic", 1)

    ungated = {"spec": {"schedulingGates": None}}
    variable = {"name": "NCCL_DEBUG", "value": "WARN"}
    scene.patch("elastic", podTemplate=ungated, network={"env": [variable]}, nodes={"min": 1})
    scene.wait("elastic", lambda s: s["attempt"] == 2 and s["nodes"]["ready"] == 2)
    scene.wait_for_steps("elastic", 5, "changed inside the pods")
    assert not set(scene.uids("elastic").values()) & set(before.values())
    environment = scene.pods("elastic")["elastic-0"]["spec"]["containers"][0]["env"]
    assert variable in environment

    before = scene.uids("elastic")
    scene.scale("elastic", 1)
    scene.wait("elastic", lambda s: s["nodes"] == {"ready": 1, "desired": 1})
    scene.wait_for_steps("elastic", 10, "scaled to 1")
    assert scene.uids("elastic").items() <= before.items(), "the one that is left goes on"
    check_scale(scene, "elastic", 1)
    scene.scale("elastic", 2)
    scene.wait("elastic", lambda s: s["nodes"] == {"ready": 2, "desired": 2})
    scene.wait_for_steps("elastic", 10, "scaled to 2")
    check_scale(scene, "elastic", 2)

    scene.patch("elastic", lifecycle={"activeDeadlineSeconds": 1})
    assert "active for more than 1 s" in scene.wait_for_condition(
        "elastic", "Failed", "DeadlineExceeded"
    )
    seconds = wait_for(
        lambda: scene.pods("elastic") == {},
        lambda: scene.told("elastic", scene.status("elastic")),
        seconds=200,  # the pods' grace, and some more
    )
    print(f"stopped with a checkpoint in {seconds:.1f} s")
    assert scene.status("elastic")["restarts"]["gang"] == 0
    steps = list(losses(scene.output))
    assert steps == list(range(1, steps[-1] + 1))
    saved = max(int(path.name[5:]) for path in (scene.output / "checkpoints").glob("step_*"))
    assert saved == steps[-1], "the stop left a checkpoint of the last step"
    assert ledger(scene.output) == wanted(steps[-1]), "no sample is lost or used twice"


def open_gate(scene: Scene, pod: str) -> None:
    wait_for(lambda: pod in scene.pods("elastic"), f"{pod} is there")
    patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    scene.kubectl("patch", "pod", pod, HERE, "--type=json", f"--patch={patch}")


def check_scale(scene: Scene, name: str, count: int) -> None:
    """Check what kubectl scale and autoscalers read: the numbers, and a selector of the training pods."""
    path = f"/apis/fluxtrain.dev/v1alpha1/namespaces/{NAMESPACE}/fluxtrainings/{name}/scale"
    found = json.loads(scene.kubectl("get", f"--raw={path}"))
    assert (found["spec"]["replicas"], found["status"]["replicas"]) == (count, count)
    selected = scene.kubectl.get("pods", f"--selector={found['status']['selector']}", HERE)
    names = {pod["metadata"]["name"] for pod in selected["items"]}
    assert names == {f"{name}-{index}" for index in range(count)}


def ledger(output: Path) -> dict[int, list[int]]:
    """Return the samples of each step, sorted, over all ranks."""
    used: dict[int, list[int]] = {}
    for path in (output / "ledger").glob("rank_*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            used.setdefault(record["step"], []).extend(record["indices"])
    return {step: sorted(indices) for step, indices in sorted(used.items())}


def wanted(num_steps: int, run: Manifest = ENDLESS) -> dict[int, list[int]]:
    """Return the samples that the first steps have to use."""
    config = resolve(run)
    batch = config.schedule.global_batch_size
    order = Order(config.seed, config.data.synthetic.train_samples, batch)
    places = np.arange(batch)
    return {k + 1: sorted(order.indices(k, places).tolist()) for k in range(num_steps)}


def test_a_job_waits_for_others_then_is_cleaned_up_and_deleted_as_its_lifecycle_says(
    scene: Scene,
) -> None:
    scene.apply("broken", run=WRONG)
    scene.apply("second", lifecycle={"startAfter": ["broken", "first"]}, **NOWHERE)
    told = scene.wait_for_condition("second", "Admitted", "WaitingForFailedJobs")
    assert "broken is Failed; recreate it, or take it out of spec.lifecycle.startAfter" in told
    assert "first does not exist" in told
    scene.patch("second", lifecycle={"startAfter": ["first"]})
    assert "first does not exist" in scene.wait_for_condition(
        "second", "Admitted", "WaitingForJobs"
    )
    one = {"run": {**RUN, "schedule": {"steps": 1}}, "nodes": {"min": 1, "max": 1}, "storage": {}}
    scene.apply("first", lifecycle={"cleanPods": "None"}, **one)
    scene.wait("second", lambda s: "first is Starting" in condition(s, "Admitted")["message"])
    assert scene.pods("second") == {}
    scene.wait("first", is_complete)
    wait_for(lambda: len(scene.pods("second")) == 3, scene.operator.log, seconds=15)
    assert condition(scene.status("second"), "Admitted")["status"] == "True"

    assert set(scene.pods("first")) == {"first-0", "first-rendezvous"}, (
        "None: logs and all are kept"
    )
    scene.patch("first", lifecycle={"cleanPods": "Running"})
    wait_for(lambda: set(scene.pods("first")) == {"first-0"}, scene.operator.log)
    scene.patch("first", lifecycle={"cleanPods": "All"})
    wait_for(lambda: scene.pods("first") == {}, scene.operator.log)
    scene.patch("first", lifecycle={"ttlSecondsAfterFinished": 0})
    wait_for(lambda: not scene.exists("first"), scene.operator.log)
    assert scene.pods("second"), "who has begun waits for nobody"


def test_a_job_that_the_operator_refused_is_deleted_after_its_time_too(scene: Scene) -> None:
    scene.apply("refused", run=WRONG, lifecycle={"ttlSecondsAfterFinished": 3})
    told = scene.wait_for_condition("refused", "Failed", "InvalidSpec")
    assert "spec.run.model.hidden_size: got 32; must be a multiple of num_heads" in told
    wait_for(lambda: not scene.exists("refused"), scene.operator.log, seconds=20)
    assert scene.exists("broken"), "without a time to live a refused job stays"


def test_a_job_that_is_active_for_too_long_fails_before_it_ever_ran(scene: Scene) -> None:
    scene.apply("late", lifecycle={"activeDeadlineSeconds": 2}, **NOWHERE)
    told = scene.wait_for_condition("late", "Failed", "DeadlineExceeded")
    assert told == "active for more than 2 s"
    wait_for(lambda: scene.pods("late") == {}, scene.operator.log)


def test_a_job_that_asks_for_more_gpus_than_there_are_has_the_schedulers_words(
    scene: Scene,
) -> None:
    scene.apply("greedy", gpusPerNode=64, storage={})
    told = scene.wait_for_condition("greedy", "Ready", "Unschedulable")
    assert told.startswith("0 of at least 1 nodes are up; greedy-0: 0/")
    assert "3 Insufficient amd.com/gpu" in told
    assert scene.status("greedy")["phase"] == "Pending"


FIXED: list[tuple[str, dict[str, Any]]] = [
    ("spec.gpusPerNode", {"gpusPerNode": 8}),
    ("spec.managedBy", {"managedBy": "example.org/other"}),
    ("spec.scheduling.gang", {"scheduling": {"gang": "volcano"}}),
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
def test_a_change_that_would_make_it_another_run_is_refused_with_its_path(
    scene: Scene, path: str, change: dict[str, Any]
) -> None:
    with pytest.raises(ClusterError) as refused:
        scene.patch("second", **change)
    said = str(refused.value)
    assert f"{path}: Invalid value" in said
    assert "stays as it was created; another value is another job" in said


def test_a_job_of_an_earlier_ones_name_is_trained_itself(scene: Scene) -> None:
    once = {"run": {**RUN, "schedule": {"steps": 2}}, "nodes": {"min": 1, "max": 1}, "storage": {}}
    keep = {"lifecycle": {"cleanPods": "None"}}
    scene.apply("again", **once, **keep)
    scene.wait("again", is_complete)

    before = scene.uids("again")
    scene.kubectl("delete", "ft", "again", HERE)  # its pods are deleted while the next one starts
    scene.apply("again", **once, **keep)
    assert scene.wait("again", is_complete)["progress"]["step"] == 2
    assert not set(scene.uids("again").values()) & set(before.values()), "pods of its own"

    scene.kubectl("delete", "ft", "again", HERE, "--cascade=orphan")
    scene.apply("again", **once, **keep)
    told = scene.wait_for_condition("again", "Ready", "NameConflict")
    assert "belongs to nobody: an earlier job left it; delete or rename it" in told
    found = scene.status("again")
    assert (found["phase"], found.get("progress")) == ("Pending", None)
    mine = "--selector=fluxtrain.dev/job=again"
    scene.kubectl("delete", "pod,cm,svc,netpol", mine, HERE, seconds=120)
    assert scene.wait("again", is_complete)["progress"]["step"] == 2
    scene.kubectl("delete", "ft", "again", HERE)


def test_a_job_of_another_controller_is_left_alone(scene: Scene) -> None:
    theirs = {"managedBy": "example.org/other"}
    scene.apply("theirs", **theirs)
    scene.apply("theirs-and-wrong", run=WRONG, **theirs)
    scene.apply("ours", run=WRONG)
    scene.wait_for_condition("ours", "Failed", "InvalidSpec")  # so the others had their turn
    for name in ("theirs", "theirs-and-wrong"):
        found = scene.kubectl.get("ft", name, HERE, "--show-managed-fields")
        assert {entry["manager"] for entry in found["metadata"]["managedFields"]} == {
            "kubectl-client-side-apply"
        }
        assert scene.pods(name) == {}
        assert "status" not in found
    objects = scene.kubectl("get", "cm,svc,netpol,pdb", "--selector=fluxtrain.dev/job=theirs", HERE)
    assert objects == ""
