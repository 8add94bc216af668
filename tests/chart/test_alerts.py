"""The alerts: each fires in its cases, and is silent in similar normal ones."""

from __future__ import annotations

import re

import pytest
import yaml
from tests.chart.objects import CHART, Program
from tests.chart.prometheus_rules import make_test, metric_names, run_tests
from tests.paths import ROOT

from fluxtrain_operator.metrics import PHASES

ALERTS = CHART / "files" / "alerts.yaml"
EXPORTER = {"gpu_health"}
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]
}
POD = '{namespace="team", fluxtraining="job", pod="job-0", instance="job-0"}'
OPERATOR = '{namespace="system", pod="operator-1"}'
JOB = {"namespace": "team", "fluxtraining": "job"}
SYSTEM = {"namespace": "system"}

Series = dict[str, str]
"""Values, one per minute, in promtool's notation, by series."""


def ranks(*seconds: str, limits: tuple[str, ...] = ("120x300", "120x300")) -> Series:
    """Return the series of ranks of two pods, with their seconds without progress."""
    series: Series = {}
    for rank, (since, limit) in enumerate(zip(seconds, limits, strict=False)):
        labels = POD.replace("job-0", f"job-{rank}").replace("}", f', rank="{rank}"}}')
        series[f"fluxtrain_since_progress_seconds{labels}"] = since
        series[f"fluxtrain_stall_limit_seconds{labels}"] = limit
    return series


def answers(values: str, pod: str = "job-0") -> Series:
    return {f"up{POD}".replace("job-0", pod): values}


def starts(values: str) -> Series:
    return {f"fluxtrain_step_seconds_created{POD}": values}


def gpu(health: str, pod: str = "job-0") -> Series:
    labels = f'{{namespace="team", pod="{pod}", gpu_id="3", hostname="node-7"}}'
    return {
        f"gpu_health{labels}": health,
        f"fluxtrain_last_progress_timestamp_seconds{POD}": "0x60",
    }


def phase(name: str, values: str) -> Series:
    return {f'fluxtrain_operator_jobs{{namespace="system", pod="o", phase="{name}"}}': values}


GPU = {**JOB, "pod": "job-0", "gpu_id": "3", "hostname": "node-7"}
LOSS = "FluxTrainingLossNotFinite"
FAST, DIVERGING = "FluxTrainingTooFast", "FluxTrainingDiverging"


def convergence(target: str = "7.3e6x60", samples: str = "1e6x60") -> Series:
    """Return the series of a benchmark run whose reference needs 7.1 to 7.8 million samples."""
    return {
        f"fluxtrain_target_samples{POD}": target,
        f"fluxtrain_samples{POD}": samples,
        f"fluxtrain_reference_samples_low{POD}": "7.1e6x60",
        f"fluxtrain_reference_samples_high{POD}": "7.8e6x60",
    }


NOT_SERVED, WATCH = "FluxTrainingNamespaceNotServed", {"kind": "pod", "resource_namespace": "team"}


def failing_watch(values: str, leader: str = "1x60") -> Series:
    """Return the series of a watch of pods in one namespace that fails while it is 1."""
    labels = 'kind="pod",resource_namespace="team"'
    return {
        f"fluxtrain_operator_failing_watches{OPERATOR[:-1]},{labels}}}": values,
        f"fluxtrain_operator_leader{OPERATOR}": leader,
    }


