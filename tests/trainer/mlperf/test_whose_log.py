"""Whose log it is: benchmark and ruleset are read from it, and one lost run of ten is a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.trainer.mlperf.good_run import CONVERGED, Event, Evidence, complete, write_log, write_run

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.mlperf.compliance import RULESETS, best_fit, check, describe_fit, fit
from fluxtrain.mlperf.evidence import Result
from fluxtrain.mlperf.log_lines import TOKEN, read_lines
from fluxtrain.mlperf.review.review import unknowns

pytestmark = pytest.mark.slow

NINE = "lowest_numerical_precision_in_linear, lowest_numerical_precision_in_attn"
FITS_ALL: dict[str, list[str]] = {ruleset: [] for ruleset in RULESETS}
COMMANDS = ("review", "check", "campaign status")


def write(path: Path, events: Iterable[Event]) -> Path:
    path.write_text("".join(f"{TOKEN}{json.dumps(event)}\n" for event in events))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_log_of_another_benchmark_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "result_0.txt", complete(512, 3, submission_benchmark="llama31_8b"))
    assert main(["mlperf", *command.split(), str(log)]) == EXIT_USAGE
    said = capsys.readouterr()
    (line,) = (said.out + said.err).splitlines()
    assert "is a log of the benchmark llama31_8b; allowed: flux1" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_ruleset_is_that_of_the_log_and_said(
    command: str, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    log = write(tmp_path / "result_0.txt", complete(512, 27))
    output = mlperf(EXIT_OK, *command.split(), log)
    verb = "its keys fit" if command == "campaign status" else "passes"
    assert f"ruleset 6.0.0: {verb} 5.1.0 and 6.0.0; 6.1.0 needs {NINE}" in output
    assert "truncated" not in output


def test_a_given_ruleset_is_used_and_names_what_it_needs(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    log = write(tmp_path / "result_0.txt", complete(512, 27))
    output = mlperf(EXIT_ERROR, "review", log, "--ruleset", "6.1.0")
    assert f"ruleset 6.1.0 needs {NINE}" in output
    assert "and 6 more; earlier rulesets do not" in output
    assert "truncated" not in output
    assert "6.0.0" not in output


@pytest.mark.parametrize(
    ("size", "frequency", "best", "text"),
    [
        (512, 262_144, "6.0.0", "its keys fit 5.1.0 and 6.0.0; 6.1.0 needs lowest"),
        (2304, 262_144, "6.0.0", "its keys fit 5.1.0 and 6.0.0; 6.1.0 needs lowest"),
        (
            2304,
            262_656,
            "6.0.0",
            "its keys fit no ruleset; 5.1.0 needs evaluation_frequency 262144",
        ),
    ],
)
def test_the_frequency_tells_rulesets_apart(
    size: int, frequency: int, best: str, text: str, tmp_path: Path
) -> None:
    log = write(tmp_path / "log", complete(size, 3, evaluation_frequency=frequency))
    needed = fit([list(read_lines(log))])
    assert best_fit(needed, "2023-11") == best
    assert describe_fit(needed, False, "").startswith(text)


def at(events: list[Event], year: int, month: int) -> list[Event]:
    moved = int(datetime(year, month, 7, tzinfo=UTC).timestamp() * 1000) - events[0]["time_ms"]
    return [event | {"time_ms": event["time_ms"] + moved} for event in events]


@pytest.mark.parametrize(
    ("year", "month", "ruleset"),
    [
        (2025, 5, "6.0.0"),
        (2025, 6, "5.1.0"),
        (2025, 11, "5.1.0"),
        (2025, 12, "6.0.0"),
        (2026, 6, "6.0.0"),
        (2026, 7, "6.0.0"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_of_rulesets_that_fit_alike_it_is_that_of_the_logs_dates(
    command: str, year: int, month: int, ruleset: str, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    log = write(tmp_path / "result_0.txt", at(complete(512, 28), year, month))
    output = mlperf(EXIT_OK, *command.split(), log)
    assert f"ruleset {ruleset}: " in output
    told = f"; the logs are of {year}-{month:02}: round {ruleset.removesuffix('.0')}" in output
    assert told == ((2025, 6) <= (year, month) <= (2026, 6))


def test_a_log_of_ours_fits_all_rulesets(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 7, 3)
    needed = fit([list(read_lines(tmp_path / "log"))])
    assert best_fit(needed, "") == RULESETS[-1]
    assert best_fit(needed, "2026-03") == "6.0.0"
    assert describe_fit(needed, True, "") == "passes 5.1.0 and 6.0.0 and 6.1.0"


@pytest.mark.parametrize(("lost", "code"), [(1, EXIT_OK), (2, EXIT_ERROR)])
def test_one_lost_run_of_ten_is_a_result_and_two_are_none(
    lost: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(write_run(tmp_path / f"run_{number}", 100 + number, count, reached=number >= lost))
        for number, count in enumerate(CONVERGED)
    ]
    assert main(["mlperf", "review", *runs]) == code
    output = capsys.readouterr().out
    assert ("2 runs did not reach the target" in output) == (lost == 2)
    assert output.startswith("PASSED" if lost == 1 else "FAILED")
    assert ("compliance-checker (training rules 12)" in output) == (lost == 1)
    assert main(["mlperf", "review", *runs, "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] == (lost == 1)
    (result,) = told["results"]
    assert result.pop("row")["converged"] == f"{10 - lost}/10"
    assert result == {"name": "", "logs": 10, "ruleset": "6.1.0", "needs": FITS_ALL}
    assert [each["rule"] for each in told["notes"]] == ["compliance-checker"] * (lost == 1)
    assert {each["kind"] for each in told["unknowns"]} <= {"unknown"}


def test_an_open_log_without_the_second_key_of_its_losses_names_it(tmp_path: Path) -> None:
    changes = {"preset": "micro", "logging": {"mlperf": {"division": "open"}}}
    log = tmp_path / "log"
    write_log(log, 7, 3, **changes)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if "averaged_validation_loss" not in line))
    texts = check(log).explanations
    assert any(
        text.startswith("averaged_validation_loss is missing; the open division needs it beside")
        for text in texts
    ), texts
    assert not any("nothing was evaluated" in text for text in texts)


def test_what_the_files_cannot_show_is_unknown() -> None:
    run = replace(Evidence(complete(512, 3), {}).run(), config=None)
    found = {(each.rule, each.text) for each in unknowns([Result("", [run])])}
    assert ("benchmark-data", "there is no config.json") in found
    assert ("log-follows-its-chain", "there is no chain.jsonl") in found
