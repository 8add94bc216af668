"""The operator's metrics count what their help texts state, across leaders and repeated statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from cluster.free_ports import free_port
from prometheus_client import CollectorRegistry
from tests.operator.jobs import KEY, make_training

from fluxtrain.contract.resource.status import Condition, ProgressStatus, Status, TimeSpent
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.metrics import PHASES, Metrics
from fluxtrain_operator.operate import Health, serve
from fluxtrain_operator.planner.plan import Plan, load

CREATED = 1_800_000_000.0


def at(first: float | None, last: float, **others: Any) -> Status:
    """Return the status with first and last step so many seconds after the job's creation."""
    first_time = None if first is None else stamp(CREATED + first)
    last_time = stamp(CREATED + last)
    progress = ProgressStatus(step=7, firstStepTime=first_time, lastStepTime=last_time)
    return Status(progress=progress, **others)


@pytest.mark.parametrize(
    ("address", "hosts"),
    [("", ["127.0.0.1", "[::1]"]), ("127.0.0.1", ["127.0.0.1"]), ("::1", ["[::1]"])],
)
def test_the_port_is_reached_by_ipv4_and_ipv6(address: str, hosts: list[str]) -> None:
    async def answers() -> list[str]:
        port = free_port()
        close = await serve(CollectorRegistry(), Health(), address, port)
        try:
            async with aiohttp.ClientSession() as session:
                urls = [f"http://{host}:{port}/healthz" for host in hosts]
                return [await (await session.get(url)).text() for url in urls]
        finally:
            await close()

    assert asyncio.run(answers()) == ["ok\n"] * len(hosts)


def suspension(status: Any, at: float) -> list[Condition]:
    time = stamp(CREATED + at)
    return [Condition(type="Suspended", status=status, reason="Why", lastTransitionTime=time)]


def record(metrics: Metrics, *statuses: Status) -> dict[str, float]:
    """Return the samples without labels after the job had ``statuses``."""
    before: dict[str, Any] = {}
    for status in statuses:
        manifest = make_training(status=before, creationTimestamp=stamp(CREATED))
        metrics.record_plan(KEY, load(manifest, "trainer:1"), Plan(status))
        before = as_json(status)
    return values(metrics)


def as_json(status: Status) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def values(metrics: Metrics) -> dict[str, float]:
    samples = (s for m in metrics.registry.collect() for s in m.samples if not s.labels)
    return {s.name.removeprefix("fluxtrain_operator_"): s.value for s in samples}


RESUMED = {"conditions": suspension("False", 600)}
RUNS: list[tuple[str, list[Status], float, float]] = [
    ("no progress", [Status(), Status(phase="Starting")], 0, 0),
    ("first progress", [Status(), at(30, 38)], 30, 0),
    ("a first step in the year 9600", [Status(), at(2.4e11, 38)], 0, 0),
    ("more progress", [at(30, 38), at(30, 48)], 30, 0),
    ("progress after a restart", [at(30, 38), at(50, 55)], 30, 12),
    (
        "a restart without progress at first",
        [at(30, 38), at(30, 38, phase="Restarting"), at(51, 55), at(51, 65)],
        30,
        13,
    ),
    (
        "a suspension in between",
        [
            at(30, 38, conditions=suspension("True", 45)),
            *(at(30, 38, **RESUMED), at(620, 625, **RESUMED), at(640, 645, **RESUMED)),
        ],
        30,
        15,
    ),
    ("an operator that did not record the first step", [at(None, 38), at(30, 48)], 0, 0),
]


@pytest.mark.parametrize(
    ("statuses", "start", "recovery"), [run[1:] for run in RUNS], ids=[run[0] for run in RUNS]
)
def test_starts_and_recoveries_are_measured_by_the_trainers_times(
    statuses: list[Status], start: float, recovery: float
) -> None:
    observed = record(Metrics(CollectorRegistry()), *statuses)
    assert observed["time_to_first_step_seconds_sum"] == start
    assert observed["time_to_first_step_seconds_count"] == (start > 0)
    assert observed["recovery_seconds_sum"] == recovery
    assert observed["recovery_seconds_count"] == (recovery > 0)


