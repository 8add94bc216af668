"""The dashboards: as generated, with queries of existing metrics that return data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from dashboards.__main__ import CHART, generated, main
from dashboards.draw import Curve, last_values
from dashboards.grafana import Dashboard, substitute
from dashboards.job_page import JOB
from dashboards.operator_page import OPERATOR
from prometheus_client import Metric
from tests.chart.objects import Program
from tests.chart.prometheus_rules import (
    make_test,
    metric_names,
    operator_metrics,
    run_tests,
    trainer_metrics,
)

DASHBOARDS = [JOB, OPERATOR]
EXPORTER = {"gpu_gfx_activity", "gpu_health", "gpu_junction_temperature", "gpu_package_power"}
"""Metrics of AMD's device metrics exporter, by its documentation."""
METRIC = re.compile(r"\b(?:fluxtrain|process|gpu)_[a-z_]+\b")
LABELS = {"gpu_id"}
MINUTES = 30


def scraped() -> dict[str, str]:
    """Return the series of a job with two pods and of the operator, as a scrape returns them."""
    result: dict[str, str] = {}
    for pod in ("job-0", "job-1"):
        labels = {"namespace": "team", "fluxtraining": "job", "pod": pod, "instance": pod}
        result |= growing(trainer_metrics(), labels)
        exported = f'{{namespace="team",pod="{pod}",gpu_id="0"}}'
        result |= {f"{name}{exported}": f"50x{MINUTES}" for name in EXPORTER}
    return result | growing(operator_metrics(), {"namespace": "system", "pod": "operator-1"})


def growing(metrics: list[Metric], labels: dict[str, str]) -> dict[str, str]:
    """Return increasing values of all series of ``metrics``, whose own labels are honoured."""
    samples = [sample for metric in metrics for sample in metric.samples]
    return {
        f"{sample.name}{{{inside({**labels, **sample.labels})}}}": f"1+1x{MINUTES}"
        for sample in samples
    }


def inside(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def concrete(expr: str, namespace: str) -> str:
    """Return ``expr`` with Grafana's variables substitute in."""
    values = {"$namespace": namespace, "$job": "job", "$__rate_interval": "4m", "$__range": "20m"}
    return substitute(expr, values)


def queries(dashboard: Dashboard) -> list[str]:
    return [query.expr for panel in dashboard.panels for query in panel.queries]


def test_a_panel_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match="--panels: Los: no panel of the job dashboard"):
        main(["draw", "--job=job", "--panels=Loss,Los"])


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_the_chart_contains_the_generated_files(path: Path) -> None:
    assert path.read_text() == generated()[path], "run make chart"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_query_reads_existing_metrics(dashboard: Dashboard) -> None:
    known = metric_names() | EXPORTER | LABELS
    choices = [variable.query for variable in dashboard.variables]
    for expr in [*queries(dashboard), *choices]:
        metrics = set(METRIC.findall(expr))
        assert metrics
        assert metrics <= known, expr


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {name for d in DASHBOARDS for expr in queries(d) for name in METRIC.findall(expr)}
    ours = {m.name for m in trainer_metrics() + operator_metrics() if m.name.startswith("flux")}
    assert {m for m in ours if not any(name.startswith(m) for name in shown)} == set()


@pytest.mark.parametrize(("dashboard", "namespace"), [(JOB, "team"), (OPERATOR, "system")])
def test_every_query_returns_data(
    dashboard: Dashboard, namespace: str, promtool: Program, tmp_path: Path
) -> None:
    tests = [
        {
            "expr": f"count({concrete(expr, namespace)}) > bool 0",
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for expr in queries(dashboard)
    ]
    test = make_test(scraped(), promql_expr_test=tests)
    assert "SUCCESS" in run_tests(promtool, tmp_path, [test])


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_do_not_overlap_and_fit_the_page(dashboard: Dashboard) -> None:
    occupied: set[tuple[int, int]] = set()
    for panel in dashboard.to_json()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & occupied, panel["title"]
        occupied |= cells


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_have_a_description_and_the_data_source(dashboard: Dashboard) -> None:
    text = (CHART / "files" / "dashboards" / f"{dashboard.uid.split('-')[1]}.json").read_text()
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_the_last_value_of_each_stat_is_drawn_in_its_unit(dashboard: Dashboard) -> None:
    curve = Curve({}, [0.0, 15.0], [1.0, 0.4449])
    data = {p.title: {query: [curve] for query in p.queries} for p in dashboard.panels}
    texts = last_values(dashboard, data).split(" · ")
    assert len(texts) == sum(panel.kind == "stat" for panel in dashboard.panels)
    assert "Goodput 44.5%" in texts
    assert last_values(dashboard, {title: {} for title in data}) == "", "no data"
