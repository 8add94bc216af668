"""The main scenario on a real cluster: apply a job, delete any of its pods, and it completes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl
from cluster.layout import BIN
from tests.end_to_end import stage
from tests.end_to_end.stage import (
    RUN,
    Operator,
    is_complete,
    job,
    losses,
    step,
    wait_for,
    wait_until,
)

from fluxtrain.mlperf.facts import SYSTEM_KEY
from fluxtrain.mlperf.finished_jobs import collect
from fluxtrain.mlperf.submission import FinishedRun

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

NAMESPACE = "story"


@pytest.fixture
def output(tmp_path: Path, kubectl: Kubectl) -> Iterator[Path]:
    """Return the folder that is the job's output volume."""
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, tmp_path / "output")
    yield tmp_path / "output"
    stage.clear(kubectl, NAMESPACE)


@pytest.fixture
def operator(kubectl: Kubectl, output: Path, tmp_path: Path) -> Iterator[Operator]:
    operator = Operator(kubectl, NAMESPACE, tmp_path)
    operator.start()
    yield operator
    operator.stop()


def status(kubectl: Kubectl, name: str) -> dict[str, Any]:
    return stage.status(kubectl, NAMESPACE, name)


def wait_until_failed(operator: Operator, name: str, seconds: float) -> dict[str, Any]:
    def debug() -> str:
        logs = stage.logs(operator.kubectl, NAMESPACE, name)
        return f"{status(operator.kubectl, name)}\n{operator.log()}\n{logs}"

    wait_for(
        lambda: status(operator.kubectl, name).get("phase") == "Failed", debug, seconds=seconds
    )
    return status(operator.kubectl, name)


def test_a_job_completes_although_each_of_its_pods_is_deleted(
    kubectl: Kubectl,
    operator: Operator,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted = job("story")
    submitted["metadata"]["labels"] = {"submission": "story"}
    kubectl.apply(submitted, namespace=NAMESPACE)
    wait_until(lambda s: step(s) >= 10, operator, "story")
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
        began, step_at_deletion = time.monotonic(), max(losses(output))
        wait_until(
            lambda s, at=step_at_deletion: max(losses(output)) > at + 10 or is_complete(s),
            operator,
            "story",
        )
        print(f"{victim} deleted: 10 further steps after {time.monotonic() - began:.1f} s")
    operator.stop(signal.SIGKILL)
    operator.start()

    final = wait_until(is_complete, operator, "story")
    conditions = {c["type"]: c["status"] for c in final["conditions"]}
    assert (conditions["Complete"], conditions["Failed"]) == ("True", "False")
    assert final["restarts"]["gang"] == 0, "a deleted pod does not restart the gang"
    ours = losses(output)
    assert list(ours) == list(range(1, 301))
    alone = losses(stage.laptop(tmp_path))
    assert ours == pytest.approx(alone, rel=1e-4)

    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    (folder,) = collect("submission=story", NAMESPACE, tmp_path)
    run = FinishedRun.read(folder)
    assert run.samples == 300 * 16, "the log of the last rank 0 is complete"
    assert run.values["init_start"] is None
    assert run.values[SYSTEM_KEY]["number_of_nodes"] == "2"


def test_a_suspended_job_saves_a_checkpoint_and_resumes(
    kubectl: Kubectl, operator: Operator, output: Path
) -> None:
    kubectl.apply(job("pause"), namespace=NAMESPACE)
    wait_until(lambda s: step(s) >= 10, operator, "pause")
    stage.suspend(kubectl, NAMESPACE, "pause", True)
    wait_until(lambda s: s.get("phase") == "Suspended", operator, "pause")
    here = f"--namespace={NAMESPACE}"
    message = "a suspended job keeps no pods"
    wait_for(lambda: not kubectl.get("pods", here)["items"], message, seconds=60)
    saved = max(int(path.name[5:]) for path in (output / "checkpoints").glob("step_*"))
    assert saved == max(losses(output)), "a checkpoint of the last step is saved"
    stage.suspend(kubectl, NAMESPACE, "pause", False)
    wait_until(is_complete, operator, "pause")
    assert list(losses(output)) == list(range(1, 301))


def test_a_job_with_missing_data_fails_with_exit_code_and_message(
    kubectl: Kubectl, operator: Operator, output: Path
) -> None:
    lost = {**RUN, "data": {"source": "encoded"}}
    kubectl.apply(job("lost", run=lost, nodes={"min": 1, "max": 1}), namespace=NAMESPACE)
    failed = wait_until_failed(operator, "lost", seconds=120)
    assert failed["exitCode"] == 2
    assert "no encoded data set is here" in failed["lastError"]
    description = kubectl("describe", "ft", "lost", f"--namespace={NAMESPACE}")
    assert "Warning" in description


def test_kubectl_explains_fields(kubectl: Kubectl) -> None:
    deadline = time.monotonic() + 60
    while True:  # the API server publishes descriptions some seconds after it serves a new resource
        try:
            description = kubectl("explain", "ft.spec.run.optim.learning_rate")
            break
        except ClusterError:
            assert time.monotonic() < deadline
            time.sleep(1)
    assert "Learning rate after the warm-up." in description


def test_a_spec_that_only_the_operator_can_refuse_fails_with_the_path(
    kubectl: Kubectl, operator: Operator, output: Path
) -> None:
    kubectl.apply(job("heads", run={**RUN, "model": {"num_heads": 5}}), namespace=NAMESPACE)
    failed = wait_until_failed(operator, "heads", seconds=30)
    message = next(c["message"] for c in failed["conditions"] if c["type"] == "Failed")
    assert "spec.run.model.hidden_size: got 32; must be a multiple of num_heads" in message
