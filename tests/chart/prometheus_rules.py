"""Metrics of the trainer and the operator, and promtool's tests of rules and queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector
from tests.chart.objects import Program
from tests.operator.jobs import make_training

from fluxtrain.contract.resource.status import Status, TimeSpent
from fluxtrain.report.metrics import Metrics as TrainerMetrics
from fluxtrain.report.progress import RankProgress
from fluxtrain_operator.base.node_health import Distrust, Score
from fluxtrain_operator.metrics import PHASES
from fluxtrain_operator.metrics import Metrics as OperatorMetrics
from fluxtrain_operator.planner.plan import Plan, load

JOB = ("team", "job")
"""Namespace and name of the job that the series are of."""


def trainer_metrics() -> list[Metric]:
    """Return all metrics of a trainer, each with a value."""
    metrics = TrainerMetrics(ranks=lambda: [RankProgress(0, 1, "step", 1, 0.0, 0.0)])
    of_ranks = metrics.of_rank.values()
    labelled = (metrics.eval_loss_by_timestep, *of_ranks)
    for gauge in (*vars(metrics).values(), *metrics.of_step.values()):
        if isinstance(gauge, Gauge) and gauge not in labelled:
            gauge.set(1.0)
    metrics.eval_loss_by_timestep.labels("1/8").set(1.0)
    for gauge in of_ranks:
        gauge.labels("0").set(1.0)
    metrics.step_seconds.observe(0.5)
    return list(metrics.registry.collect())


def operator_metrics() -> list[Metric]:
    """Return all metrics of the operator, each with a value."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = OperatorMetrics(registry)
    metrics.watch_distrust(lambda: Distrust({"node-1": Score(1.0)}))
    metrics.record_watch_event("node")
    metrics.count_request("GET", "pods")
    metrics.unreadable_objects.labels("Pod").inc()
    metrics.failing_watches.labels("pod", "team").set(0)
    for phase in PHASES:
        metrics.jobs.labels(phase).set(1)
    spent = Status(timeSpent=TimeSpent(until="2026-01-01T00:00:00Z", step=9, start=1), goodput=0.9)
    metrics.record_plan(JOB, load(make_training(name=JOB[1], namespace=JOB[0]), ""), Plan(spent))
    return list(registry.collect())


def metric_names() -> set[str]:
    """Return the names of all series of the trainer and the operator."""
    metrics = trainer_metrics() + operator_metrics()
    return {sample.name for metric in metrics for sample in metric.samples}


def make_test(series: dict[str, str], **test: Any) -> dict[str, Any]:
    """Return promtool's test with one value of each of ``series`` per minute."""
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": inputs, **test}


def run_tests(
    promtool: Program, folder: Path, tests: list[dict[str, Any]], rules: Path | None = None
) -> str:
    """Run ``promtool test rules``; return its errors."""
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)] if rules else [], "tests": tests}))
    done = promtool("test", "rules", file, check=False)
    output = done.stdout + done.stderr
    assert ("FAILED" in output) == (done.returncode != 0), output
    return output
