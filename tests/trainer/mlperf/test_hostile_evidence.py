"""Logs, folders and files that an opponent gives: each is refused, or reviewed, in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.paths import EXAMPLES
from tests.trainer.mlperf.good_run import CONVERGED, Evidence, write_log
from tests.trainer.mlperf.submission.finished_runs import answers, ten_runs

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import merge
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.mlperf.campaign import ObservedRun, campaign_jobs, report
from fluxtrain.mlperf.evidence import Result, Run
from fluxtrain.mlperf.implementation import ran_software
from fluxtrain.mlperf.jobs import items
from fluxtrain.mlperf.log_lines import MAX_BYTES, TOKEN
from fluxtrain.mlperf.review.review import all_rule_findings, render
from fluxtrain.mlperf.review.tree import read_results

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = yaml.safe_load((EXAMPLES / "mlperf-submission.yaml").read_text())
NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e308, 10**400, -(10**400), True, -1, 0)
HOSTILE = (*NUMBERS, None, "", "x", "\ud800", "\u0662", [], {}, [[]], {"nodes": [1]}, {"rules": {}})


def _short(value: object) -> str:
    return repr(value)[:20]


def judged(run: Run, other: Run) -> str:
    """Return all that is said of a run, alone and beside another one."""
    found = list(all_rule_findings(Result("", [run, other])))
    runs = [ObservedRun("a", run), ObservedRun("b", other)]
    return render(found) + report(runs, "6.1.0")


@pytest.mark.parametrize("value", HOSTILE, ids=_short)
def test_any_value_time_or_count_of_any_event_is_judged(value: object, good: Evidence) -> None:
    other = good.run("other")
    for key in dict.fromkeys(event["key"] for event in good.events):
        for part in ("value", "samples_count"):
            broken = Evidence([*good.events], good.config)
            for place, event in enumerate(good.events):
                if event["key"] == key:
                    counted = {**event["metadata"], part: value}
                    changed = {"value": value} if part == "value" else {"metadata": counted}
                    broken.events[place] = {**event, **changed}
            assert "2 runs" in judged(broken.run(), other)
    for part in ("time_ms", "metadata", "key"):
        broken = Evidence([{**event, part: value} for event in good.events], good.config)
        assert "1. " in judged(broken.run(), other)


@pytest.mark.parametrize("value", NUMBERS[:6], ids=_short)
def test_a_time_that_no_clock_has_is_no_event(value: object, good: Evidence) -> None:
    broken = good.copy()
    broken.one("run_stop")["time_ms"] = value
    assert "time_ms is not a number" in judged(broken.run(), good.run("other"))


def test_a_package_is_found_from_any_folder_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "org", "system")
    for folder, path in (("flux1", "."), ("", "flux1"), ("", ".")):
        monkeypatch.chdir(tmp_path / "org/results/system" / folder)
        (result,) = read_results([Path(path)])
        assert result.description == {"submitter": "x"}


def package(organisation: Path, system: str) -> Path:
    """Write a package of one log without its code; return the folder of implementations."""
    logs = organisation / f"results/{system}/flux1"
    logs.mkdir(parents=True)
    write_log(logs / "result_0.txt", 7, 4)
    (organisation / "systems").mkdir()
    (organisation / f"systems/{system}.json").write_text('{"submitter": "x"}')
    implementations = organisation / "benchmarks/flux1/implementations"
    implementations.mkdir(parents=True)
    return implementations


@pytest.mark.parametrize("others", [("a-2_fluxtrain",), ("a-2_fluxtrain", "a-b"), ("a.fluxtrain",)])
@pytest.mark.parametrize("own", ["a_fluxtrain", "a_pytorch"])
def test_the_code_is_that_of_the_system_and_not_of_one_with_a_longer_name(
    own: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    implementations = package(tmp_path / "org", "a")
    for name in (*others, own):
        (implementations / name).mkdir()
    (result,) = read_results([tmp_path / "org"])
    assert result.implementation == implementations.resolve() / own


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlperf: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_log(run / "mlperf.log", 7, 4)
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> Any:
        if path.parent.name == "run":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    log = str(run / "mlperf.log")
    for command in (["review", log], ["review"], ["package"], ["campaign", "status"]):
        assert "cannot be read (Permission denied)" in mlperf(EXIT_USAGE, *command, run)
    assert main(["mlperf", "campaign", "status", str(tmp_path)]) == EXIT_USAGE, "nor left out"


def test_a_log_of_any_size_is_not_read(tmp_path: Path, mlperf: Callable[..., str]) -> None:
    log = tmp_path / "mlperf.log"
    log.touch()
    with log.open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    for command in (["review"], ["campaign", "status"]):
        assert f"a log has at most {MAX_BYTES}" in mlperf(EXIT_USAGE, *command, tmp_path)


def test_the_first_run_may_not_have_said_its_division_yet(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    for number in range(2):
        (tmp_path / f"run-{number}").mkdir()
        write_log(tmp_path / f"run-{number}/mlperf.log", number, 4)
    (tmp_path / "run-0/mlperf.log").write_text("")
    assert "the reference's runs at global batch size 512 need" in mlperf(
        EXIT_OK, "campaign", "status", tmp_path
    )


@pytest.mark.parametrize("part", [0.1, 1e-9, 0])
def test_a_run_that_took_no_time_is_found(part: float, good: Evidence) -> None:
    times = [{**event, "time_ms": event["time_ms"] * part} for event in good.events]
    found = list(all_rule_findings(Result("", [Evidence(times, good.config).run()])))
    texts = [each.text for each in found if each.rule == "clock-goes-forward"]
    assert "which is no time in milliseconds since 1970" in texts[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fluxtrain_packages", {"nodes": "0-1", "packages": {"--index-url x\nevil": "1"}}),
        ("fluxtrain_packages", {"nodes": "0-1", "packages": {"evil": "1 ; touch /tmp/x"}}),
        ("fluxtrain_software", {"nodes": "0-1", "python": "3\nRUN evil"}),
        ("fluxtrain_software", {"nodes": "0-1", "revision": "a\nRUN evil"}),
    ],
)
def test_names_that_would_run_something_are_refused(
    key: str, value: dict[str, Any], good: Evidence
) -> None:
    broken = good.copy()
    event = broken.one(key)
    broken.events.insert(broken.events.index(event) + 1, {**event, "value": value})
    with pytest.raises(ConfigError, match="is no name or version of a package"):
        ran_software([broken.run()])


def test_a_run_that_left_the_closed_division_is_told_so(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    folders = ten_runs(tmp_path, logging={"mlperf": {"division": "auto"}})
    log = tmp_path / "run_3/mlperf.log"
    lines = log.read_text().splitlines()
    assert any('"submission_division", "value": "closed"' in line for line in lines)
    event = json.loads(lines[-2].removeprefix(TOKEN))
    value = {"division": "open", "rules": ["one sample is unreadable (training rules 6.6)"]}
    event |= {"key": "fluxtrain_division", "value": value}
    event["metadata"]["samples_count"] = 262_144
    log.write_text("\n".join([*lines[:-5], TOKEN + json.dumps(event), *lines[-5:]]) + "\n")
    told = "says closed, but the run left the closed division after 262,144 samples"
    assert told in mlperf(EXIT_ERROR, "review", folders[3])
    assert "run_3 left the closed division" in mlperf(EXIT_OK, "campaign", "status", tmp_path)
    options = ["--system", str(answers(tmp_path)), "--output", str(tmp_path / "out")]
    output = mlperf(EXIT_ERROR, "package", *folders, *options)
    assert "stays-closed (training rules 2.2): result_3.txt" in output
    assert told in output


# More than ten runs


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (10, ("", ""), "runs-are-different-runs"),
        (0, ('"value": 512', '"value": 1024'), "global_batch_size is 512 in most runs, but 1024"),
    ],
)
def test_also_the_runs_that_do_not_count_must_be_of_the_result(
    number: int, change: tuple[str, str], message: str, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    folders = ten_runs(tmp_path, (*CONVERGED, 28))
    log = Path(folders[number], "mlperf.log")
    if number == 10:
        shutil.copy(Path(folders[0], "mlperf.log"), log)
    log.write_text(log.read_text().replace(*change))
    assert message in mlperf(EXIT_USAGE, "package", *folders, "--output", tmp_path / "out")


# Campaigns


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"labels": ["a"]}}, "metadata.labels: .*must be a mapping"),
        ({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 0}}}, "stays in the record"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        campaign_jobs(merge(BASE, change), 10, 1)


def test_a_job_that_a_cluster_printed_becomes_a_campaign(tmp_path: Path) -> None:
    printed = {
        "metadata": {
            "resourceVersion": "12",
            "uid": "0",
            "generation": 3,
            "labels": None,
            "namespace": "team",
            "annotations": {"a": "b"},
        },
        "status": {"phase": "Complete"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(merge(BASE, printed)))
    load_job(tmp_path / "job.yaml")
    (job,) = campaign_jobs(merge(BASE, printed), 1, 1)
    name = "mlperf-submission"
    assert job["metadata"] == {
        "name": f"{name}-00",
        "namespace": "team",
        "annotations": {"a": "b"},
        "labels": {"campaign": name},
    }
    assert list(job) == ["apiVersion", "kind", "metadata", "spec"]


def test_an_empty_selector_is_not_all_jobs() -> None:
    with pytest.raises(ConfigError, match="--selector: got ''; must not be empty"):
        items("fluxtrainings", "", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"preset": "none"}', "preset"),
        ('{"optim": {"beta1": "high"}}', "optim.beta1"),
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_configuration_that_is_none_is_named_with_its_path(
    content: str, message: str, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    runs = ten_runs(tmp_path / ("a folder with a name of some length " * 3))
    for run in runs:
        Path(run, "config.json").write_text(content)
    options = ["--system", str(answers(tmp_path)), "--output", str(tmp_path / "out")]
    error = mlperf(EXIT_USAGE, "package", *runs, *options)
    assert f"{runs[0]}/config.json: " in error
    assert message in error
    assert not (tmp_path / "out").exists()
