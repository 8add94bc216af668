"""A real Prometheus scrapes a real run: every panel has data, no alert is active, the status ends whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster import prometheus as programs
from cluster.kubectl import Kubectl, Manifest
from dashboards.draw import Curve, Span, curves, draw
from dashboards.grafana import Dashboard, Panel, filled
from dashboards.job_page import JOB
from dashboards.operator_page import OPERATOR
from tests.end_to_end import stage
from tests.end_to_end.prometheus import SCRAPE_SECONDS, Prometheus, targets_of
from tests.end_to_end.stage import RUN, Operator, condition, is_complete, losses, step

from fluxtrain_operator.timestamps import seconds

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

NAMESPACE = "prometheus"
NAME = "watched"
STEPS = 600
EMPTY = {"MFU": "nobody states the peak of a CPU"} | dict.fromkeys(
    ("Activity", "Power", "Junction temperature"), "no GPU here, and so no exporter of AMD's"
)
"""Panels that have no data in this run, and why."""


@dataclass
class Scene:
    """An operator, a Prometheus that watches it and its pods, and the job's output."""

    kubectl: Kubectl
    operator: Operator
    prometheus: Prometheus
    output: Path
    began: float = field(default_factory=time.time)

    def status(self) -> Manifest:
        """Return the job's status; Prometheus sees the pods that there are now."""
        found = self.kubectl.get("ft,pods", f"--namespace={NAMESPACE}")["items"]
        pods = [*(each for each in found if each["kind"] == "Pod"), as_pod(self.operator)]
        self.prometheus.see(target for pod in pods for target in targets_of(pod))
        (job,) = (each for each in found if each["metadata"]["name"] == NAME)
        status: Manifest = job.get("status", {})
        return status

    def wait(self, done: Any, seconds: float = 400) -> Manifest:
        """Return the status once ``done`` says so."""
        found: Manifest = {}

        def looked() -> bool:
            nonlocal found
            time.sleep(0.4)  # each look costs a tenth of a second of CPU
            found = self.status()
            return bool(done(found))

        stage.wait_for(
            looked,
            lambda: (
                json.dumps(found, indent=1)
                + self.operator.log()
                + stage.logs(self.kubectl, NAMESPACE, NAME)
            ),
            seconds=seconds,
        )
        return found

    def curves(self, expr: str) -> list[Curve]:
        """Return what there is of ``expr``, as Grafana asks for it, over the whole time."""
        span = Span(self.began, time.time(), SCRAPE_SECONDS)
        return curves(self.prometheus.url, filled(expr, self.variables(span)), span)

    def variables(self, span: Span) -> dict[str, str]:
        """Return Grafana's variables."""
        return {
            "$namespace": NAMESPACE,
            "$job": NAME,
            "$__range": f"{int(span.end - span.start) + 1}s",
            "$__rate_interval": f"{4 * SCRAPE_SECONDS}s",
        }

    def most(self, metric: str) -> float:
        return max(max(curve.values) for curve in self.curves(metric))

    def suspend(self, value: bool) -> None:
        stage.suspend(self.kubectl, NAMESPACE, NAME, value)


def as_pod(operator: Operator) -> Manifest:
    """Return the pod that the operator, a process of this machine here, would be."""
    labels = {"app.kubernetes.io/name": "fluxtrain-operator"}
    port = {"name": "http", "containerPort": operator.port}
    return {
        "metadata": {"name": "operator", "namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": [{"ports": [port]}]},
        "status": {"podIP": "127.0.0.1", "phase": "Running"},
    }


@pytest.fixture
def scene(kubectl: Kubectl, tmp_path: Path) -> Iterator[Scene]:
    program = programs.find("prometheus")
    assert program is not None, "cluster.prepare brings it"
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, tmp_path / "output")
    operator = Operator(kubectl, NAMESPACE, tmp_path)
    prometheus = Prometheus(program, tmp_path / "prometheus")
    try:
        operator.start()
        prometheus.start()
        yield Scene(kubectl, operator, prometheus, tmp_path / "output")
    finally:
        prometheus.stop()
        stage.clear(kubectl, NAMESPACE)
        operator.stop()


def panels(dashboard: Dashboard) -> list[Panel]:
    return [panel for panel in dashboard.panels if panel.title not in EMPTY]