FIRES: list[tuple[str, str, Series, dict[str, str]]] = [
    # A step each minute for ten minutes, then none: stalled after 12 minutes, restarted by nobody.
    ("FluxTrainingNoProgress", "29m", ranks("0x10 0+60x60"), JOB),
    ("FluxTrainingNoProgress", "29m", ranks("0x10 0+60x60", "0x10 0+60x60"), JOB),
    # An evaluation may take 30 minutes between two batches.
    ("FluxTrainingNoProgress", "57m", ranks("0x10 0+60x90", limits=("120x10 1800x90",)), JOB),
    # Frozen processes do not answer.
    ("FluxTrainingNoProgress", "1h30m", answers("1x20 0x100"), JOB),
    (
        "FluxTrainingNoProgress",
        "1h30m",
        {**answers("1x20 0x100"), **answers("0x120", "job-1")},
        JOB,
    ),
    ("FluxTrainingRestartStorm", "25m", starts("1x4 2x4 3x4 4x4 5x10"), JOB),
    ("FluxTrainingUnhealthyGPU", "20m", gpu("1x10 0x30"), GPU),
    (LOSS, "5m", {f"fluxtrain_train_loss{POD}": "0.6 0.6 NaN NaN NaN NaN NaN NaN"}, JOB),
    (LOSS, "5m", {f"fluxtrain_grad_norm{POD}": "0.6 0.6 Inf Inf Inf Inf Inf Inf"}, JOB),
    (LOSS, "5m", {f"fluxtrain_eval_loss{POD}": "0.6 0.6 NaN NaN NaN NaN NaN NaN"}, JOB),
    (FAST, "30m", convergence(target="NaN NaN 7e6x40"), JOB),
    (DIVERGING, "30m", {f"fluxtrain_eval_loss{POD}": "0.7x5 0.6x5 0.64x30"}, JOB),
    (DIVERGING, "30m", convergence(samples="7.6e6x10 9e6x30"), JOB),
    ("FluxTrainingOperatorDown", "10m", {}, {}),  # not scraped
    ("FluxTrainingOperatorDown", "10m", {f"fluxtrain_operator_leader{OPERATOR}": "0x20"}, SYSTEM),
    (NOT_SERVED, "25m", failing_watch("0x10 1x60"), {**SYSTEM, **WATCH}),
    ("FluxTrainingPendingTooLong", "35m", phase("Pending", "1x60"), SYSTEM),
    ("FluxTrainingRestartingTooLong", "35m", phase("Restarting", "2x60"), SYSTEM),
    ("FluxTrainingFailed", "25m", phase("Failed", "2x20 3x20"), SYSTEM),
    (
        "FluxTrainingReconcileErrors",
        "20m",
        {f"fluxtrain_operator_reconcile_errors_total{OPERATOR}": "0+1x30"},
        SYSTEM,
    ),
]

SILENT: list[tuple[str, str, Series]] = [
    ("FluxTrainingNoProgress", "50m", ranks("0x60", "30x60")),
    # The operator restarts the job when it has stalled.
    ("FluxTrainingNoProgress", "50m", ranks("0x10 0+60x5 0x60")),
    # A long evaluation, save, load or compilation of a rank, for which the others wait.
    ("FluxTrainingNoProgress", "50m", ranks("0x10 0+60x60", limits=("120x10 3600x60",))),
    (
        "FluxTrainingNoProgress",
        "50m",
        ranks("0x10 0+60x60", "0x10 0+60x60", limits=("120x60", "120x10 3600x60")),
    ),
    ("FluxTrainingNoProgress", "90m", ranks("0+60x10 _x90")),  # ended
    ("FluxTrainingNoProgress", "90m", answers("1x10 _x90")),
    ("FluxTrainingNoProgress", "90m", answers("_x50 0x60")),  # the image is pulled
    ("FluxTrainingNoProgress", "90m", {**answers("0x120"), **answers("1x120", "job-1")}),
    ("FluxTrainingRestartStorm", "25m", starts("1x10 2x20")),
    ("FluxTrainingRestartStorm", "59m", starts("1x4 2x4 3x4 4x4 5x50")),  # the storm has ended
    ("FluxTrainingUnhealthyGPU", "20m", gpu("1x30")),
    ("FluxTrainingUnhealthyGPU", "20m", gpu("0x30", pod="other")),
    (LOSS, "5m", {f"fluxtrain_train_loss{POD}": "0.6x10", f"fluxtrain_grad_norm{POD}": "1x10"}),
    (FAST, "30m", convergence(target="7.2e6x40")),
    (FAST, "30m", convergence(target="7e6x10" + 30 * " NaN")),  # no longer known
    (FAST, "15m", convergence(target="8e6x10 7e6x4 8e6x20")),  # one evaluation
    (FAST, "30m", {f"fluxtrain_target_samples{POD}": "7e6x40"}),  # no benchmark
    (DIVERGING, "30m", {f"fluxtrain_eval_loss{POD}": "0.7x5 0.6x5 0.61x30"}),
    (DIVERGING, "30m", convergence(samples="7.6e6x40")),
    (DIVERGING, "30m", {f"fluxtrain_samples{POD}": "9e6x40"}),
    ("FluxTrainingOperatorDown", "10m", {f"fluxtrain_operator_leader{OPERATOR}": "1x20"}),
    # A fail-over: half a minute without a leader is normal.
    ("FluxTrainingOperatorDown", "10m", {f"fluxtrain_operator_leader{OPERATOR}": "1x8 0x1 1x20"}),
    (NOT_SERVED, "25m", failing_watch("1x20 0x60")),
    (NOT_SERVED, "25m", failing_watch("1x60", leader="0x60")),  # of a replica that stands by
    ("FluxTrainingPendingTooLong", "35m", phase("Pending", "1x20 0x1 1x60")),
    ("FluxTrainingRestartingTooLong", "35m", phase("Restarting", "1x10 0x60")),
    ("FluxTrainingFailed", "35m", phase("Failed", "2x20 3x40")),  # reported before
    (
        "FluxTrainingReconcileErrors",
        "20m",
        {f"fluxtrain_operator_reconcile_errors_total{OPERATOR}": "0x10 2x30"},
    ),
]