def test_a_recovery_is_measured_by_the_operators_clock() -> None:
    metrics, hour = Metrics(CollectorRegistry()), 3600
    manifest = make_training(status=as_json(at(hour, 38)), creationTimestamp=stamp(CREATED))
    job = load(manifest, "trainer:1")
    for _ in range(3):  # until the status is written
        metrics.record_plan(KEY, job, Plan(job.status, first_step_time=CREATED + 50))
    metrics.record_plan(KEY, job, Plan(at(hour + 20, 55), first_step_time=CREATED + 50))
    assert values(metrics)["recovery_seconds_sum"] == 12
    assert values(metrics)["recovery_seconds_count"] == 1


def jobs(metrics: Metrics) -> dict[str, float]:
    gauge = next(m for m in metrics.registry.collect() if m.name == "fluxtrain_operator_jobs")
    return {s.labels["phase"]: s.value for s in gauge.samples if s.value}


def test_jobs_are_counted_by_phase_until_they_are_deleted() -> None:
    metrics = Metrics(CollectorRegistry())
    for number, phase in enumerate([*PHASES, "Failed"]):
        metrics.set_phase(("ns", str(number)), phase)
    assert jobs(metrics) == {**dict.fromkeys(PHASES, 1), "Failed": 2}
    metrics.set_phase(("ns", "0"), "Running")
    metrics.remove_job(("ns", str(len(PHASES))))
    metrics.remove_job(("ns", "unknown"))
    assert jobs(metrics) == {**dict.fromkeys(PHASES[1:], 1), "Running": 2}


def test_a_watch_has_an_age_after_its_first_event() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.record_watch_event("pod")
    ages = [s for m in metrics.registry.collect() for s in m.samples if "watch_age" in s.name]
    assert [(s.labels, s.value < 60) for s in ages] == [({"kind": "pod"}, True)]


PER_JOB = {"fluxtrain_operator_goodput_ratio", "fluxtrain_operator_spent_seconds"}
"""The metrics with series per job, whose number is bounded."""


def test_units_are_base_units_and_few_metrics_have_labels_per_job() -> None:
    metrics = Metrics(CollectorRegistry())
    record_job(metrics, "a", TRAINED)
    for metric in metrics.registry.collect():
        assert metric.name.startswith("fluxtrain_operator_")
        assert metric.documentation.endswith(".")
        assert not metric.name.endswith(("_ms", "_milliseconds", "_minutes", "_kb"))
        labels = {k for s in metric.samples for k in s.labels}
        per_job = {"job", "name", "namespace", "fluxtraining", "uid"} & labels
        assert per_job == ({"namespace", "fluxtraining"} if metric.name in PER_JOB else set())


def test_the_time_of_jobs_is_counted_by_how_it_was_spent() -> None:
    metrics = Metrics(CollectorRegistry())
    for parts in ({"step": 50, "start": 10}, {"step": 30, "start": 20, "redone": 25}):
        status = Status(timeSpent={"until": "2026-01-01T00:00:00Z", **parts})
        record(metrics, Status(), status)
    samples = [
        s for m in metrics.registry.collect() for s in m.samples if "job_seconds_t" in s.name
    ]
    assert {s.labels["part"]: s.value for s in samples if s.value} == {
        "step": 80,
        "start": 30,
        "redone": 25,
    }
    assert len(samples) == 8, "every part has a series from the start"


def test_a_correction_downwards_counts_nothing() -> None:
    metrics = Metrics(CollectorRegistry())
    before = Status(timeSpent=TimeSpent(until="2026-01-01T00:00:00Z", step=50))
    after = Status(timeSpent=TimeSpent(until="2026-01-01T00:01:00Z", step=30, redone=20, start=60))
    record(metrics, before, after)
    samples = [
        s for m in metrics.registry.collect() for s in m.samples if "job_seconds_t" in s.name
    ]
    assert {s.labels["part"]: s.value for s in samples if s.value} == {
        "step": 50,
        "redone": 20,
        "start": 60,
    }


