"""The alerts: each fires when it should, and not a moment of what is normal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from tests.paths import ROOT

from fluxtrain.report.metrics import Metrics as TrainerMetrics
from fluxtrain_operator.metrics import PHASES
from fluxtrain_operator.metrics import Metrics as OperatorMetrics

ALERTS = ROOT / "charts" / "fluxtrain-operator" / "files" / "alerts.yaml"
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
"""Values, one a minute, in promtool's notation, by series."""


def steps(values: str) -> Series:
    """Return a job whose last step was at the Unix times ``values``; its processes started at 0."""
    return {
        f"fluxtrain_last_progress_timestamp_seconds{POD}": values,
        f"fluxtrain_step_seconds_created{POD}": "0x300",
    }


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

FIRES: list[tuple[str, str, Series, dict[str, str]]] = [
    # A step each minute for ten minutes, then none.
    ("FluxTrainingNoProgress", "50m", steps("0+60x10 600x60"), JOB),
    ("FluxTrainingNoProgress", "70m", steps("0x120"), JOB),  # never a step
    ("FluxTrainingRestartStorm", "25m", starts("1x4 2x4 3x4 4x4 5x10"), JOB),
    ("FluxTrainingUnhealthyGPU", "20m", gpu("1x10 0x30"), GPU),
    (LOSS, "5m", {f"fluxtrain_train_loss{POD}": "0.6 0.6 NaN NaN NaN NaN NaN NaN"}, JOB),
    (LOSS, "5m", {f"fluxtrain_grad_norm{POD}": "0.6 0.6 Inf Inf Inf Inf Inf Inf"}, JOB),
    (LOSS, "5m", {f"fluxtrain_eval_loss{POD}": "0.6 0.6 NaN NaN NaN NaN NaN NaN"}, JOB),
    ("FluxTrainingOperatorDown", "10m", {}, {}),  # nobody scraped
    ("FluxTrainingOperatorDown", "10m", {f"fluxtrain_operator_leader{OPERATOR}": "0x20"}, SYSTEM),
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
    ("FluxTrainingNoProgress", "50m", steps("0+60x60")),
    ("FluxTrainingNoProgress", "40m", steps("0+60x10 600x60")),  # a long evaluation
    ("FluxTrainingNoProgress", "50m", steps("0x120")),  # a long start
    ("FluxTrainingNoProgress", "90m", steps("0+60x10 _x90")),  # ended
    ("FluxTrainingRestartStorm", "25m", starts("1x10 2x20")),
    ("FluxTrainingRestartStorm", "59m", starts("1x4 2x4 3x4 4x4 5x50")),  # it is over
    ("FluxTrainingUnhealthyGPU", "20m", gpu("1x30")),
    ("FluxTrainingUnhealthyGPU", "20m", gpu("0x30", pod="of-somebody-else")),
    (LOSS, "5m", {f"fluxtrain_train_loss{POD}": "0.6x10", f"fluxtrain_grad_norm{POD}": "1x10"}),
    ("FluxTrainingOperatorDown", "10m", {f"fluxtrain_operator_leader{OPERATOR}": "1x20"}),
    # A fail-over: half a minute without a leader is normal.
    ("FluxTrainingOperatorDown", "10m", {f"fluxtrain_operator_leader{OPERATOR}": "1x8 0x1 1x20"}),
    ("FluxTrainingPendingTooLong", "35m", phase("Pending", "1x20 0x1 1x60")),
    ("FluxTrainingRestartingTooLong", "35m", phase("Restarting", "1x10 0x60")),
    ("FluxTrainingFailed", "35m", phase("Failed", "2x20 3x40")),  # told, and over
    (
        "FluxTrainingReconcileErrors",
        "20m",
        {f"fluxtrain_operator_reconcile_errors_total{OPERATOR}": "0x10 2x30"},
    ),
]


def fields(case: tuple[Any, ...]) -> tuple[str, str, Series]:
    return case[0], case[1], case[2]


def run(
    promtool: Callable[..., Any], folder: Path, case: tuple[str, str, Series], check: bool = True
) -> Any:
    """Let promtool say whether the alert is silent at the time of ``case``."""
    alert, time, found = case
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in found.items()],
        "alert_rule_test": [{"alertname": alert, "eval_time": time, "exp_alerts": []}],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    return promtool("test", "rules", file, check=check)


@pytest.mark.parametrize("case", FIRES, ids=lambda case: f"{case[0]} at {case[1]}")
def test_an_alert_fires(
    case: tuple[str, str, Series, dict[str, str]],
    promtool: Callable[..., Any],
    tmp_path: Path,
) -> None:
    done = run(promtool, tmp_path, fields(case), check=False)
    told = done.stdout + done.stderr
    assert done.returncode != 0, "silent"
    got = told[told.index("got:") :]
    labels = {"alertname": case[0], "severity": RULES[case[0]]["labels"]["severity"], **case[3]}
    for name, value in labels.items():
        assert f'{name}="{value}"' in got
    assert "summary" in got
    assert "<no value>" not in got
    assert "error executing template" not in got


@pytest.mark.parametrize("case", SILENT, ids=lambda case: f"{case[0]} at {case[1]}")
def test_an_alert_is_silent(
    case: tuple[str, str, Series], promtool: Callable[..., Any], tmp_path: Path
) -> None:
    run(promtool, tmp_path, case)


def test_every_alert_has_a_case_of_each_kind() -> None:
    assert {case[0] for case in FIRES} == RULES.keys()
    assert {case[0] for case in SILENT} == RULES.keys()


def test_every_alert_is_of_metrics_that_exist() -> None:
    registry = CollectorRegistry()
    metrics = OperatorMetrics(registry)
    for phase_ in PHASES:
        metrics.jobs.labels(phase_).set(0)
    found = [*TrainerMetrics().registry.collect(), *registry.collect()]
    known = {sample.name for metric in found for sample in metric.samples} | EXPORTER
    known |= {metric.name for metric in found}  # gauges have no sample before their first value
    for rule in RULES.values():
        assert set(re.findall(r"\b(?:fluxtrain_|gpu_h)[a-z_]+", rule["expr"])) <= known
        assert set(re.findall(r'phase="(\w+)"', rule["expr"])) <= set(PHASES)


@pytest.mark.parametrize("alert", RULES)
def test_every_alert_says_what_to_do(alert: str) -> None:
    notes = RULES[alert]["annotations"]
    assert {"summary", "description", "runbook"} <= notes.keys()
    page, _, heading = notes["runbook"].partition("#")
    assert heading == alert.lower()
    assert f"### {alert}\n" in (ROOT / page).read_text()
