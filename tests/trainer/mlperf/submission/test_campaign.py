"""A campaign: its jobs, the forecast of a run, the ten runs that count, and what is printed of them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.paths import EXAMPLES
from tests.trainer.mlperf.good_run import CONVERGED, EVERY, write_log, write_run
from tests.trainer.mlperf.small_logs import benchmark, open_log

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import merge
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.mlperf import jobs as output_volumes
from fluxtrain.mlperf.campaign import ObservedRun, campaign_jobs
from fluxtrain.mlperf.evidence import read_run
from fluxtrain.mlperf.jobs import read_outputs
from fluxtrain.mlperf.log_lines import NO_TARGET
from fluxtrain.mlperf.rcp import median_window, reference_point
from fluxtrain.report.records import samples_to_target

FILE = EXAMPLES / "mlperf-submission.yaml"
BASE: dict[str, Any] = yaml.safe_load(FILE.read_text())


# The jobs


def test_ten_jobs_differ_in_name_and_folder_alone(mlperf: Callable[..., str]) -> None:
    jobs = list(yaml.safe_load_all(mlperf(EXIT_OK, "campaign", FILE)))
    names = [f"mlperf-submission-{number:02}" for number in range(10)]
    assert [job["metadata"]["name"] for job in jobs] == names
    assert {job["metadata"]["labels"]["campaign"] for job in jobs} == {"mlperf-submission"}
    folders = [job["spec"]["storage"].pop("outputFolder") for job in jobs]
    assert folders == [f"mlperf-submission/{name}" for name in names]
    before = [job["spec"].pop("lifecycle", {}) for job in jobs]
    after = [{"startAfter": [name], "startWhen": "Ended"} for name in names[:-1]]
    assert before == [{}, *after], "a failed run does not stop those after it"
    assert all(job["spec"] == jobs[0]["spec"] for job in jobs)
    spec = jobs[0]["spec"]
    assert spec["run"]["seed"] == "random"
    assert spec["run"]["checkpoint"] == {"every_steps": 0, "memory_every_steps": 0}
    assert spec["restart"] == {"maxRestarts": 0}
    assert spec["run"]["schedule"] == {"global_batch_size": 1024}


def test_the_printed_jobs_are_valid_files(tmp_path: Path, mlperf: Callable[..., str]) -> None:
    for number, text in enumerate(mlperf(EXIT_OK, "campaign", FILE, "--runs", "2").split("---\n")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert load_job(path).metadata.name == f"mlperf-submission-{number:02}"


def test_a_null_that_kubectl_apply_would_drop_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(merge(BASE, {"spec": {"run": {"logging": {"straggler_factor": None}}}}))
    )
    assert main(["mlperf", "campaign", str(path)]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert not printed.out
    assert "spec.run.logging.straggler_factor: null is dropped by kubectl apply" in printed.err


def test_three_runs_train_side_by_side() -> None:
    jobs = campaign_jobs(BASE, 7, 3)
    before = [job["spec"].get("lifecycle", {}).get("startAfter", []) for job in jobs]
    names = [job["metadata"]["name"] for job in jobs]
    assert before == [[], [], [], *([name] for name in names[:4])]


def test_labels_folder_and_predecessors_of_the_file_are_kept() -> None:
    file = merge(
        BASE, {"metadata": {"labels": {"team": "a"}}, "spec": {"storage": {"outputFolder": "x"}}}
    )
    file = merge(file, {"spec": {"lifecycle": {"startAfter": ["prepare"], "cleanPods": "None"}}})
    first, second = campaign_jobs(file, 2, 1)
    assert first["metadata"]["labels"] == {"team": "a", "campaign": "mlperf-submission"}
    assert first["spec"]["storage"]["outputFolder"] == "x/mlperf-submission-00"
    assert first["spec"]["lifecycle"] == {"startAfter": ["prepare"], "cleanPods": "None"}
    assert second["spec"]["lifecycle"]["startAfter"] == ["mlperf-submission-00"]


def test_labels_may_be_null() -> None:
    (job,) = campaign_jobs(merge(BASE, {"metadata": {"labels": None}}), 1, 1)
    assert job["metadata"]["labels"] == {"campaign": "mlperf-submission"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"spec": {"nodes": {"min": 4, "max": 8}}},
            r"spec\.nodes\.min: got 4; must be nodes.max",
        ),
        ({"spec": {"run": {"seed": 7}}}, r"spec\.run\.seed: got 7; must be random"),
        (
            {"spec": {"run": {"task": "benchmark"}}},
            r"spec\.run\.task: got 'benchmark'; must be train",
        ),
        ({"spec": {"storage": {"output": None}}}, r"spec\.storage\.output: must be given"),
        ({"metadata": {"name": "a" * 60}}, r"metadata\.name: got .*; must have at most 59"),
        ({"spec": {"run": {"optim": {"beta1": 0.5}}}}, r"optim\.beta1"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        campaign_jobs(merge(BASE, change), 10, 1)


@pytest.mark.parametrize(("runs", "parallel"), [(0, 1), (101, 1), (10, 0), (10, 11)])
def test_numbers_out_of_range_are_refused(runs: int, parallel: int) -> None:
    with pytest.raises(ConfigError, match="must be between 1 and"):
        campaign_jobs(BASE, runs, parallel)


# The forecast


@pytest.mark.parametrize("seen", [4, 8, 16, 24])
def test_a_curve_that_is_a_line_over_the_logarithm_is_forecast_exactly(seen: int) -> None:
    curve = [(count * EVERY, 1.5 - 0.05 * math.log(count * EVERY)) for count in range(1, 41)]
    target = curve[27][1] + 1e-9
    assert samples_to_target(curve[:seen], target, EVERY) == 28 * EVERY
    assert samples_to_target(curve, target, EVERY) == 28 * EVERY, "it has been reached"


@pytest.mark.parametrize(
    ("losses", "target"),
    [
        ([0.7, 0.69], 0.6),
        ([0.7, 0.7, 0.7], 0.6),
        ([0.7, 0.8, 0.9], 0.6),
        ([0.7, float("nan"), 0.6], 0.5),
        ([0.7, 0.6999, 0.6998], 0.1),
        ([0.7, 0.69, 0.68], None),
    ],
    ids=["two points", "flat", "rising", "not a number", "far away", "no target"],
)
def test_other_curves_have_no_forecast(losses: list[float], target: float | None) -> None:
    points = [(count * EVERY, loss) for count, loss in enumerate(losses, 1)]
    assert samples_to_target(points, target, EVERY) is None


@pytest.mark.parametrize(
    ("evaluations", "target"),
    [
        ([(EVERY, 0.9), (EVERY, 0.8), (EVERY, 0.7)], 0.6),
        ([(EVERY, 0.9), (2 * EVERY, 0.8), (2 * EVERY, 0.7)], 0.6),
        ([(10**400, 0.9), (10**401, 0.8), (10**402, 0.7)], 0.6),
        ([(10**15 - 3, 0.9), (10**15 - 2, 0.8), (10**15 - 1, 0.7)], 0.6),
        ([(EVERY, 0.9), (2 * EVERY, 0.8), (3 * EVERY, 0.7)], float("nan")),
    ],
    ids=[
        "the same samples",
        "two different ones",
        "absurd counts",
        "equal logarithms",
        "no target",
    ],
)
def test_logs_of_others_have_no_forecast(
    evaluations: list[tuple[int, float]], target: float
) -> None:
    assert samples_to_target(evaluations, target, EVERY) is None


def test_a_run_that_is_late_is_not_forecast_into_the_past() -> None:
    points = [(count * EVERY, 0.7 - count / 1000) for count in range(1, 9)]
    forecast = samples_to_target(points, points[-1][1] - 1e-7, EVERY)
    assert forecast == 9 * EVERY


# The window


def write_runs(folder: Path, counts: tuple[int, ...], **more: Any) -> list[Path]:
    """Write a run for each number of evaluations, started one after another."""
    return [
        write_run(folder / f"run-{number:02}", 100 + number, count, **more)
        for number, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "first"),
    [
        ((5,) * 10, 0),
        ((*(9,) * 6, *(5,) * 6), 1),  # three windows: the middle one
        ((*(5,) * 6, *(9,) * 6), 1),
        ((*(9,) * 3, *(5,) * 8), 0),  # two windows: the slower one
    ],
)
def test_the_consecutive_ten_with_the_median_score_are_the_result(
    counts: tuple[int, ...], first: int, tmp_path: Path
) -> None:
    runs = [read_run(path / "mlperf.log") for path in write_runs(tmp_path, counts)]
    window = median_window(runs[::-1])
    assert [run.log for run in window] == [run.log for run in runs[first : first + 10]]


def test_a_window_with_two_lost_runs_is_the_slowest(tmp_path: Path) -> None:
    folders = write_runs(tmp_path, (9, 9, *(5,) * 8, 4, 4))
    for path in folders[:2]:
        log = path / "mlperf.log"
        log.write_text(log.read_text().replace('"success"', '"aborted"'))
    runs = [read_run(path / "mlperf.log") for path in folders]
    assert median_window(runs)[0].log == folders[1] / "mlperf.log", "of three windows the second"


# The report


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    write_runs(folder, CONVERGED)
    return folder


@pytest.fixture
def status(mlperf: Callable[..., str]) -> Callable[..., str]:
    return partial(mlperf, EXIT_OK, "campaign", "status")


@pytest.mark.slow
def test_the_status_of_ten_closed_runs_has_the_verdict(
    ten: Path, status: Callable[..., str]
) -> None:
    text = status(ten)
    rows = [line.split() for line in text.splitlines() if line.startswith("run-")]
    assert [row[0] for row in rows] == [f"run-{number:02}" for number in range(10)]
    assert rows[0][1:] == ["converged", "27", "7,077,888", "0.5850", "7,077,888", "1360.00"]
    assert "10 runs: 10 ended, 10 reached the target after 7,077,888 to 7,602,176 samples" in text
    assert "accepted: mean of 8 runs 7,438,336 samples" in text
    low, high = (f"{value:,.0f}" for value in reference_point(512, "6.1.0").band)  # type: ignore[union-attr]
    assert f"need {low} to {high} samples" in text
    assert "10 runs  ####" in text


def test_unfinished_runs_are_forecast(
    ten: Path, tmp_path: Path, status: Callable[..., str]
) -> None:
    copy = shutil.copytree(ten, tmp_path / "copy")
    for number in range(3, 10):
        log = copy / f"run-{number:02}" / "mlperf.log"
        lines = log.read_text().splitlines(keepends=True)
        ends = [index for index, line in enumerate(lines) if '"eval_stop"' in line]
        log.write_text("".join(lines[: ends[15] + 1]))
    (copy / "run-09" / "mlperf.log").write_text("")
    text = status(copy)
    assert "10 runs: 3 ended, 3 reached the target" in text
    row = next(line for line in text.splitlines() if line.startswith("run-04"))
    assert row.split()[1:3] == ["training", "16"]
    assert "~" in row or row.split()[5] == "-"
    waiting = next(line for line in text.splitlines() if line.startswith("run-09"))
    assert waiting.split()[1:] == ["waiting", "0", "0", "-", "-", "-"]


@pytest.mark.parametrize("value", ["1" + "0" * 400, "true", '"low"', "null", "NaN"])
def test_losses_that_are_no_numbers_break_no_status(
    tmp_path: Path, status: Callable[..., str], value: str
) -> None:
    (folder,) = write_runs(tmp_path, (5,))
    log = folder / "mlperf.log"
    text = re.sub(
        r'("key": "eval_accuracy", "value": )[0-9.e-]+', rf"\g<1>{value}", log.read_text()
    )
    assert text != log.read_text()
    log.write_text(
        text.replace(
            '"key": "target_accuracy", "value": 0.586',
            f'"key": "target_accuracy", "value": {value}',
        )
    )
    assert "1 run" in status(tmp_path)


def test_a_run_faster_than_the_reference_is_named(
    tmp_path: Path, status: Callable[..., str]
) -> None:
    write_runs(tmp_path, (20,))
    text = status(tmp_path / "run-00")
    assert "run-00 is faster than the reference's runs" in text
    assert "a result needs 10 runs" in text


def test_open_runs_are_not_compared(tmp_path: Path, status: Callable[..., str]) -> None:
    write_runs(tmp_path, (5,), logging={"mlperf": {"division": "open"}})
    assert "open division: no comparison" in status(tmp_path)


ENDS: list[tuple[str, dict[str, str], str, str]] = [
    ("reached", {}, "converged", ""),
    ("aborted though it reached it", {'"success"': '"aborted"'}, "aborted", ""),
    (
        "missed",
        {"0.585": "0.6", '"success"': '"aborted"'},
        "not converged",
        "target was not reached:",
    ),
    ("a success that it is not", {"0.585": "0.6"}, "not converged", "target was not reached:"),
    (
        "no target",
        {'y", "value": 0.586': 'y", "value": null', "0.585": "0.6"},
        NO_TARGET,
        NO_TARGET,
    ),
    (
        "no target, nor a success",
        {'y", "value": 0.586': 'y", "value": null', "0.585": "0.6", '"success"': '"aborted"'},
        "aborted",
        "aborted, no target set",
    ),
    (
        "a target of its own",
        {'y", "value": 0.586': 'y", "value": 0.61', "0.585": "0.6"},
        "converged",
        "own target of 0.61 was reached, the benchmark's was not",
    ),
    (
        "no target, but the benchmark's is reached",
        {'y", "value": 0.586': 'y", "value": null'},
        "converged",
        "",
    ),
    ("another tool's, without a target", {'"target_accuracy"': '"other"'}, "converged", ""),
    (
        "another tool's that missed",
        {'"target_accuracy"': '"other"', "0.585": "0.6"},
        "not converged",
        "target was not reached:",
    ),
    ("running", {'"run_stop"': '"other"', "0.585": "0.6"}, "training", "not reached yet:"),
    (
        "running, no target",
        {'y", "value": 0.586': 'y", "value": null', "0.585": "0.6", '"run_stop"': '"other"'},
        "training",
        "training, no target set",
    ),
]
"""What is changed in the log of an open run that reached its target; its state, and what the check says."""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "changes", "state", "text"), ENDS, ids=[row[0] for row in ENDS])
def test_status_and_check_say_the_same_of_a_run(
    what: str,
    changes: dict[str, str],
    state: str,
    text: str,
    tmp_path: Path,
    status: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder,) = write_runs(tmp_path, (4,), logging={"mlperf": {"division": "open"}})
    log = folder / "mlperf.log"
    content = log.read_text()
    for old, new in changes.items():
        assert old in content
        content = content.replace(old, new)
    log.write_text(content)
    shown = status(tmp_path)
    assert next(line for line in shown.splitlines() if line.startswith("run-00  ")).startswith(
        f"run-00  {state}  "
    )
    assert ("1 reached the target" in shown) == (state == "converged")
    main(["mlperf", "check", str(log)])
    checked = capsys.readouterr().out
    assert text in checked
    assert ("averaged_validation_loss was" in checked) == bool(text)
    run = read_run(log)
    assert (run.samples is None) == (run.minutes == math.inf) == (state != "converged")


def test_runs_without_a_target_are_counted_as_such(
    tmp_path: Path, status: Callable[..., str]
) -> None:
    folders = write_runs(tmp_path, (4, 4, 4), logging={"mlperf": {"division": "open"}})
    for folder in folders[1:]:
        log = folder / "mlperf.log"
        text = log.read_text().replace('y", "value": 0.586', 'y", "value": null')
        log.write_text(text.replace("0.585", "0.6"))
    assert "2 runs: 2 ended, no target set\n" in status(*folders[1:])
    text = status(*folders)
    assert "3 runs: 3 ended, 1 reached the target after 1,048,576" in text
    assert "; 2 ended, no target set" in text


def test_a_closed_run_has_the_benchmarks_target_whatever_it_states(
    tmp_path: Path, status: Callable[..., str]
) -> None:
    (folder,) = write_runs(tmp_path, (4,))
    log = folder / "mlperf.log"
    changed = log.read_text().replace('y", "value": 0.586', 'y", "value": 0.7')
    log.write_text(changed.replace("0.585", "0.6"))
    assert "run-00  not converged" in status(folder)


def test_a_resumed_run_may_have_another_target(tmp_path: Path, status: Callable[..., str]) -> None:
    log, open_division = tmp_path / "mlperf.log", {"mlperf": {"division": "open"}}
    parts = ((0, None, 0.9), (512, None, 0.8), (1024, 0.7, 0.65), (1536, None, 0.6))
    for samples, target, loss in parts:
        config = benchmark(logging=open_division, evaluation={"target_loss": target})
        resumed = open_log(log, config, samples)
        resumed.ready()
        resumed.block_start(samples)
        resumed.block_stop(samples + 512)
        resumed.eval_accuracy(samples + 512, loss)
        resumed.run_stop("success", samples + 512)
        resumed.close()
        state = NO_TARGET if target is None else "converged"
        assert f"  {state}{'*' if samples else ''}  " in status(log)
    stated = [line.value for line in read_run(log).all("target_accuracy")]
    assert stated == [None, 0.7, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Epoch 1\n", "no line holds 'MLLOG': this is not an MLPerf log"),
        (
            ':::MLLOG {"time_ms": 1, "key": "submission_benchmark", "value": "bert", "metadata": {}}',
            "is a log of the benchmark bert; allowed: flux1",
        ),
    ],
)
def test_what_is_no_log_of_this_benchmark_is_refused(
    content: str, message: str, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text(content)
    error = mlperf(EXIT_USAGE, "campaign", "status", log)
    assert error.startswith("fluxtrain: error: PATH: got '")
    assert f"{log.name}'; {message}" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--ruleset", "5.1.0", "{0}", "{1}"],
        ["status", "{0}", "--ruleset", "5.1.0", "{1}"],
        ["--ruleset", "5.1.0", "status", "{0}", "{1}"],
        ["status", "{0}", "{1}", "--ruleset=5.1.0"],
    ],
)
def test_options_are_in_any_order(
    arguments: list[str], tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    folders = write_runs(tmp_path, (5, 6))
    given = [text.format(*folders) for text in arguments]
    text = mlperf(EXIT_OK, "campaign", *given)
    assert "2 runs: 2 ended" in text
    low, _ = reference_point(512, "5.1.0").band  # type: ignore[union-attr]
    assert f"need {low:,.0f} to" in text
    assert main(["mlperf", "campaign", *given, "--other"]) == EXIT_USAGE


def test_runs_have_the_names_that_tell_them_apart(
    tmp_path: Path, status: Callable[..., str]
) -> None:
    for name in ("a/one", "b/one", "b/two"):
        (tmp_path / name).mkdir(parents=True)
        write_log(tmp_path / name / "mlperf.log", 7, 3)
    text = status(tmp_path / "a", tmp_path / "b")
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["a/one", "b/one", "b/two"]
    flux1 = tmp_path / "example/results/box/flux1"
    flux1.mkdir(parents=True)
    for number in range(2):
        write_log(flux1 / f"result_{number}.txt", 8 + number, 3)
    text = status(flux1)
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["result_0", "result_1"]


def test_several_results_have_a_report_each(tmp_path: Path, status: Callable[..., str]) -> None:
    for system in ("box.n1", "box.n2"):
        (flux1 := tmp_path / "example/results" / system / "flux1").mkdir(parents=True)
        for number in range(2):
            write_log(flux1 / f"result_{number}.txt", 8 + number, 3)
    (other := tmp_path / "example/results/box.n1/llama31_8b").mkdir()
    (other / "result_0.txt").write_text("x")
    pattern = tmp_path / "example/results/*/flux1"
    for path in (tmp_path, tmp_path / "example", pattern):
        text = status(path)
        assert text.count("2 runs: 2 ended") == 2
        for system in ("box.n1", "box.n2"):
            assert f"{tmp_path}/example/results/{system}/flux1:\n" in text
        assert ("left out: 1 result of other benchmarks (llama31_8b 1)" in text) == (
            path != pattern
        )


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path, mlperf: Callable[..., str]) -> None:
    (folder,) = write_runs(tmp_path, (5,))
    link = tmp_path / "link.log"
    link.symlink_to(folder / "mlperf.log")
    for paths in ([folder, folder], [folder.parent, folder / "mlperf.log"], [folder, link]):
        assert "is given twice; name each run once" in mlperf(
            EXIT_USAGE, "campaign", "status", *paths
        )


def test_a_failed_job_stays_in_the_record(tmp_path: Path) -> None:
    (folder,) = write_runs(tmp_path, (5,))
    log = folder / "mlperf.log"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert ObservedRun("x", read_run(log), "Failed").state == "failed"
    assert ObservedRun("x", read_run(log), "Running").state == "training"
    assert ObservedRun("x", None, "Failed").state == "failed"
    assert ObservedRun("x", None, "Pending").state == "waiting"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status"], "give either paths or --selector"),
        (["status", "."], "no log, no output folder"),
        ([str(FILE), "more"], "give one FILE"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mlperf: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in mlperf(EXIT_USAGE, "campaign", *arguments)


# The volumes


def test_a_volume_is_read_once_for_all_its_jobs_and_the_pod_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    trainer = {
        "containers": [{"image": "trainer:1", "securityContext": {"runAsUser": 7}, "env": []}],
        "securityContext": {"runAsNonRoot": True},
    }

    def kubectl(namespace: str | None, *arguments: str, stdin: str = "") -> str:
        calls.append((arguments[0], stdin))
        if arguments[0] == "get":
            return json.dumps({"data": {"pods.json": json.dumps({"trainer": trainer})}})
        if arguments[0] == "exec":
            assert arguments[-3:] == ("/output/july/a", "/output", "/output/team/e/july")
            return json.dumps(
                {"/output/july/a": {"mlperf.log": "L"}, "/output": {"config.json": "{}"}}
            )
        return ""

    monkeypatch.setattr(output_volumes, "kubectl", kubectl)
    claim = {"output": {"persistentVolumeClaim": {"claimName": "out"}}}
    specs: dict[str, dict[str, Any]] = {
        "a": {"storage": {**claim, "outputFolder": "july/a"}},
        "b": {"storage": claim},
        "c": {"storage": {"output": {"emptyDir": {}}}},
        "d": {},
        "e": {"storage": {**claim, "isolated": True, "outputFolder": "july"}},
    }
    jobs = [
        {"metadata": {"name": name, "namespace": "team"}, "spec": spec, "status": {}}
        for name, spec in specs.items()
    ]
    assert read_outputs(jobs, "team") == {"a": {"mlperf.log": "L"}}, "b has no log"
    assert [name for name, _ in calls] == ["get", "create", "wait", "exec", "delete"]
    spec = json.loads(calls[1][1])["spec"]
    assert spec["containers"][0]["image"] == "trainer:1"
    assert spec["containers"][0]["securityContext"] == {"runAsUser": 7}
    assert spec["containers"][0]["volumeMounts"][0]["readOnly"] is True
    assert spec["volumes"] == [{"name": "output", "persistentVolumeClaim": {"claimName": "out"}}]


def test_a_volume_that_cannot_be_read_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kubectl(namespace: str | None, *arguments: str, stdin: str = "") -> str:
        raise ConfigError("kubectl", "create", "forbidden")

    monkeypatch.setattr(output_volumes, "kubectl", kubectl)
    claim = {"output": {"persistentVolumeClaim": {"claimName": "out"}}}
    jobs = [{"metadata": {"name": "a"}, "spec": {"storage": claim}, "status": {"revision": "r"}}]
    assert read_outputs(jobs, None) == {}
    assert "out: cannot be read, so pods' logs are" in capsys.readouterr().err
