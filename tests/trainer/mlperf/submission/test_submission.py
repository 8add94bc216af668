"""Logs become a package that all of MLCommons' tools accept; wrong runs and answers are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trainer.mlperf.good_run import CONVERGED, write_run
from tests.trainer.mlperf.submission.finished_runs import answers, ten_runs

from fluxtrain.cli import main
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.mlperf import compliance
from fluxtrain.mlperf.compliance import run_tool
from fluxtrain.mlperf.evidence import WAIVERS_FILE
from fluxtrain.mlperf.facts import machine_facts
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.mlperf.review.package import FIELDS

pytestmark = pytest.mark.slow


@dataclass
class Submission:
    """Finished runs and a complete system description, and the command that packages them."""

    folder: Path
    runs: list[str]
    capsys: pytest.CaptureFixture[str]

    def package(self, *more: str) -> tuple[int, str]:
        """Return the exit code and the output; exit code 2 means that nothing was written."""
        paths = ("--output", self.target.name, "--system", str(self.folder / "system.yaml"))
        existed = self.target.exists()
        code = main(["mlperf", "package", *self.runs, *paths, *more])
        assert code != EXIT_USAGE or self.target.exists() == existed
        return code, "".join(self.capsys.readouterr())

    @property
    def target(self) -> Path:
        return self.folder / "package"


@pytest.fixture(scope="module")
def closed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed") / "runs"
    ten_runs(folder)
    return folder


@pytest.fixture
def empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Submission:
    """Return a submission without runs, in the working directory."""
    monkeypatch.chdir(tmp_path)
    answers(tmp_path)
    return Submission(tmp_path, [], capsys)


@pytest.fixture
def closed(empty: Submission, closed_runs: Path) -> Submission:
    """Return a submission of ten closed runs."""
    copy = shutil.copytree(closed_runs, empty.folder / "runs")
    empty.runs = [str(run) for run in sorted(copy.iterdir())]
    return empty


@pytest.mark.parametrize("ruleset", ["6.0.0", pytest.param("6.1.0", marks=pytest.mark.slow)])
def test_ten_runs_become_a_package_that_every_tool_accepts_and_that_is_not_overwritten(
    ruleset: str, closed: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ruleset == "6.1.0":  # once with the programs themselves
        monkeypatch.setattr(compliance, "run_tool", run_tool)
    code, output = closed.package("--ruleset", ruleset)
    assert code == EXIT_OK, output
    names = "system_desc_checker package_checker rcp_checker result_summarizer repo_checker"
    verdicts = [line.split()[:2] for line in output.splitlines()[1:6]]
    assert verdicts == [[name, "passed"] for name in names.split()]
    assert "accepted: mean of 8 runs 7,438,336 samples" in output
    assert "review: passed, 0 findings, 0 waived" in output
    minutes = 10 * (5 * (5 * 28 + 3 * 29) / 8 + 1)  # five events an evaluation, and the end
    assert (
        f"score: {minutes:.2f} minutes, without the fastest and the slowest of 1360.00," in output
    )
    organisation = closed.target / "example-org"
    results = organisation / "results" / "8xMI300X" / "flux1"
    assert len(list(results.glob("result_*.txt"))) == 10
    implementation = organisation / "benchmarks/flux1/implementations/8xMI300X_fluxtrain"
    assert (implementation / "fluxtrain" / "errors.py").exists()
    assert json.loads((implementation / "config_3.json").read_text())["seed"] == 103
    statement = (implementation / "deviations.md").read_text()
    assert "| RoPE angles |" in statement
    assert "| gradient accumulation |" not in statement  # 16 ranks x 32
    assert resolve(yaml.safe_load((implementation / "job_3.yaml").read_text())["spec"]["run"])
    code, output = closed.package()
    assert code == EXIT_USAGE
    assert "exists already" in output


@pytest.mark.slow
def test_an_older_ruleset_refuses_faster_convergence(closed: Submission) -> None:
    code, output = closed.package("--ruleset", "5.1.0")
    assert code == EXIT_ERROR
    assert "RCP Test Failed" in output
    assert "refused: mean of 8 runs 7,438,336 samples, 548,282 below the accepted minimum" in output


@pytest.mark.slow
def test_a_score_faster_than_the_reference_is_scaled(empty: Submission) -> None:
    empty.runs = ten_runs(empty.folder / "runs", (27,) * 7 + (28,) * 3)
    code, output = empty.package()
    assert code == EXIT_OK, output
    factor = float(output.rpartition("multiplied by ")[2].split()[0])
    written = empty.target / "example-org/results/8xMI300X/flux1/scaling.json"
    assert json.loads(written.read_text())["scaling_factor"] == pytest.approx(factor, abs=1e-4)


@pytest.mark.slow
def test_the_open_division_is_packaged_without_a_reference(empty: Submission) -> None:
    open_run = {"logging": {"mlperf": {"division": "open"}}, "optim": {"beta2": 0.99}}
    empty.runs = ten_runs(empty.folder / "runs", (20,) * 10, **open_run)
    answers(empty.folder, division="open")
    code, output = empty.package()
    assert code == EXIT_OK, output
    assert "rcp_checker" not in output
    assert "without a reason (--reason FIELD=REASON): optim.beta2" in output
    shutil.rmtree(empty.target)
    code, output = empty.package("--reason", "optim=a study | of moments")
    assert code == EXIT_OK, output
    assert "without a reason" not in output
    (statement,) = empty.target.rglob("deviations.md")
    assert "| optim.beta2 | 0.95 | 0.99 | a study \\| of moments |" in statement.read_text()


@pytest.mark.slow
def test_a_missing_system_description_is_created_as_a_template(closed: Submission) -> None:
    path = closed.folder / "system.yaml"
    path.unlink()
    assert closed.package()[0] == EXIT_USAGE
    asked = yaml.safe_load(path.read_text())
    assert set(asked) == set(FIELDS)
    assert asked["submitter"] == "example-org"
    assert asked["number_of_nodes"] == "2"
    assert asked["framework"].startswith("PyTorch")
    assert asked["cooling"] is None
    code, output = closed.package()
    assert code == EXIT_USAGE
    assert "cooling: missing: air or liquid" in output
    path.write_text(path.read_text().replace(": null", ': "told"'))
    assert closed.package()[0] == EXIT_OK


@pytest.mark.slow
def test_a_log_that_the_checker_refuses_fails_the_package(closed: Submission) -> None:
    """The package checker passes with one such log: it would count as a run without convergence."""
    log = Path(closed.runs[4]) / "mlperf.log"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"opt_name"' not in line))
    code, output = closed.package()
    assert code == EXIT_ERROR
    assert "package_checker      passed" in output
    assert "package-checkers: " in output
    assert "result_4.txt" in output


@pytest.mark.slow
def test_a_finding_of_the_review_fails_unless_it_is_waived_with_a_reason(
    closed: Submission,
) -> None:
    for run in closed.runs[:2]:
        log = Path(run) / "mlperf.log"
        log.write_text(
            log.read_text().replace(
                '"train_samples", "value": 1099776', '"train_samples", "value": 5'
            )
        )
    code, output = closed.package()
    assert code == EXIT_ERROR
    assert "review: FAILED, 2 findings, 0 waived" in output
    assert "training-set (training rules 6.5): result_0.txt, result_1.txt: train_samples" in output
    shutil.rmtree(closed.target)
    why = "two runs were cut short"
    code, output = closed.package(f"--waive=training-set={why}", f"--waive=same-settings={why}")
    assert code == EXIT_OK, output
    assert "review: passed, 0 findings, 2 waived" in output
    (code_folder,) = (closed.target / "example-org/benchmarks/flux1/implementations").iterdir()
    assert json.loads((code_folder / "waivers.json").read_text())["training-set"] == why
    assert f"- training-set: {why}" in (code_folder / "README.md").read_text()
    assert main(["mlperf", "review", str(closed.target / "example-org")]) == EXIT_OK
    assert "waived by the submitter: 2 findings" in closed.capsys.readouterr().out


def cut_off(logs: list[Path]) -> None:
    lines = logs[2].read_text().splitlines(keepends=True)
    logs[2].write_text("".join(lines[:-1]))


def lose_two(logs: list[Path]) -> None:
    for log in logs[1:3]:
        log.write_text(log.read_text().replace('"status": "success"', '"status": "aborted"'))


def another_submitter(logs: list[Path]) -> None:
    logs[3].write_text(logs[3].read_text().replace('"example-org"', '"other-org"'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logs: logs[9].unlink(), "has no mlperf.log"),
        (lambda logs: shutil.rmtree(logs[9].parent), "ten-runs: 9 runs; needed: 10"),
        (
            lambda logs: shutil.copy(logs[4], logs[5]),
            "seeds-are-random: the seed 104 is that of",
        ),
        (another_submitter, "same-submission: submission_org is"),
        (cut_off, "the run is not over"),
        (lose_two, "converged-runs: 2 runs did not reach the target"),
    ],
)
def test_runs_that_are_not_one_result_are_refused(
    change: Callable[[list[Path]], object], message: str, closed: Submission
) -> None:
    change([Path(run) / "mlperf.log" for run in closed.runs])
    closed.runs = [run for run in closed.runs if Path(run).exists()]
    code, output = closed.package()
    assert code == EXIT_USAGE
    assert message in output


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", "soon", "must be one of Available on-premise"),
        ("system_name", "../../etc", "names a folder"),
        ("submitter", "two words", "names a folder"),
        ("number_of_nodes", "eight", "must be a whole number"),
        ("framework", "", "must not be empty"),
        ("host_networking_topology", "", "must not be empty"),
        ("host_memory_configuration", " ", "must not be empty"),
        ("accelerator_host_interconnect", "", "must not be empty"),
        ("accelerator_memory_configuration", "", "must not be empty"),
        ("accelerator_interconnect", "", "must not be empty"),
        ("cooling", "", "must not be empty: air or liquid"),
        ("framework", ["a"], "must be a string"),
        ("colour", "red", "no field of a system description"),
    ],
)
def test_a_wrong_answer_is_refused(
    field: str, value: Any, message: str, closed: Submission
) -> None:
    answers(closed.folder, **{field: value})
    code, output = closed.package()
    assert code == EXIT_USAGE
    assert field in output
    assert message in output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--answer=cooling", "must be FIELD=TEXT"),
        ("--answer=cooling=", "cooling: got ''; must not be empty"),
        ("--answer=colour=red", "no field of a system description"),
        ("--reason=optim", "must be FIELD=REASON"),
        ("--reason=optim=a study", "is as in the reference, or no field"),
    ],
)
def test_a_wrong_option_is_refused(option: str, message: str, closed: Submission) -> None:
    code, output = closed.package(option)
    assert code == EXIT_USAGE
    assert message in output


def test_answers_may_be_given_without_a_file(closed: Submission) -> None:
    path = closed.folder / "system.yaml"
    told = yaml.safe_load(path.read_text())
    path.unlink()
    code, output = closed.package(*(f"--answer={name}={value}" for name, value in told.items()))
    assert code == EXIT_OK, output
    assert not path.exists()
    written = json.loads((closed.target / "example-org/systems/8xMI300X.json").read_text())
    assert written == told


def test_the_machine_facts_are_those_of_lscpu() -> None:
    facts = machine_facts(16, 8)
    assert facts["number_of_nodes"] == "2"
    output = subprocess.run(["lscpu", "--json"], capture_output=True, text=True, check=True).stdout
    rows = {row["field"].rstrip(":"): row["data"] for row in json.loads(output)["lscpu"]}
    assert facts["host_processor_vcpu_count"] == rows["CPU(s)"]
    if "Model name" in rows:
        assert facts["host_processor_model_name"] == rows["Model name"]


COUNTS = (36, 34, *CONVERGED, 30, 32)
"""Evaluations of fourteen runs: five windows, of which the third has the median score, or the second."""


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the organisation's folder of a package of fourteen runs."""
    folder = tmp_path_factory.mktemp("fourteen")
    runs = [
        str(write_run(folder / f"run_{number:02}", 100 + number, count))
        for number, count in enumerate(COUNTS)
    ]
    options = ["--system", str(answers(folder)), "--output", str(folder / "out")]
    assert main(["mlperf", "package", *runs[::-1], *options]) == EXIT_OK
    return folder / "out/example-org"