CASES = [*(case[:3] for case in FIRES), *SILENT]


def time_of(number: int) -> str:
    """Return when a case is evaluated: each has its own second of the minute, by which it is known."""
    return f"{CASES[number][1]}{number + 1}s"


def name_of(number: int) -> str:
    return f"{CASES[number][0]}, time: {time_of(number)}"


@pytest.fixture(scope="module")
def fired(promtool: Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return promtool's reports of the alerts that fire, by case; it runs once and expects none."""
    tests = []
    for number, (alert, _, series) in enumerate(CASES):
        test = {"alertname": alert, "eval_time": time_of(number), "exp_alerts": []}
        tests.append(make_test(series, alert_rule_test=[test]))
    output = run_tests(promtool, tmp_path_factory.mktemp("alerts"), tests, ALERTS)
    reports = [report.partition(", \n") for report in output.split("alertname: ")[1:]]
    return {name: report[report.index("got:") :] for name, _, report in reports}


@pytest.mark.parametrize("number", range(len(FIRES)), ids=lambda number: FIRES[number][0])
def test_an_alert_fires(number: int, fired: dict[str, str]) -> None:
    alert, _, _, labels = FIRES[number]
    report = fired[name_of(number)]
    labels = {"alertname": alert, "severity": RULES[alert]["labels"]["severity"], **labels}
    for name, value in labels.items():
        assert f'{name}="{value}"' in report
    assert "summary" in report
    assert "<no value>" not in report
    assert "error executing template" not in report


def test_no_other_alert_fires(fired: dict[str, str]) -> None:
    assert fired.keys() == {name_of(number) for number in range(len(FIRES))}


def test_every_alert_has_a_case_of_each_kind() -> None:
    assert {case[0] for case in FIRES} == RULES.keys()
    assert {case[0] for case in SILENT} == RULES.keys()


def test_every_alert_reads_existing_metrics() -> None:
    known = metric_names() | EXPORTER
    for rule in RULES.values():
        assert set(re.findall(r"\b(?:fluxtrain_|gpu_h)[a-z_]+", rule["expr"])) <= known
        assert set(re.findall(r'phase="(\w+)"', rule["expr"])) <= set(PHASES)


@pytest.mark.parametrize("alert", RULES)
def test_every_alert_has_a_runbook(alert: str) -> None:
    notes = RULES[alert]["annotations"]
    assert {"summary", "description", "runbook_url"} <= notes.keys()
    page, _, heading = notes["runbook_url"].partition("#")
    assert heading == alert.lower()
    name = page.removeprefix("https://fluxtrain.dev/")
    assert f"### {alert}\n" in (ROOT / name).read_text()