SPENT = TimeSpent(until="2026-01-01T00:00:00Z", step=80, start=15, redone=5)
TRAINED = Status(phase="Running", timeSpent=SPENT, goodput=0.8)


def record_job(metrics: Metrics, name: str, status: Status, created: float = CREATED) -> None:
    manifest = make_training(name=name, creationTimestamp=stamp(created))
    metrics.record_plan(("ns", name), load(manifest, "trainer:1"), Plan(status))


def series_of_jobs(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the series of single jobs by the values of their labels, the namespace left out."""
    samples = [s for m in metrics.registry.collect() for s in m.samples]
    of_jobs = [s for s in samples if "fluxtraining" in s.labels]
    assert all(s.labels["namespace"] == "ns" for s in of_jobs)
    assert all(set(s.labels) <= {"namespace", "fluxtraining", "part"} for s in of_jobs)
    return {tuple(v for k, v in s.labels.items() if k != "namespace"): s.value for s in of_jobs}


def test_a_job_has_its_goodput_and_its_time_by_how_it_was_spent() -> None:
    metrics = Metrics(CollectorRegistry())
    assert series_of_jobs(metrics) == {}
    record_job(metrics, "a", TRAINED)
    observed = series_of_jobs(metrics)
    assert len(observed) == 9
    assert {labels: value for labels, value in observed.items() if value} == {
        ("a",): 0.8,
        ("a", "step"): 80,
        ("a", "start"): 15,
        ("a", "redone"): 5,
    }


def test_a_job_without_a_step_has_no_goodput_and_one_without_a_start_no_series() -> None:
    metrics = Metrics(CollectorRegistry())
    record_job(metrics, "queued", Status(phase="Pending"))
    assert series_of_jobs(metrics) == {}
    record_job(metrics, "queued", Status(phase="Starting", timeSpent=SPENT))
    assert len(series_of_jobs(metrics)) == 8
    assert ("queued",) not in series_of_jobs(metrics)


def end(condition: str) -> Status:
    time = stamp(CREATED + 100)
    conditions = [Condition(type=condition, status="True", reason="Why", lastTransitionTime=time)]
    return TRAINED.model_copy(update={"conditions": conditions, "phase": condition})


@pytest.mark.parametrize(
    "leave",
    [
        lambda metrics: record_job(metrics, "a", end("Complete")),
        lambda metrics: record_job(metrics, "a", end("Failed")),
        lambda metrics: record_job(metrics, "a", Status(phase="Pending")),
        lambda metrics: metrics.record_refusal(("ns", "a"), "Failed"),
        lambda metrics: metrics.remove_job(("ns", "a")),
    ],
    ids=["complete", "failed", "created again", "rejected", "deleted"],
)
def test_the_series_of_a_job_vanish_with_it(leave: Callable[[Metrics], None]) -> None:
    metrics = Metrics(CollectorRegistry())
    record_job(metrics, "a", TRAINED)
    record_job(metrics, "b", TRAINED)
    leave(metrics)
    leave(metrics)
    assert {labels[0] for labels in series_of_jobs(metrics)} == {"b"}


@pytest.mark.slow
def test_only_the_thousand_newest_unfinished_jobs_have_series() -> None:
    metrics = Metrics(CollectorRegistry())
    for number in range(1100):
        record_job(metrics, f"job-{number}", TRAINED, created=CREATED + number // 2)
    names = {labels[0] for labels in series_of_jobs(metrics)}
    assert names == {f"job-{number}" for number in range(100, 1100)}
    for number in range(600, 1100):
        record_job(metrics, f"job-{number}", end("Complete"), created=CREATED + number // 2)
    names = {labels[0] for labels in series_of_jobs(metrics)}
    assert names == {f"job-{number}" for number in range(600)}, "older ones take their place"
