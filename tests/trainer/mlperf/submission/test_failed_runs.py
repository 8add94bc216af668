"""Runs that failed stay in the record of a result: named, with their logs, and not among its ten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.mlperf.good_run import write_run
from tests.trainer.mlperf.submission.finished_runs import answers, ten_runs

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.mlperf import campaign
from fluxtrain.mlperf import jobs as kubectl_calls
from fluxtrain.mlperf.evidence import FAILED_FILE
from fluxtrain.mlperf.review.review import all_rule_findings
from fluxtrain.mlperf.review.tree import read_results

pytestmark = pytest.mark.slow

FAILED = {"type": "Failed", "status": "True", "reason": "ProgramFailed", "message": "of a bad node"}
Kubectl = Callable[..., str]


def unfinished(folder: Path, seed: int, evaluations: int = 3) -> Path:
    """Write the output of a run that failed after some evaluations."""
    write_run(folder, seed, evaluations, reached=False)
    log = folder / "mlperf.log"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    return folder


def job(name: str, phase: str, **status: Any) -> dict[str, Any]:
    claim = {"persistentVolumeClaim": {"claimName": "out"}}
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name},
        "spec": {
            "nodes": {"min": 2, "max": 2},
            "gpusPerNode": 8,
            "storage": {"output": claim, "outputFolder": f"july/{name}"},
            "run": {},
        },
        "status": {"phase": phase, "revision": f"{name}-1", **status},
    }


def cluster(outputs: Path, jobs: list[dict[str, Any]]) -> Kubectl:
    """Return a kubectl of ``jobs`` whose volume is the folder ``outputs``; there are no pods."""

    def kubectl(namespace: str | None, *arguments: str, stdin: str = "") -> str:
        match arguments[:2]:
            case ("get", "fluxtrainings"):
                return json.dumps({"items": jobs})
            case ("get", "pods"):
                return json.dumps({"items": []})
            case ("get", "configmap"):
                return json.dumps(
                    {"data": {"pods.json": '{"trainer": {"containers": [{"image": "i"}]}}'}}
                )
            case ("exec", _):
                names = [Path(folder).name for folder in arguments if folder.startswith("/output/")]
                return json.dumps(
                    {
                        f"/output/july/{name}": {path.name: path.read_text() for path in found}
                        for name in names
                        if (found := sorted((outputs / name).glob("*")))
                    }
                )
        return ""

    return kubectl


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kubectl], None]:
    def use(kubectl: Kubectl) -> None:
        for module in (campaign, kubectl_calls):
            monkeypatch.setattr(module, "kubectl", kubectl)

    return use


def test_a_campaign_with_failed_jobs_is_packaged_and_they_are_in_its_record(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    use: Callable[[Kubectl], None],
) -> None:
    outputs = tmp_path / "volume"
    jobs = [job(Path(run).name, "Complete") for run in ten_runs(outputs)]
    unfinished(outputs / "run_x", 200)
    failed = job("run_x", "Failed", conditions=[FAILED], exitCode=1)
    never = job("run_y", "Failed", conditions=[FAILED | {"message": "no image"}])
    use(cluster(outputs, [*jobs, failed, never]))
    monkeypatch.chdir(tmp_path)
    options = ("--selector=campaign=july", f"--system={answers(tmp_path)}")
    code = main(["mlperf", "package", *options])
    output = capsys.readouterr().out
    assert code == EXIT_OK, output
    assert "failed, which stays in the record: run_x: ProgramFailed: of a bad node" in output
    assert "review: passed, 0 findings, 0 waived" in output
    organisation = tmp_path / "submission/example-org"
    assert len(list(organisation.glob("results/*/flux1/result_*.txt"))) == 10
    code = organisation / "benchmarks/flux1/implementations/8xMI300X_fluxtrain"
    enclosed = (code / "other_runs/failed_00.txt").read_text()
    assert enclosed == (outputs / "run_x/mlperf.log").read_text()
    readme = (code / "README.md").read_text()
    log = "`other_runs/failed_00.txt`, seed 200"
    assert f"- run_x, {log}: ProgramFailed: of a bad node (exit code 1)" in readme
    assert "- run_y, no log: ProgramFailed: no image\n" in readme
    assert main(["mlperf", "review", str(organisation)]) == EXIT_OK


def test_a_failed_job_whose_log_has_an_end_is_a_run_like_others(
    tmp_path: Path, use: Callable[[Kubectl], None]
) -> None:
    write_run(tmp_path / "volume/a", 7, 3, reached=False)
    use(cluster(tmp_path / "volume", [job("a", "Failed", conditions=[FAILED], exitCode=1)]))
    (tmp_path / "runs").mkdir()
    collected = campaign.collect("campaign=july", None, tmp_path / "runs")
    assert (collected.folders, collected.failed) == ([tmp_path / "runs/a"], [])


@pytest.mark.parametrize("phase", ["Running", "Suspended", "Pending"])
def test_a_job_that_is_not_over_is_refused(
    phase: str, tmp_path: Path, use: Callable[[Kubectl], None]
) -> None:
    use(cluster(tmp_path, [job("a", phase)]))
    with pytest.raises(ConfigError, match=f"a: got '{phase}'; must be Complete or Failed"):
        campaign.collect("campaign=july", None, tmp_path)


def test_nine_runs_and_a_failed_one_are_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    use: Callable[[Kubectl], None],
) -> None:
    outputs = tmp_path / "volume"
    jobs = [job(Path(run).name, "Complete") for run in ten_runs(outputs)[:9]]
    use(cluster(outputs, [*jobs, job("run_9", "Failed", conditions=[FAILED])]))
    shutil.rmtree(outputs / "run_9")
    monkeypatch.chdir(tmp_path)
    assert main(["mlperf", "package", "--selector=campaign=july"]) == EXIT_USAGE
    told = capsys.readouterr()
    assert "run_9: ProgramFailed: of a bad node" in told.out
    assert "9 runs; needed: 10" in told.err
    assert "campaign FILE --runs N --apply" in told.err


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the organisation of a package whose tenth run did not converge, beside a failed one."""
    folder = tmp_path_factory.mktemp("failed")
    runs = ten_runs(folder / "runs")
    shutil.rmtree(runs[9])
    write_run(Path(runs[9]), 109, 30, reached=False)
    failed = unfinished(folder / "lost", 200)
    options = ["--system", str(answers(folder)), "--output", str(folder / "out")]
    options += [f"--failed={failed}=a power cut", "--waive=package-checkers=one was too slow"]
    assert main(["mlperf", "package", *runs, *options]) == EXIT_OK
    return folder / "out/example-org"


