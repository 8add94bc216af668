"""A real Prometheus scrapes a real run: every panel has data, no alert is active, the status is complete."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.kubectl import Manifest
from cluster.programs import debian
from dashboards.draw import Curve, Span, curves, draw
from dashboards.grafana import Dashboard, Panel, substitute
from dashboards.job_page import JOB
from dashboards.operator_page import OPERATOR
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.integrations.prometheus import SCRAPE_SECONDS, Prometheus, targets_of
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import RUN, Operator, condition, is_complete, losses, step

from fluxtrain_operator.base.names import seconds

pytestmark = pytest.mark.proof

NAMESPACE = "prometheus"
NAME = "watched"
STEPS = 300
EMPTY = {
    "MFU": "the peak of a CPU is unknown",
    "Distrusted nodes": "no node has a fault",
} | dict.fromkeys(
    ("Activity", "Power", "Junction temperature"), "no GPU, so no metrics of AMD's exporter"
)
"""Panels that have no data in this run, and why."""
PICTURED = ("Loss", "Throughput", "Step time", "Nodes", "Restarts", "Lost time")
"""Panels of the picture in docs/operator.md."""
WITHOUT_DATA = (
    "fluxtrain_memory_reserved_bytes",  # torch's allocator reserves memory of GPUs
    *("fluxtrain_target_samples", "fluxtrain_reference_samples"),  # of runs with a target
)
"""Metrics in panels that have data of others."""


class ScrapedJob(Jobs):
    """A job, its operator, and a Prometheus that scrapes its pods and the operator."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        super().__init__(kubectl, folder, NAMESPACE)
        program = debian.find("prometheus")
        assert program is not None, "cluster.prepare installs it"
        self.prometheus = Prometheus(program, folder / "prometheus")
        self.began = time.time()

    def status(self, name: str) -> Manifest:
        """Return the job's status; scrape the current pods from now on."""
        pods = [*self.pods(name).values(), as_pod(self.operator)]
        self.prometheus.set_targets(target for pod in pods for target in targets_of(pod))
        return super().status(name)

    def curves(self, expr: str) -> list[Curve]:
        """Return the series of ``expr`` over the whole run, as Grafana queries them."""
        span = Span(self.began, time.time(), SCRAPE_SECONDS)
        return curves(self.prometheus.url, substitute(expr, self.variables(span)), span)

    def variables(self, span: Span) -> dict[str, str]:
        """Return Grafana's variables."""
        return {
            "$namespace": NAMESPACE,
            "$job": NAME,
            "$__range": f"{int(span.end - span.start) + 1}s",
            "$__rate_interval": f"{4 * SCRAPE_SECONDS}s",
        }

    def maximum(self, metric: str) -> float:
        return max(max(curve.values) for curve in self.curves(metric))

    def suspend(self, value: bool) -> None:
        stage.suspend(self.kubectl, NAMESPACE, NAME, value)


def as_pod(operator: Operator) -> Manifest:
    """Return a pod for the operator, which is a process of this machine."""
    labels = {"app.kubernetes.io/name": "fluxtrain-operator"}
    port = {"name": "http", "containerPort": operator.port}
    return {
        "metadata": {"name": "operator", "namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": [{"ports": [port]}]},
        "status": {"podIP": "127.0.0.1", "phase": "Running"},
    }


@pytest.fixture
def scraped(kubectl: Kubectl, tmp_path: Path) -> Iterator[ScrapedJob]:
    scraped = ScrapedJob(kubectl, tmp_path)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, scraped.output)
    try:
        scraped.operator.start()
        scraped.prometheus.start()
        yield scraped
    finally:
        scraped.prometheus.stop()
        stage.clear(kubectl, NAMESPACE)
        scraped.operator.stop()


def panels(dashboard: Dashboard) -> list[Panel]:
    return [panel for panel in dashboard.panels if panel.title not in EMPTY]


def test_an_interrupted_run_is_monitored_from_first_to_last_step(
    scraped: ScrapedJob,
) -> None:
    run = {**RUN, "schedule": {"steps": STEPS}, "evaluation": {"every_samples": 640}}
    scraped.apply(NAME, run=run, nodes={"min": 2, "max": 2})
    scraped.wait(NAME, lambda s: step(s) >= 10)
    wait_for_no_alert(scraped)
    scraped.kubectl("delete", "pod", f"{NAME}-0", "--now", f"--namespace={NAMESPACE}")
    step_at_deletion = max(losses(scraped.output))
    scraped.wait(NAME, lambda s: max(losses(scraped.output)) > step_at_deletion + 20)

    scraped.suspend(True)
    paused = scraped.wait(NAME, lambda s: condition(s, "Suspended").get("status") == "True")
    assert step(paused) == max(losses(scraped.output)), "the termination message of a deleted pod"
    saved = max(int(path.name[5:]) for path in (scraped.output / "checkpoints").glob("step_*"))
    assert saved == step(paused), "a checkpoint of the last step is saved"
    stage.wait_for(lambda: not scraped.pods(NAME), "a suspended job keeps no pods", seconds=60)
    scraped.suspend(False)
    resumed = scraped.wait(NAME, lambda s: step(s) > step(paused) or is_complete(s))
    assert 0 < resumed["goodput"] < 1
    assert resumed["suspendedSeconds"] >= 0

    check_final_status(scraped, scraped.wait(NAME, is_complete))
    wait_for_no_alert(scraped)
    check_dashboards(scraped)
    check_operator_metrics(scraped)
    check_drawing(scraped)


