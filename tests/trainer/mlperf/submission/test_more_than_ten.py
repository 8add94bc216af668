"""More than ten runs: the package has the ten of the median window, and all runs are in its record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.trainer.mlperf.good_run import CONVERGED
from tests.trainer.mlperf.submission.finished_runs import answers, write_run

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.mlperf.evidence import WAIVERS_FILE
from fluxtrain.mlperf.log_lines import read_lines

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
