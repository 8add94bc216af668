"""The dashboards: as generated, of metrics that exist, and with data once something was scraped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards.__main__ import CHART, carried
from dashboards.grafana import Dashboard, filled
from dashboards.job_page import JOB
from dashboards.operator_page import OPERATOR
from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector

from fluxtrain.report.metrics import Metrics as TrainerMetrics
from fluxtrain_operator.metrics import PHASES
from fluxtrain_operator.metrics import Metrics as OperatorMetrics

DASHBOARDS = [JOB, OPERATOR]
EXPORTER = {"gpu_gfx_activity", "gpu_health", "gpu_junction_temperature", "gpu_package_power"}
"""Metrics of AMD's device metrics exporter, by its documentation."""
WORDS = re.compile(r"\b(?:fluxtrain|process|gpu)_[a-z_]+\b")
LABELS = {"gpu_id"}
MINUTES = 30


def trainer_metrics() -> list[Metric]:
    metrics = TrainerMetrics()
    for gauge in vars(metrics).values():
        if isinstance(gauge, Gauge) and gauge is not metrics.eval_loss_by_timestep:
            gauge.set(1.0)
    metrics.eval_loss_by_timestep.labels("1/8").set(1.0)
    metrics.step_seconds.observe(0.5)
    return list(metrics.registry.collect())


def operator_metrics() -> list[Metric]:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = OperatorMetrics(registry)
    metrics.record_watch_event("node")
    metrics.count_request("GET", "pods")
    for phase in PHASES:
        metrics.jobs.labels(phase).set(1)
    return list(registry.collect())


def series(found: list[Metric], labels: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a series, as promtool writes one, and values that grow: what a scrape would have seen."""
    for metric in found:
        for sample in metric.samples:
            pairs = {**sample.labels, **labels}
            inside = ",".join(f'{name}="{value}"' for name, value in pairs.items())
            yield f"{sample.name}{{{inside}}}", f"1+1x{MINUTES}"


def scraped() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for pod in ("job-0", "job-1"):
        labels = {"namespace": "team", "fluxtraining": "job", "pod": pod, "instance": pod}
        found += series(trainer_metrics(), labels)
        exported = f'{{namespace="team",pod="{pod}",gpu_id="0"}}'
        found += [(f"{name}{exported}", f"50x{MINUTES}") for name in EXPORTER]
    found += series(operator_metrics(), {"namespace": "system", "pod": "operator-1"})
    return found


def names_of_metrics() -> set[str]:
    return {sample.name for m in trainer_metrics() + operator_metrics() for sample in m.samples}


def concrete(expr: str, namespace: str) -> str:
    """Return ``expr`` with Grafana's variables filled in."""
    values = {"$namespace": namespace, "$job": "job", "$__rate_interval": "4m", "$__range": "20m"}
    return filled(expr, values)


def queries(dashboard: Dashboard) -> list[str]:
    return [query.expr for panel in dashboard.panels for query in panel.queries]


@pytest.mark.parametrize("path", carried(), ids=lambda path: path.name)
def test_the_chart_carries_what_is_generated(path: Path) -> None:
    assert path.read_text() == carried()[path], "run make chart"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_query_is_of_metrics_that_exist(dashboard: Dashboard) -> None:
    known = names_of_metrics() | EXPORTER | LABELS
    choices = [variable.query for variable in dashboard.variables]
    for expr in [*queries(dashboard), *choices]:
        words = set(WORDS.findall(expr))
        assert words
        assert words <= known, expr


def test_every_metric_of_ours_is_on_a_dashboard_or_left_out_on_purpose() -> None:
    shown = {word for d in DASHBOARDS for expr in queries(d) for word in WORDS.findall(expr)}
    ours = {m.name for m in trainer_metrics() + operator_metrics() if m.name.startswith("flux")}
    assert {name for name in ours if not any(word.startswith(name) for word in shown)} == set()


@pytest.mark.parametrize(("dashboard", "namespace"), [(JOB, "team"), (OPERATOR, "system")])
def test_every_query_returns_data_once_something_was_scraped(
    dashboard: Dashboard, namespace: str, promtool: Callable[..., Any], tmp_path: Path
) -> None:
    tests = [
        {
            "expr": f"count({concrete(expr, namespace)}) > bool 0",
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for expr in queries(dashboard)
    ]
    data = [{"series": name, "values": values} for name, values in scraped()]
    case = {"interval": "1m", "input_series": data, "promql_expr_test": tests}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    promtool("test", "rules", file)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_lie_side_by_side_within_the_page(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.to_json()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_say_what_they_show_and_where_from(dashboard: Dashboard) -> None:
    text = (CHART / "files" / "dashboards" / f"{dashboard.uid.split('-')[1]}.json").read_text()
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
