"""A result from one file on a real cluster: eleven runs, of which one fails, status, package and review."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.kubectl import Manifest
from cluster.layout import BIN
from tests.api_server.client import Kubectl
from tests.end_to_end import slow_steps, stage
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import is_complete, job, wait_for
from tests.faults.injections.processes import RANK, pids

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK, EXIT_USAGE

pytestmark = pytest.mark.proof

NAMESPACE, NAME, RUNS = "campaign", "july", 11
VICTIM = f"{NAME}-01"
"""The run that fails."""
RUN: Manifest = {
    "preset": "micro",
    "data": {"synthetic": {"train_samples": 64, "validation_samples": 64, "classes": 1}},
    "optim": {"learning_rate": 3e-2},
    "schedule": {"steps": 400, "warmup_steps": 2},
    "evaluation": {"every_samples": 160, "target_loss": 0.586, "at_end": False},
    "logging": {
        "mlperf": {"organization": "example-org", "platform": "micro", "status": "research"}
    },
}
"""The micro preset on one latent: it reaches MLPerf's target in some fifty steps."""


def file_of_runs() -> Manifest:
    """Return the FluxTraining that all runs are made from."""
    manifest = job(NAME, run=RUN, nodes={"min": 1, "max": 1})
    (container,) = manifest["spec"]["podTemplate"]["spec"]["containers"]
    variables = [each for each in container["env"] if each["name"] != slow_steps.SECONDS]
    container["env"] = variables
    return manifest


@pytest.fixture
def jobs(kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    jobs = Jobs(kubectl, tmp_path, NAMESPACE)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, jobs.output)
    jobs.operator.start()
    try:
        yield jobs
    finally:
        jobs.operator.stop()
        stage.clear(kubectl, NAMESPACE)


def abort(jobs: Jobs, name: str) -> None:
    """Let a trainer of the run ``name`` fail after its first evaluation."""
    log = jobs.output / NAME / name / "mlperf.log"

    def evaluated() -> bool:
        return log.exists() and "eval_stop" in log.read_text()

    wait_for(evaluated, lambda: jobs.debug_text(name, jobs.status(name)), seconds=240)
    (pid,) = pids(jobs.pods(name)[f"{name}-0"], RANK)
    os.kill(pid, signal.SIGABRT)


def test_runs_from_one_file_become_a_package_that_passes_its_review(
    jobs: Jobs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    path = tmp_path / "july.yaml"
    path.write_text(yaml.safe_dump(file_of_runs()))

    def fluxtrain(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["mlperf", *arguments])
        return code, "".join(capfd.readouterr())

    campaign = ("campaign", str(path), f"--runs={RUNS}", "--parallel=3", "--apply", jobs.here)
    code, text = fluxtrain(*campaign)
    assert code == EXIT_OK, text
    selector = f"--selector=campaign={NAME}"
    listed = jobs.kubectl.get("ft", selector, jobs.here)["items"]
    names = [each["metadata"]["name"] for each in listed]
    assert names == [f"{NAME}-{number:02}" for number in range(RUNS)]

    code, text = fluxtrain(*campaign)
    assert (code, text.count(" unchanged")) == (EXIT_OK, RUNS), text
    again = jobs.kubectl.get("ft", selector, jobs.here)["items"]
    told = ("uid", "generation")
    assert [[each["metadata"][key] for key in told] for each in again] == [
        [each["metadata"][key] for key in told] for each in listed
    ]
    abort(jobs, VICTIM)

    def ended() -> bool:
        phases = {
            each["metadata"]["name"]: each.get("status", {}).get("phase")
            for each in jobs.kubectl.get("ft", selector, jobs.here)["items"]
        }
        failed = [name for name, phase in phases.items() if phase == "Failed"]
        assert set(failed) <= {VICTIM}, jobs.debug_text(failed[0], {})
        return set(phases.values()) == {"Complete", "Failed"}

    wait_for(ended, lambda: jobs.debug_text(names[0], jobs.status(names[0])), seconds=600)
    trained = time.monotonic() - began
    complete = [name for name in names if is_complete(jobs.status(name))]
    assert complete == [name for name in names if name != VICTIM]

    code, text = fluxtrain("campaign", "status", selector, jobs.here)
    assert code == EXIT_OK, text
    assert f"{RUNS} runs: {RUNS} ended, 10 reached the target after " in text
    assert f"{VICTIM} failed: no run of a result, but in its record" in text
    assert "open division: no comparison with the reference" in text
    print(text)

    jobs.kubectl("delete", "pod", f"{names[3]}-0", "--now", jobs.here)
    options = ("package", selector, jobs.here)
    code, text = fluxtrain(*options)
    assert (code, "system.yaml" in text) == (EXIT_USAGE, True), text
    system = tmp_path / "system.yaml"
    system.write_text(system.read_text().replace(": null", ': "of a test"'))
    code, text = fluxtrain(*options)
    print(text)
    assert code == EXIT_OK, text
    assert "review: passed, 0 findings, 0 waived" in text
    organisation = tmp_path / "submission" / "example-org"
    logs = sorted(organisation.glob("results/micro/flux1/result_*.txt"))
    volumes = [(jobs.output / NAME / name / "mlperf.log").read_text() for name in complete]
    assert [log.read_text() for log in logs] == volumes
    (failed,) = organisation.glob("benchmarks/flux1/implementations/*/other_runs/*")
    assert failed.read_text() == (jobs.output / NAME / VICTIM / "mlperf.log").read_text()
    assert (
        f"- {VICTIM}, `other_runs/{failed.name}`" in (failed.parents[1] / "README.md").read_text()
    )
    seeds = {
        json.loads(each.split("MLLOG ", 1)[1])["value"]
        for text in volumes
        for each in text.splitlines()
        if '"key": "seed"' in each
    }
    assert len(seeds) == len(complete) == 10
    page = tmp_path / "review.html"
    code, text = fluxtrain("review", str(organisation), "--html", str(page))
    assert code == EXIT_OK, text
    assert page.read_text().count("<polyline") >= len(complete), "a curve of each run"
    print(f"{RUNS} runs in {trained:.0f} s, reviewed after {time.monotonic() - began:.0f} s")