@pytest.mark.parametrize(
    ("change", "evaluations", "finding"),
    [
        ({}, 3, None),
        ({"exit_code": 3}, 3, "2 runs did not reach the target: result_9.txt, lost"),
        ({}, 29, None),
        ({}, 30, "2 runs did not reach the target: result_9.txt, lost"),
    ],
    ids=["early", "diverged", "as long as the slowest", "slower than all"],
)
def test_a_failure_hides_no_run_that_did_not_converge(
    packaged: Path,
    tmp_path: Path,
    change: dict[str, Any],
    evaluations: int,
    finding: str | None,
) -> None:
    organisation = shutil.copytree(packaged, tmp_path / "org")
    code = organisation / "benchmarks/flux1/implementations/8xMI300X_fluxtrain"
    record = json.loads((code / FAILED_FILE).read_text())
    (told,) = record["runs"]
    assert (told["name"], told["reason"]) == ("lost", "a power cut")
    (code / FAILED_FILE).write_text(json.dumps({"runs": [told | change]}))
    log = unfinished(tmp_path / "longer", 200, evaluations) / "mlperf.log"
    shutil.copyfile(log, code / "other_runs/failed_00.txt")
    (result,) = read_results([organisation])
    found = [(each.rule, each.text) for each in all_rule_findings(result)]
    assert found == ([] if finding is None else [("converged-runs", finding)])


@pytest.mark.parametrize("text", ['{"runs": 1}', '{"runs": [1]}', "[]", "{"])
def test_a_record_that_cannot_be_read_is_named(
    packaged: Path, tmp_path: Path, mlperf: Callable[..., str], text: str
) -> None:
    organisation = shutil.copytree(packaged, tmp_path / "org")
    (path,) = organisation.rglob(FAILED_FILE)
    path.write_text(text)
    assert str(path) in mlperf(EXIT_USAGE, "review", organisation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ended=a power cut", "its log has a run_stop"),
        ("nowhere=a power cut", "no output folder"),
        ("ended", "must be RUN=REASON"),
        ("ended= ", "must be RUN=REASON"),
    ],
)
def test_wrong_failed_runs_are_refused(
    given: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mlperf: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "ended", 7, 3)
    assert message in mlperf(EXIT_USAGE, "package", "ended", f"--failed={given}")
