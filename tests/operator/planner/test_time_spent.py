"""How a job's time was spent: all parts together are the time since its start, without suspensions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.operator.planner.pods import NOW, PENDING, make_job, make_pods, plan_with, with_status

from fluxtrain.contract.resource.status import ProgressStatus, Status, TimeSpent
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.base.reports import Progress, RankProgress
from fluxtrain_operator.planner.watchdog import (
    goodput,
    next_time_spent,
    with_stall,
    without_suspension,
)

FIRST = {"import": 5.0, "load": 20.0, "compile": 30.0, "step": 40.0, "save": 2.0}
LATER = {**FIRST, "step": 90.0, "save": 4.0, "evaluate": 3.0, "sample": 1.0, "finish": 0.5}


def report(life: int, train: float, phases: dict[str, float]) -> ProgressStatus:
    """Return what the processes report that made their first step ``life`` minutes after NOW."""
    first = stamp(NOW + 60 * life)
    return ProgressStatus(firstStepTime=first, trainSeconds=train, phaseSeconds=phases)


def spent(**parts: float) -> dict[str, float]:
    return {name: parts.get(name, 0.0) for name in TimeSpent.model_fields if name != "until"}


@pytest.mark.parametrize(
    ("old", "new", "resumed_from", "elapsed", "cause", "parts"),
    [
        (None, None, None, 50, "pending", spent(pending=50)),
        (None, report(1, 70, FIRST), 0, 100, "start", spent(start=58, step=40, save=2)),
        (report(1, 70, FIRST), report(1, 70, FIRST), 0, 10, "start", spent(start=10)),
        (
            report(1, 70, FIRST),
            report(1, 120, LATER),
            0,
            60,
            "start",
            spent(step=50, save=2, evaluate=4, other=0.5, start=3.5),
        ),
        # the next processes resumed 25 s of training before the last report
        (
            report(1, 120, LATER),
            report(9, 165, FIRST),
            95,
            120,
            "start",
            spent(start=78, step=15, save=2, redone=25),
        ),
        # from a checkpoint that is 10 s newer than the last report
        (
            report(1, 120, LATER),
            report(9, 200, FIRST),
            130,
            120,
            "start",
            spent(start=68, step=50, save=2),
        ),
        # of the time before the first checkpoint, compiling is no step
        (
            report(1, 70, FIRST),
            report(9, 70, FIRST),
            0,
            100,
            "start",
            spent(start=58, save=2, redone=40),
        ),
    ],
)
def test_time_is_added_by_cause(
    old: ProgressStatus | None,
    new: ProgressStatus | None,
    resumed_from: float | None,
    elapsed: int,
    cause: str,
    parts: dict[str, float],
) -> None:
    used = TimeSpent(until=stamp(NOW), step=1000, pending=1000)
    before = Status(startTime=stamp(NOW - 2000), progress=old, timeSpent=used)
    after = next_time_spent(before, new, NOW + elapsed, cause, resumed_from)
    assert after is not None
    assert after.until == stamp(NOW + elapsed)
    added = after.model_dump(exclude={"until"})
    added["step"] -= 1000
    added["pending"] -= 1000
    assert added == pytest.approx(parts)
    assert sum(added.values()) == pytest.approx(elapsed)


def test_a_stall_is_taken_from_its_phase() -> None:
    before = TimeSpent(until=stamp(NOW), step=500, save=10, other=90)
    stepping = with_stall(before, "step", 100)
    assert stepping is not None
    assert (stepping.step, stepping.stalled, goodput(stepping)) == (400, 100, 0.6667)
    saving = with_stall(before, "save", 100)
    assert saving is not None
    assert (saving.save, saving.stalled) == (0, 10)
    assert with_stall(None, "step", 100) is None
    assert with_stall(before, None, 100) == before


@pytest.mark.parametrize(
    ("time_spent", "fraction"),
    [
        (None, None),
        (TimeSpent(until=stamp(NOW)), None),
        (TimeSpent(until=stamp(NOW), pending=9), None),
        (TimeSpent(until=stamp(NOW), step=9), 1.0),
        (TimeSpent(until=stamp(NOW), step=900, redone=50, start=50), 0.9),
    ],
)
def test_goodput_is_the_productive_fraction(
    time_spent: TimeSpent | None, fraction: float | None
) -> None:
    assert goodput(time_spent) == fraction


def test_a_suspension_is_left_out() -> None:
    before = Status(startTime=stamp(NOW), timeSpent=TimeSpent(until=stamp(NOW), step=9))
    after = without_suspension(before, NOW + 1000)
    assert after == TimeSpent(until=stamp(NOW + 1000), step=9)
    assert without_suspension(Status(), NOW) is None


def answer(life: int, train: float, phases: dict[str, float], step: int = 7) -> Progress:
    status = report(life, train, phases).model_copy(
        update={"step": step, "last_step_time": stamp(NOW + 60 * life)}
    )
    ranks = (RankProgress(0, "step", step, step_seconds=1.0),)
    return Progress(status, phase="step", ranks=ranks, train_seconds_before=0.0)


def after(job: Job, now: float, **observed: Any) -> Job:
    """Return ``job`` with the status that the planner writes at ``now``."""
    pods = observed.pop("pods", make_pods(2, job, started=NOW + 40))
    return with_status(job, plan_with(job, *pods, now=now, **observed).status)


def test_the_parts_of_a_life_are_the_time_since_its_start() -> None:
    job = make_job()
    job = after(job, NOW, pods=())
    job = after(job, NOW + 10, pods=make_pods(2, job, **PENDING))
    assert job.status.start_time == stamp(NOW + 10)
    job = after(job, NOW + 40)  # all pods run
    job = after(job, NOW + 110, progress=answer(1, 10, {**FIRST, "step": 10.0}))
    for index in range(12, 100, 2):
        present = answer(1, index * 10, {**FIRST, "step": index * 10.0}, step=index)
        job = after(job, NOW + 100 + index * 10, progress=present)
    spent = job.status.time_spent
    assert spent is not None
    start, until = seconds(job.status.start_time), seconds(spent.until)
    assert start is not None
    assert until is not None
    parts = spent.model_dump(exclude={"until"})
    assert sum(parts.values()) == pytest.approx(until - start)
    assert parts["pending"] == pytest.approx(30)
    assert job.status.goodput == pytest.approx(parts["step"] / (until - start), abs=1e-4)


def test_progress_alone_is_written_about_once_a_minute() -> None:
    job = after(make_job(), NOW, pods=())
    job = after(job, NOW + 40)
    writes = list[float]()
    for index in range(1, 120):
        now = NOW + 40 + index * 10
        present = answer(1, index * 10.0, {"step": index * 10.0}, step=index)
        next_job = after(job, now, progress=present)
        if next_job.status != job.status:
            writes.append(now)
        job = next_job
    gaps = [second - first for first, second in pairwise(writes)]
    assert gaps[:25] == [10.0] * 25, "new processes may be watched"
    assert set(gaps[35:]) <= {60.0, 70.0, 80.0}
    lost = after(job, writes[-1] + 10, pods=make_pods(1, job), progress=answer(1, 1200, {}))
    assert lost.status != job.status, "a transition is written at once"


def test_jobs_are_written_at_different_times() -> None:
    long = {"step": 1000.0}
    intervals = set[int]()
    for uid in range(20):
        job = replace(make_job(), uid=f"uid-{uid}")
        job = after(after(job, NOW, pods=()), NOW + 40)
        job = after(job, NOW + 50, progress=answer(1, 1000, long))
        written = job.status
        wait = 50
        while after(job, NOW + wait, progress=answer(1, 1000, long, wait)).status == written:
            wait += 1
        intervals.add(wait - 50)
    assert min(intervals) >= 60
    assert max(intervals) <= 76
    assert len(intervals) > 5


IMPOSSIBLE = (0, 1, 1e10, 1e300, 1.7e308, -1e308)
"""What a trainer, which may be any program, can answer; each is a finite number."""


def test_no_answer_of_a_trainer_makes_a_job_older_than_it_is_or_its_status_invalid() -> None:
    chance = random.Random(5)
    for _ in range(200):
        job = after(make_job(), NOW, pods=())
        job = after(job, NOW + 40)
        for now in (NOW + 50, NOW + 120, NOW + 4000):
            told = {phase: chance.choice(IMPOSSIBLE) for phase in ("load", "step", "save")}
            keys = ("trainSeconds", "trainSecondsBefore", "secondsSinceStep", "stepSeconds")
            times = {"firstStepTime": chance.choice((1, now)), "lastStepTime": now}
            values = {"rank": 0, "phase": "step", "step": 7, "phaseSeconds": told, **times}
            values |= {key: chance.choice(IMPOSSIBLE) for key in keys}
            job = after(job, now, progress=Progress.from_json(values))
            spent = job.status.time_spent
            assert spent is not None
            total = sum(spent.model_dump(exclude={"until"}).values())
            assert total <= now - NOW + 1, values
