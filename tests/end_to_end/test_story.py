"""The story on a real cluster: apply a job, real pods train it, any pod may go, and it completes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
from cluster import images, volumes
from cluster.errors import ClusterError, MachineError
from cluster.kubectl import NO_PROXY, Kubectl, Manifest
from cluster.places import KUBECONFIG

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/fluxtrain/trainer:test"
NAMESPACE = "story"
RUN: Manifest = {
    "preset": "micro",
    "optim": {"learning_rate": 1e-3},
    "schedule": {"steps": 300},
    "checkpoint": {"every_steps": 20},
    "evaluation": {"every_samples": 1600},
    "logging": {"every_steps": 1, "ledger": True},
}
COMMAND = """#!/bin/sh
exec {python} -m fluxtrain.cli "$@"
"""


def job(name: str, **spec: Any) -> Manifest:
    """Return a job of two nodes whose packages come from a volume, as the test's image has none."""
    mount = {"name": "packages", "mountPath": volumes.SITE_PACKAGES, "readOnly": True}
    claim = {"name": "packages", "persistentVolumeClaim": {"claimName": "packages"}}
    threads = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    container = {"name": "trainer", "volumeMounts": [mount], "env": threads}
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodes": {"min": 1, "max": 2},
            "run": RUN,
            "storage": {"output": {"persistentVolumeClaim": {"claimName": "output"}}},
            "podTemplate": {"spec": {"volumes": [claim], "containers": [container]}},
            **spec,
        },
    }


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for a cluster with our resource, our image, and volumes in a restricted namespace."""
    if "KUBECONFIG" in os.environ:
        pytest.skip("KUBECONFIG is set: images cannot be loaded into somebody's own cluster")
    mine = not KUBECONFIG.exists()
    try:
        cluster.prepare()
    except ClusterError as error:
        pytest.skip(f"the cluster's parts cannot be had here: {error}")
    try:
        found = Kubectl(cluster.up())
    except MachineError as error:
        pytest.skip(f"no cluster can run here: {error}")
    context = tmp_path_factory.mktemp("image")
    shutil.copytree(ROOT / "trainer" / "fluxtrain", context / "fluxtrain")
    (context / "bin").mkdir()
    program = context / "bin" / "fluxtrain"
    program.write_text(COMMAND.format(python="/usr/bin/python3"))
    program.chmod(0o755)
    dockerfile = Path(__file__).parent / "trainer.Dockerfile"
    images.load([images.build(IMAGE, dockerfile, context, {"BASE": images.BASE_IMAGE})])
    found("apply", "--server-side", f"--filename={ROOT / 'manifests' / 'crd.yaml'}")
    found("wait", "--for=condition=Established", "crd/fluxtrainings.fluxtrain.dev")
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    found.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": enforce},
        }
    )
    yield found
    if mine:
        cluster.down()


@pytest.fixture
def output(tmp_path: Path, kubectl: Kubectl) -> Iterator[Path]:
    """Return the folder that is the job's output volume."""
    folder = tmp_path / "output"
    folder.mkdir()
    shutil.chown(folder, images.USER_ID, images.USER_ID)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(parent.stat().st_mode | 0o055)
    found = [
        *volumes.site_packages("packages", NAMESPACE),
        *volumes.host_folder("output", folder, NAMESPACE, read_only=False),
    ]
    kubectl.apply(*found, namespace=NAMESPACE)
    yield folder
    kubectl("delete", "fluxtraining", "--all", f"--namespace={NAMESPACE}", seconds=120)
    kubectl("delete", "pod", "--all", f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
    kubectl("delete", "pvc", "--all", f"--namespace={NAMESPACE}", seconds=120)
    kubectl("delete", "pv", f"{NAMESPACE}-packages", f"{NAMESPACE}-output", seconds=120)


class Operator:
    """The operator as a process of this machine, so that it can be killed and started anew."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self._kubectl, self._folder, self._count = kubectl, folder, 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._count += 1
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with (self._folder / f"operator_{self._count}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fluxtrain_operator", f"--image={IMAGE}"),
                    *(f"--namespace={NAMESPACE}", f"--lease-namespace={NAMESPACE}"),
                    *(f"--identity=test-{self._count}", "--address=127.0.0.1", f"--port={port}"),
                ],
                env={
                    **os.environ,
                    "KUBECONFIG": str(self._kubectl.kubeconfig),
                    "NO_PROXY": NO_PROXY,
                },
                stdout=log,
                stderr=log,
            )

    def stop(self, signum: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)
            self.process.wait(timeout=40)

    def log(self) -> str:
        files = sorted(self._folder.glob("operator_*.log"))
        return "\n".join(path.read_text()[-4000:] for path in files)


@pytest.fixture
def operator(kubectl: Kubectl, output: Path, tmp_path: Path) -> Iterator[Operator]:
    found = Operator(kubectl, tmp_path)
    found.start()
    yield found
    found.stop()


def status(kubectl: Kubectl, name: str) -> Manifest:
    found: Manifest = kubectl.get("ft", name, f"--namespace={NAMESPACE}").get("status", {})
    return found


def wait_until(
    done: Callable[[Manifest], bool],
    kubectl: Kubectl,
    name: str,
    operator: Operator,
    seconds: float = 240,
) -> Manifest:
    """Return the status once ``done`` says so; fail with everything that helps where it never does."""
    deadline = time.monotonic() + seconds
    while True:
        found = status(kubectl, name)
        if done(found):
            return found
        if time.monotonic() > deadline or found.get("phase") == "Failed":
            pytest.fail(
                f"{json.dumps(found, indent=1)}\n{operator.log()}\n"
                + kubectl("get", "pods,events", "-o", "wide", f"--namespace={NAMESPACE}")
                + _logs(kubectl, name)
            )
        time.sleep(0.5)


def _logs(kubectl: Kubectl, name: str) -> str:
    found = []
    for pod in (f"{name}-0", f"{name}-1", f"{name}-rendezvous"):
        try:
            found.append(kubectl("logs", "--tail=15", pod, f"--namespace={NAMESPACE}"))
        except ClusterError as error:
            found.append(f"{pod}: {error}")
    return "\n".join(found)


def step(found: Manifest) -> int:
    return int((found.get("progress") or {}).get("step", 0))


def is_complete(found: Manifest) -> bool:
    return found.get("phase") == "Complete"


def losses(folder: Path) -> dict[int, float]:
    whole, _, _ = (folder / "metrics.jsonl").read_text().rpartition("\n")
    records = map(json.loads, whole.splitlines())
    return {r["step"]: r["train_loss"] for r in records if "train_loss" in r}


def laptop(folder: Path) -> Path:
    """Run the same training on this machine; return its output."""
    (folder / "job.json").write_text(json.dumps({**job("laptop"), "metadata": {"name": "laptop"}}))
    output = folder / "laptop"
    subprocess.run(
        [
            *(sys.executable, "-m", "fluxtrain.cli", "run", str(folder / "job.json")),
            *("--output", str(output), "--logging.metrics_port=0"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return output


def test_a_job_runs_from_apply_to_complete_whatever_pod_is_lost(
    kubectl: Kubectl, operator: Operator, output: Path, tmp_path: Path
) -> None:
    kubectl.apply(job("story"), namespace=NAMESPACE)
    wait_until(lambda s: step(s) >= 10, kubectl, "story", operator)
    lines = kubectl("get", "ft", "story", f"--namespace={NAMESPACE}").splitlines()
    assert lines[0].split() == [
        "NAME",
        "PHASE",
        "NODES",
        "STEP",
        "LOSS",
        "EVAL",
        "SAMPLES/S",
        "RESTARTS",
        "AGE",
    ]

    for victim in ("story-0", "story-1", "story-rendezvous"):
        kubectl("delete", "pod", victim, "--now", f"--namespace={NAMESPACE}")
        began, gone_at = time.monotonic(), max(losses(output))
        wait_until(
            lambda s, at=gone_at: max(losses(output)) > at + 10 or is_complete(s),
            kubectl,
            "story",
            operator,
        )
        print(f"{victim} gone: 10 further steps after {time.monotonic() - began:.1f} s")
    operator.stop(signal.SIGKILL)
    operator.start()

    found = wait_until(is_complete, kubectl, "story", operator)
    conditions = {c["type"]: c["status"] for c in found["conditions"]}
    assert (conditions["Complete"], conditions["Failed"]) == ("True", "False")
    assert found["restarts"]["gang"] == 0, "a deleted pod is nobody's fault"
    ours = losses(output)
    assert list(ours) == list(range(1, 301))
    alone = losses(laptop(tmp_path))
    assert ours == pytest.approx(alone, rel=1e-4)


def test_a_suspended_job_leaves_a_checkpoint_and_goes_on_where_it_was(
    kubectl: Kubectl, operator: Operator, output: Path
) -> None:
    kubectl.apply(job("pause"), namespace=NAMESPACE)
    wait_until(lambda s: step(s) >= 10, kubectl, "pause", operator)
    suspend(kubectl, True)
    wait_until(lambda s: s.get("phase") == "Suspended", kubectl, "pause", operator)
    deadline = time.monotonic() + 60
    while kubectl.get("pods", f"--namespace={NAMESPACE}")["items"]:
        assert time.monotonic() < deadline, "a suspended job keeps no pods"
        time.sleep(0.5)
    saved = max(int(path.name[5:]) for path in (output / "checkpoints").glob("step_*"))
    assert saved == max(losses(output)), "the stop left a checkpoint of the last step"
    suspend(kubectl, False)
    wait_until(is_complete, kubectl, "pause", operator)
    assert list(losses(output)) == list(range(1, 301))


def suspend(kubectl: Kubectl, value: bool) -> None:
    patch = json.dumps({"spec": {"lifecycle": {"suspend": value}}})
    kubectl("patch", "ft", "pause", f"--namespace={NAMESPACE}", "--type=merge", f"--patch={patch}")


def test_a_job_that_cannot_work_fails_with_its_code_and_last_words(
    kubectl: Kubectl, operator: Operator, output: Path
) -> None:
    lost = {**RUN, "data": {"source": "encoded"}}
    kubectl.apply(job("lost", run=lost, nodes={"min": 1, "max": 1}), namespace=NAMESPACE)
    deadline = time.monotonic() + 120
    while (found := status(kubectl, "lost")).get("phase") != "Failed":
        assert time.monotonic() < deadline, f"{found}\n{operator.log()}\n{_logs(kubectl, 'lost')}"
        time.sleep(0.5)
    assert found["exitCode"] == 2
    assert "no encoded data set is here" in found["lastError"]
    told = kubectl("describe", "ft", "lost", f"--namespace={NAMESPACE}")
    assert "Warning" in told


def test_what_a_field_means_is_explained_by_kubectl(kubectl: Kubectl) -> None:
    deadline = time.monotonic() + 60
    while True:  # the API server publishes a new resource's texts some seconds after it serves it
        try:
            told = kubectl("explain", "ft.spec.run.optim.learning_rate")
            break
        except ClusterError:
            assert time.monotonic() < deadline
            time.sleep(1)
    assert "Base learning rate, reached after warm-up." in told


WITH_THE_PRESET = (
    "spec.run.schedule.min_learning_rate",
    "spec.run.model.num_heads",
    "spec.run.model.axes_dim",
)
"""Fields whose value is wrong only beside the preset's, which the API server does not know."""


def test_what_only_the_operator_can_refuse_fails_with_the_path(
    kubectl: Kubectl, operator: Operator, output: Path
) -> None:
    kubectl.apply(job("heads", run={**RUN, "model": {"num_heads": 5}}), namespace=NAMESPACE)
    deadline = time.monotonic() + 30
    while (found := status(kubectl, "heads")).get("phase") != "Failed":
        assert time.monotonic() < deadline, f"{found}\n{operator.log()}"
        time.sleep(0.2)
    told = next(c["message"] for c in found["conditions"] if c["type"] == "Failed")
    assert "spec.run.model.hidden_size: got 32; must be a multiple of num_heads" in told


def refusals() -> list[tuple[str, Any]]:
    """Return changes of a good job that the API server itself must refuse, by the path it must name."""
    path = ROOT / "tests" / "contract" / "test_bad_files.py"
    spec = importlib.util.spec_from_file_location("bad_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours = (
        "not yet",
        "nan",
        "inf",
        "metadata",
        "apiVersion",
        "kind",
    )  # ours, YAML's or every API's
    return [
        (path, value)
        for path, value, line in module.BAD_FIELDS
        if path.startswith("spec")
        and path not in WITH_THE_PRESET
        and value is not None  # Kubernetes takes null for a field that is left out
        and value is not module.MISSING
        and not any(word in line for word in ours)
    ]


@pytest.mark.parametrize(("path", "value"), refusals())
def test_the_api_server_refuses_a_bad_field_with_its_path(
    kubectl: Kubectl, path: str, value: Any
) -> None:
    wrong = {**job("bad"), "spec": {"run": {"preset": "micro"}}}
    *above, last = path.split(".")
    place: Any = wrong
    for part in above:
        place = place.setdefault(part, {})
    place[last] = value
    with pytest.raises(ClusterError) as refused:
        kubectl(
            "create",
            "--dry-run=server",
            "--validate=strict",
            "--filename=-",
            stdin=json.dumps(wrong),
        )
    said = str(refused.value)
    assert path.rpartition(".")[0] in said or last in said, said


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_api_server_accepts_the_examples(kubectl: Kubectl, path: Path) -> None:
    kubectl("create", "--dry-run=server", "--validate=strict", f"--filename={path}")
