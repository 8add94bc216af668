"""The main scenario on a real cluster: apply a job, delete any of its pods, and it completes."""

from __future__ import annotations

import csv
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.errors import ClusterError
from cluster.layout import BIN
from tests.api_server.client import Kubectl, Plugin
from tests.end_to_end import stage
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import RUN, is_complete, job, losses, wait_for
from tests.faults.injections.processes import RANK, pids

from fluxtrain.mlperf.campaign import collect
from fluxtrain.mlperf.evidence import read_finished_run
from fluxtrain.mlperf.log_lines import NO_TARGET

NAMESPACE = "story"
STEPS: int = RUN["schedule"]["steps"]
BENCHMARK = {
    "preset": "micro",
    "task": "benchmark",
    "benchmark": {"micro_batch_sizes": [2, 4], "scaling": ["weak"], "steps": 5, "warmup_steps": 1},
}
"""Two batches on two nodes, and the faster one on one node."""
LOST = {**RUN, "data": {"source": "encoded"}}
"""A run whose data is missing."""


@pytest.fixture(scope="module")
def jobs(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Return the jobs of all tests, applied at once."""
    jobs = Jobs(kubectl, tmp_path_factory.mktemp("story"), NAMESPACE)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, jobs.output)
    submitted = job("story")
    submitted["metadata"]["labels"] = {"submission": "story"}
    kubectl.apply(submitted, namespace=NAMESPACE)
    stage.make_output(kubectl, NAMESPACE, "speeds", jobs.output.with_name("speeds"))
    speeds = {"output": {"persistentVolumeClaim": {"claimName": "speeds"}}}
    jobs.apply("speed", run=BENCHMARK, nodes={"min": 2, "max": 2}, storage=speeds)
    jobs.apply("lost", run=LOST, nodes={"min": 1, "max": 1}, storage={})
    jobs.apply("heads", run={**RUN, "model": {"num_heads": 5}}, storage={})
    jobs.operator.start()
    try:
        yield jobs
    finally:
        jobs.operator.stop()
        stage.clear(kubectl, NAMESPACE)


def test_a_job_completes_although_each_of_its_pods_is_deleted(
    kubectl: Kubectl, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.wait_for_steps("story", 10, "applied")
    for victim in ("story-0", "story-1", "story-rendezvous"):
        kubectl("delete", "pod", victim, "--now", jobs.here)
        jobs.wait_for_steps("story", 10, f"{victim} deleted")
    jobs.wait_for_nodes("story", 2)
    plugin = Plugin(kubectl, tmp_path, NAMESPACE)
    check_commands(plugin, jobs)
    jobs.operator.stop(signal.SIGKILL)
    jobs.operator.start()

    final = jobs.wait("story", is_complete)
    conditions = {c["type"]: c["status"] for c in final["conditions"]}
    assert (conditions["Complete"], conditions["Failed"]) == ("True", "False")
    assert final["restarts"]["gang"] == 0, "a deleted pod does not restart the gang"
    ours = losses(jobs.output)
    assert list(ours) == list(range(1, STEPS + 1))
    alone = losses(stage.laptop(tmp_path))
    assert ours == pytest.approx(alone, rel=1e-4)

    whole = (jobs.output / "mlperf.log").read_text()
    assert plugin.said("logs", "story", "--mlperf") == whole, "although pod 0 was replaced"
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    (folder,) = collect("submission=story", NAMESPACE, tmp_path).folders
    run = read_finished_run(folder)
    assert run.outcome == NO_TARGET
    stop = run.first("run_stop")
    assert stop is not None
    assert stop.samples == STEPS * 16, "the log of the last rank 0 is complete"
    assert run.first("init_start") is not None
    assert run.system["number_of_nodes"] == "2"


def check_commands(plugin: Plugin, jobs: Jobs) -> None:
    """Check what the plugin of kubectl says of a job that trains, and of one with a frozen rank."""
    assert "trains on 2 nodes at step " in plugin.said("why", "story")
    times = plugin.said("timeline", "story")
    assert all(reason in times for reason in ("Started", "FirstStep", "story-0", "story-1"))
    (pid,) = pids(jobs.pods("story")["story-1"], RANK)
    os.kill(pid, signal.SIGSTOP)
    try:
        report = plugin.said("stacks", "story")
    finally:
        os.kill(pid, signal.SIGCONT)
    sections = re.findall(r"^== rank (\d), pod (story-\d)(.*)$", report, re.MULTILINE)
    assert sorted(rank for rank, _, _ in sections) == ["0", "1"]
    notes = {pod: note for _, pod, note in sections}
    assert notes["story-0"] == "", "it prints its stacks"
    assert re.fullmatch(r": process \d+ is stopped by a signal", notes["story-1"])
    assert "Current thread" in report


def test_a_benchmark_of_two_nodes_leaves_its_results_in_the_volume(jobs: Jobs) -> None:
    final = jobs.wait("speed", is_complete)
    assert final["progress"]["step"] == 3, "trials"
    assert final["restarts"]["charged"] == 0, final
    with (jobs.output.with_name("speeds") / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["num_ranks"], row["status"]) for row in rows] == [("2", "done")] * 2 + [
        ("1", "done")
    ]
    assert {row["micro_batch_size"] for row in rows[:2]} == {"2", "4"}
    assert all(float(row["images_per_second_per_gpu"]) > 0 for row in rows)
    assert (jobs.output.with_name("speeds") / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    logs = [jobs.kubectl("logs", f"speed-{node}", jobs.here) for node in (0, 1)]
    assert sum("images/s/rank" in log for log in logs) == 1, "rank 0 prints the table"


def test_a_job_with_missing_data_fails_with_exit_code_and_message(
    kubectl: Kubectl, jobs: Jobs
) -> None:
    failed = jobs.wait("lost", lambda s: s.get("phase") == "Failed")
    assert failed["exitCode"] == 2
    assert "no encoded data set is here" in failed["lastError"]
    assert "Warning" in kubectl("describe", "ft", "lost", jobs.here)


def test_a_spec_that_only_the_operator_can_refuse_fails_with_the_path(jobs: Jobs) -> None:
    message = jobs.wait_for_condition("heads", "Failed", "InvalidSpec")
    assert "spec.run.model.hidden_size: got 32; must be a multiple of num_heads" in message


def test_kubectl_explains_fields(kubectl: Kubectl) -> None:
    def description() -> str:
        try:
            return kubectl("explain", "ft.spec.run.optim.learning_rate")
        except ClusterError as error:  # it is published some seconds after the resource is served
            return str(error)

    wait_for(lambda: "Learning rate after the warm-up." in description(), description, seconds=60)