def test_a_run_that_is_interrupted_is_watched_from_its_first_step_to_its_last_words(
    scene: Scene,
) -> None:
    run = {**RUN, "schedule": {"steps": STEPS}, "evaluation": {"every_samples": 640}}
    job = stage.job(NAME, run=run, nodes={"min": 2, "max": 2})
    scene.kubectl.apply(job, namespace=NAMESPACE)
    scene.wait(lambda s: step(s) >= 10)
    wait_for_no_alert(scene)
    scene.kubectl("delete", "pod", f"{NAME}-0", "--now", f"--namespace={NAMESPACE}")
    gone_at = max(losses(scene.output))
    scene.wait(lambda s: max(losses(scene.output)) > gone_at + 20)

    scene.suspend(True)
    paused = scene.wait(lambda s: condition(s, "Suspended").get("status") == "True")
    assert step(paused) == max(losses(scene.output)), "the last words of a pod that is gone"
    scene.suspend(False)
    resumed = scene.wait(lambda s: step(s) > step(paused) or is_complete(s))
    assert 0 < resumed["goodput"] < 1
    assert resumed["suspendedSeconds"] >= 0

    check_the_end(scene, scene.wait(is_complete))
    wait_for_no_alert(scene)
    check_the_dashboards(scene)
    check_the_operators_numbers(scene)
    check_the_picture(scene)


def wait_for_no_alert(scene: Scene) -> None:
    """Wait until no alert fires or is about to; Prometheus can evaluate all of them."""

    def active() -> list[tuple[str, str, str]]:
        found = scene.prometheus.rules()
        assert len(found) >= 9
        return [rule for rule in found if rule[1:] != ("inactive", "ok")]

    time.sleep(2 * SCRAPE_SECONDS)  # a scrape, and an evaluation
    stage.wait_for(lambda: not active(), lambda: str(active()), seconds=20)


def check_the_end(scene: Scene, found: Manifest) -> None:
    """Check the status of the complete job against what the run itself wrote."""
    lines = (scene.output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    progress = found["progress"]
    assert progress["step"] == found["checkpoint"]["step"] == STEPS
    for key, name in (("train_loss", "trainLoss"), ("eval_loss", "evalLoss")):
        last = [record[key] for record in records if key in record][-1]
        assert progress[name] == pytest.approx(last, rel=1e-5), name
    assert progress["remainingSeconds"] == 0
    started, ended = (seconds(found[key]) for key in ("startTime", "completionTime"))
    assert started is not None
    assert ended is not None
    active = ended - started - found["suspendedSeconds"]
    before = found["trainSecondsBefore"]  # not 0 where the first trainer was lost unasked
    assert 0 <= before < 1
    useful = progress["trainSeconds"] - before
    assert found["goodput"] == pytest.approx(useful / active, abs=1e-3)
    print(f"goodput {found['goodput']} of {active:.0f} s with one pod lost and one pause")


def check_the_dashboards(scene: Scene) -> None:
    """Check that each query of each panel, and each variable, has data."""
    empty = [
        f"{dashboard.uid}: {panel.title}: {query.expr}"
        for dashboard in (JOB, OPERATOR)
        for panel in panels(dashboard)
        for query in panel.queries
        if not scene.curves(query.expr)
    ]
    assert empty == []
    for panel in JOB.panels:
        if panel.title in EMPTY:
            assert not scene.curves(panel.queries[0].expr), f"{panel.title} has data: check it too"
    for variable, value in (("namespace", NAMESPACE), ("fluxtraining", NAME)):
        assert value in scene.prometheus.values(
            variable, "fluxtrain_last_progress_timestamp_seconds"
        )
    assert scene.prometheus.values("namespace", "fluxtrain_operator_leader") == {NAMESPACE}
    for curve in [*scene.curves("fluxtrain_step"), *scene.curves("fluxtrain_samples")]:
        assert all(curve.values[i + 1] > 0 for i, value in enumerate(curve.values[:-1]) if value), (
            "who resumes did not begin anew"
        )


def check_the_operators_numbers(scene: Scene) -> None:
    """Check the operator's metrics against what was done to the job."""
    prefix = "fluxtrain_operator"
    assert scene.most(f"{prefix}_time_to_first_step_seconds_count") == 1
    assert scene.most(f"{prefix}_recovery_seconds_count") >= 1
    assert scene.most(f"{prefix}_pods_created_total") >= 7, (
        "two, one, two again, and those of the store"
    )
    assert scene.most(f"{prefix}_reconcile_errors_total") == 0
    assert scene.most(f'{prefix}_jobs{{phase="Complete"}}') == 1
    for name in ("time_to_first_step", "recovery"):
        print(f"{name}: {scene.most(f'{prefix}_{name}_seconds_sum'):.0f} s")


def check_the_picture(scene: Scene) -> None:
    """Check that the dashboard can be drawn, all panels but those without data."""
    span, path = Span(scene.began, time.time(), SCRAPE_SECONDS), scene.output.parent / "job.png"
    assert set(draw(JOB, scene.prometheus.url, scene.variables(span), span, path)) == EMPTY.keys()
    assert path.read_bytes().startswith(b"\x89PNG")
    print(f"{path}: {path.stat().st_size} bytes")