def wait_for_no_alert(scraped: ScrapedJob) -> None:
    """Wait until no alert is firing or pending, and all are evaluated without errors."""

    def active() -> list[tuple[str, str, str]]:
        rules = scraped.prometheus.rules()
        assert len(rules) >= 9
        return [rule for rule in rules if rule[1:] != ("inactive", "ok")]

    time.sleep(2 * SCRAPE_SECONDS)  # a scrape, and an evaluation
    stage.wait_for(lambda: not active(), lambda: str(active()), seconds=20)


def check_final_status(scraped: ScrapedJob, status: Manifest) -> None:
    """Check the status of the complete job against metrics.jsonl."""
    lines = (scraped.output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert list(losses(scraped.output)) == list(range(1, STEPS + 1))
    progress = status["progress"]
    assert progress["step"] == status["checkpoint"]["step"] == STEPS
    for key, name in (("train_loss", "trainLoss"), ("eval_loss", "evalLoss")):
        last = [record[key] for record in records if key in record][-1]
        assert progress[name] == pytest.approx(last, rel=1e-5), name
    assert progress["remainingSeconds"] == 0
    started, ended = (seconds(status[key]) for key in ("startTime", "completionTime"))
    assert started is not None
    assert ended is not None
    active = ended - started - status["suspendedSeconds"]
    before = status["trainSecondsBefore"]  # not 0 if the first trainer was lost
    assert 0 <= before < 1
    useful = progress["trainSeconds"] - before
    spent = {part: time for part, time in status["timeSpent"].items() if part != "until"}
    assert sum(spent.values()) == pytest.approx(active, abs=4), "four times in whole seconds"
    assert spent["step"] == pytest.approx(useful, abs=1)
    assert status["goodput"] == pytest.approx(spent["step"] / sum(spent.values()), abs=1e-3)
    print(f"goodput {status['goodput']} of {active:.0f} s with one pod lost and one pause")


def check_dashboards(scraped: ScrapedJob) -> None:
    """Check that each query of each panel, and each variable, has data."""
    empty = [
        f"{dashboard.uid}: {panel.title}: {query.expr}"
        for dashboard in (JOB, OPERATOR)
        for panel in panels(dashboard)
        for query in panel.queries
        if bool(scraped.curves(query.expr)) == any(metric in query.expr for metric in WITHOUT_DATA)
    ]
    assert empty == [], "or has data that it should not have"
    for panel in (*JOB.panels, *OPERATOR.panels):
        if panel.title in EMPTY:
            assert not scraped.curves(panel.queries[0].expr), (
                f"{panel.title} has data: check it too"
            )
    for variable, value in (("namespace", NAMESPACE), ("fluxtraining", NAME)):
        assert value in scraped.prometheus.values(
            variable, "fluxtrain_last_progress_timestamp_seconds"
        )
    assert scraped.prometheus.values("namespace", "fluxtrain_operator_leader") == {NAMESPACE}
    for curve in [*scraped.curves("fluxtrain_step"), *scraped.curves("fluxtrain_samples")]:
        assert all(curve.values[i + 1] > 0 for i, value in enumerate(curve.values[:-1]) if value), (
            "gauges do not fall to 0 at a resume"
        )


def check_operator_metrics(scraped: ScrapedJob) -> None:
    prefix = "fluxtrain_operator"
    assert scraped.maximum(f"{prefix}_time_to_first_step_seconds_count") == 1
    assert scraped.maximum(f"{prefix}_recovery_seconds_count") >= 1
    assert scraped.maximum(f"{prefix}_pods_created_total") >= 7, (
        "two, one, two, and rendezvous pods"
    )
    assert scraped.maximum(f"{prefix}_reconcile_errors_total") == 0
    assert scraped.maximum(f'{prefix}_jobs{{phase="Complete"}}') == 1
    for name in ("time_to_first_step", "recovery"):
        print(f"{name}: {scraped.maximum(f'{prefix}_{name}_seconds_sum'):.0f} s")


def check_drawing(scraped: ScrapedJob) -> None:
    """Check that the dashboard can be drawn, except panels without data."""
    span, path = Span(scraped.began, time.time(), SCRAPE_SECONDS), scraped.output.parent / "job.png"
    without_data = set(draw(JOB, scraped.prometheus.url, scraped.variables(span), span, path))
    assert without_data == {panel.title for panel in JOB.panels} & EMPTY.keys()
    assert path.read_bytes().startswith(b"\x89PNG")
    some = path.with_name("some.png")
    draw(JOB, scraped.prometheus.url, scraped.variables(span), span, some, PICTURED)
    heights = [int.from_bytes(each.read_bytes()[20:24]) for each in (some, path)]  # of PNG's header
    assert heights[0] < heights[1] / 2
    print(f"{path}, and of docs/pictures/dashboard.png {some}")