def implementation(organisation: Path) -> Path:
    return organisation / "benchmarks/flux1/implementations/8xMI300X_fluxtrain"


def seeds(folder: Path) -> list[int]:
    logs = sorted(folder.glob("*.txt"))
    return [line.value for log in logs for line in read_lines(log) if line.key == "seed"]


@pytest.mark.proof
def test_the_median_window_is_the_result_and_the_others_are_enclosed(packaged: Path) -> None:
    scores = []
    for first in range(5):
        kept = sorted(COUNTS[first : first + 10])[1:-1]
        scores.append((sum(kept), first))
    _, median = sorted(scores)[2]
    counted = list(range(100 + median, 110 + median))
    assert seeds(packaged / "results/8xMI300X/flux1") == counted
    others = implementation(packaged) / "other_runs"
    assert seeds(others) == [seed for seed in range(113, 99, -1) if seed not in counted]
    readme = (implementation(packaged) / "README.md").read_text()
    assert "The result is the consecutive 10 with the median score, of 14 runs." in readme
    assert [seed for seed in range(100, 114) if f"| {seed} |" not in readme] == []
    settings = [path.name for path in implementation(packaged).glob("config_*.json")]
    assert len(settings) == 10


def test_another_ten_of_the_runs_are_found(
    packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    organisation = shutil.copytree(packaged, tmp_path / "org")
    assert main(["mlperf", "review", str(organisation)]) == EXIT_OK
    capsys.readouterr()
    result = organisation / "results/8xMI300X/flux1/result_4.txt"
    other = implementation(organisation) / "other_runs/run_00.txt"
    mine, theirs = result.read_bytes(), other.read_bytes()
    result.write_bytes(theirs)
    other.write_bytes(mine)
    assert main(["mlperf", "review", str(organisation)]) == EXIT_ERROR
    assert "median-of-the-windows (training rules 12)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("waivers", "code"),
    [
        ({"same-settings": " "}, EXIT_ERROR),
        ({"ten-runs": "one was lost", "same-settings": "a typing error"}, EXIT_ERROR),
        ({"seeds-are-random": "a typing error"}, EXIT_ERROR),
    ],
)
def test_a_package_cannot_waive_without_a_reason_or_that_there_are_ten(
    waivers: dict[str, str],
    code: int,
    packaged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    organisation = shutil.copytree(packaged, tmp_path / "org")
    shutil.rmtree(implementation(organisation) / "other_runs")
    log = organisation / "results/8xMI300X/flux1/result_4.txt"
    if "ten-runs" in waivers:
        log.unlink()
    else:
        log.write_text(
            log.read_text().replace('"opt_name", "value": "adamw"', '"opt_name", "value": "a"')
        )
    (implementation(organisation) / WAIVERS_FILE).write_text(json.dumps(waivers))
    assert main(["mlperf", "review", str(organisation)]) == code
    rule = "ten-runs" if "ten-runs" in waivers else "same-settings"
    assert f"{rule} (training rules" in capsys.readouterr().out.partition("waived")[0]
