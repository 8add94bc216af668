"""Rank 0's newest report: whatever a trainer tells, its steps have times that the status can hold."""

from __future__ import annotations

import pytest
from tests.operator.planner.pods import NOW, make_pod

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.situation import Report, newest_report


@pytest.mark.parametrize("since", [0.0, 1.5, 10.0**8, 1e300, -5.0, -1e300])
def test_the_last_step_is_neither_in_the_future_nor_before_1970(since: float) -> None:
    told = ProgressStatus(step=7, firstStepTime=stamp(NOW), lastStepTime=stamp(NOW + 60))
    report = Report(Progress(told, seconds_since_step=since), NOW)
    assert report.last_step_time is not None
    assert 0 <= report.last_step_time <= NOW
    assert report.first_step_time == report.last_step_time - 60
    time = report.status_after(None, ()).last_step_time
    assert stamp(0) <= (time or "") <= stamp(NOW)


def test_a_report_before_the_first_step_has_no_times() -> None:
    report = Report(Progress(ProgressStatus(), seconds_since_step=3.0), NOW)
    assert (report.last_step_time, report.first_step_time) == (None, None)
    assert report.status_after(None, ()) == ProgressStatus()
    assert not report.follows(None)


def test_an_older_trainer_is_believed() -> None:
    told = ProgressStatus(step=7, lastStepTime=stamp(NOW + 60))
    report = Report(Progress(told), NOW)
    assert (report.last_step_time, report.first_step_time) == (NOW + 60, None)
    assert report.status_after(ProgressStatus(step=7, lastStepTime=stamp(NOW + 58)), ()) == told


@pytest.mark.parametrize(
    ("step", "known", "kept"),
    [(7, 0.0, True), (7, -5.0, True), (7, 5.0, True), (7, -6.0, False), (7, 6.0, False), (6, 0.0, True),
     (6, -1.0, False)],
)  # fmt: skip
def test_the_same_step_keeps_its_time(step: int, known: float, kept: bool) -> None:
    told = ProgressStatus(step=7, lastStepTime=stamp(NOW + 3600))
    before = ProgressStatus(step=step, lastStepTime=stamp(NOW - 9 + known))
    time = (
        Report(Progress(told, seconds_since_step=9.0), NOW).status_after(before, ()).last_step_time
    )
    assert (time == before.last_step_time) == kept
    assert kept or time == stamp(NOW - 9)


@pytest.mark.parametrize(("known", "follows"), [(-60.0, True), (5.0, True), (6.0, False)])
def test_a_report_follows_one_whose_last_step_is_not_later(known: float, follows: bool) -> None:
    report = Report(Progress(ProgressStatus(lastStepTime=stamp(1.0)), seconds_since_step=0.0), NOW)
    assert report.follows(ProgressStatus(lastStepTime=stamp(NOW + known))) == follows


def test_the_report_with_the_latest_step_is_the_newest() -> None:
    def report(step: int, since: float | None) -> Progress:
        last = None if since is None else stamp(1.0)
        return Progress(ProgressStatus(step=step, lastStepTime=last), seconds_since_step=since)

    assert newest_report(Observed(), NOW) is None
    pods = (make_pod(0), make_pod(1, final_progress=report(5, 3.0), finished=NOW - 20))
    for since, newest in ((22.0, 7), (24.0, 5), (None, 5)):
        found = newest_report(Observed(pods, progress=report(7, since)), NOW)
        assert found is not None
        assert found.progress.status.step == newest
