"""The operator's metrics: each says what its help text says, whoever leads and whatever comes twice."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fluxtrain.contract.resource.status import Condition, ProgressStatus, Status
from fluxtrain_operator.metrics import PHASES, Metrics
from fluxtrain_operator.planner.plan import Plan, load
from fluxtrain_operator.timestamps import stamp

CREATED = 1_800_000_000.0
KEY = ("team", "job")


def progress(first: float | None, last: float) -> ProgressStatus:
    """Return progress of processes whose first and last steps were so long after the job's creation."""
    began = None if first is None else stamp(CREATED + first)
    return ProgressStatus(step=7, firstStepTime=began, lastStepTime=stamp(CREATED + last))


def suspension(status: Any, at: float) -> Condition:
    time = stamp(CREATED + at)
    return Condition(type="Suspended", status=status, reason="Why", lastTransitionTime=time)


def told(metrics: Metrics, *statuses: Status) -> dict[str, float]:
    """Return count and sum of both histograms once the job went through ``statuses``."""
    before: dict[str, Any] = {}
    for status in statuses:
        manifest = {
            "apiVersion": "fluxtrain.dev/v1alpha1",
            "kind": "FluxTraining",
            "metadata": {"name": "job", "uid": "u", "creationTimestamp": stamp(CREATED)},
            "spec": {"run": {"preset": "micro"}},
            "status": before,
        }
        metrics.observe(KEY, load(manifest, "trainer:1"), Plan(status))
        before = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return values(metrics)


def values(metrics: Metrics) -> dict[str, float]:
    found = {s.name: s.value for m in metrics.registry.collect() for s in m.samples if not s.labels}
    return {name.removeprefix("fluxtrain_operator_"): value for name, value in found.items()}


RUNS: list[tuple[str, list[Status], float, float]] = [
    ("nothing was heard", [Status(), Status(phase="Starting")], 0, 0),
    ("first words", [Status(), Status(progress=progress(30, 38))], 30, 0),
    ("heard again", [Status(progress=progress(30, 38)), Status(progress=progress(30, 48))], 30, 0),
    (
        "other processes go on",
        [Status(progress=progress(30, 38)), Status(progress=progress(50, 55))],
        30,
        12,
    ),
    (
        "other processes came, and are silent so far",
        [
            Status(progress=progress(30, 38)),
            Status(progress=progress(30, 38), phase="Restarting"),
            Status(progress=progress(51, 55)),
            Status(progress=progress(51, 65)),
        ],
        30,
        13,
    ),
    (
        "a pause lies between",
        [
            Status(progress=progress(30, 38), conditions=[suspension("True", 45)]),
            Status(progress=progress(30, 38), conditions=[suspension("False", 600)]),
            Status(progress=progress(620, 625), conditions=[suspension("False", 600)]),
            Status(progress=progress(640, 645), conditions=[suspension("False", 600)]),
        ],
        30,
        15,
    ),
    (
        "a status of before there were first steps in it",
        [Status(progress=progress(None, 38)), Status(progress=progress(30, 48))],
        0,
        0,
    ),
]


@pytest.mark.parametrize(("statuses", "start", "recovery"), [run[1:] for run in RUNS])
def test_starts_and_recoveries_are_told_by_the_trainers_own_times(
    statuses: list[Status], start: float, recovery: float
) -> None:
    found = told(Metrics(CollectorRegistry()), *statuses)
    assert found["time_to_first_step_seconds_sum"] == start
    assert found["time_to_first_step_seconds_count"] == (start > 0)
    assert found["recovery_seconds_sum"] == recovery
    assert found["recovery_seconds_count"] == (recovery > 0)


def jobs(metrics: Metrics) -> dict[str, float]:
    found = next(m for m in metrics.registry.collect() if m.name == "fluxtrain_operator_jobs")
    return {s.labels["phase"]: s.value for s in found.samples if s.value}


def test_jobs_are_counted_by_their_phase_until_they_are_gone() -> None:
    metrics = Metrics(CollectorRegistry())
    for number, phase in enumerate([*PHASES, "Failed"]):
        metrics.is_in(("team", str(number)), phase)
    assert jobs(metrics) == {**dict.fromkeys(PHASES, 1), "Failed": 2}
    metrics.is_in(("team", "0"), "Running")
    metrics.forget(("team", str(len(PHASES))))
    metrics.forget(("team", "never seen"))
    assert jobs(metrics) == {**dict.fromkeys(PHASES[1:], 1), "Running": 2}


def test_a_watch_has_an_age_once_it_spoke() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.heard("pod")
    ages = [s for m in metrics.registry.collect() for s in m.samples if "watch_age" in s.name]
    assert [(s.labels, s.value < 60) for s in ages] == [({"kind": "pod"}, True)]


def test_units_are_base_units_and_no_label_names_a_job() -> None:
    for metric in Metrics(CollectorRegistry()).registry.collect():
        assert metric.name.startswith("fluxtrain_operator_")
        assert metric.documentation.endswith(".")
        assert not metric.name.endswith(("_ms", "_milliseconds", "_minutes", "_kb"))
        assert not {"job", "name", "namespace"} & {k for s in metric.samples for k in s.labels}
