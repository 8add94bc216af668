"""``goodput``: totals from the status of any version, and a column for each cause of lost time."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.kubectl.objects import make_training
from tests.operator.planner.pods import LONG_AGO, NOW

from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.kubectl.timeline import goodput_table, spent_seconds

STATUS = {
    "phase": "Running",
    "goodput": 0.9,
    "startTime": stamp(LONG_AGO),
    "suspendedSeconds": 1200,
    "trainSecondsBefore": 400.0,
    "progress": {"trainSeconds": 5800.0},
}


def rows(*statuses: dict[str, Any], **options: Any) -> list[list[str]]:
    jobs = [make_training(status) for status in statuses]
    return [line.split() for line in goodput_table(jobs, NOW, **options).splitlines()]


def test_totals_follow_from_the_status() -> None:
    assert rows(STATUS) == [
        ["NAME", "PHASE", "GOODPUT", "TIME", "PRODUCTIVE", "LOST"],
        ["job", "Running", "90.0%", "1h40m", "1h30m", "10m"],
    ]


def test_a_job_without_status_or_progress_has_none() -> None:
    waits = {"phase": "Pending", "startTime": stamp(NOW - 60)}
    assert rows({}, waits)[1:] == [
        ["job", "-", "-", "-", "-", "-"],
        ["job", "Pending", "-", "1m", "-", "-"],
    ]


def test_the_time_of_an_ended_job_does_not_grow() -> None:
    assert rows({**STATUS, "completionTime": stamp(NOW - 600)})[1][3] == "1h30m"


def test_the_time_of_a_suspended_job_does_not_grow() -> None:
    since = {"type": "Suspended", "status": "True", "lastTransitionTime": stamp(NOW - 600)}
    assert rows({**STATUS, "conditions": [since]})[1][3] == "1h30m"
    assert rows({**STATUS, "conditions": [{**since, "status": "False"}]})[1][3] == "1h40m"


def test_lost_time_by_cause_has_a_column_for_each_cause_of_any_job() -> None:
    until = {"until": stamp(NOW)}
    one = {**STATUS, "timeSpent": {"step": 540.0, "redone": 60.0, "save": 0.0, **until}}
    two = {**STATUS, "timeSpent": {"step": 30, "pending": 30, "cause_of_a_newer_operator": 5}}
    first, second, third = rows(one, two, STATUS)[0], rows(one, two)[1], rows(one, two)[2]
    assert first[6:] == ["REDONE", "PENDING", "CAUSE_OF_A_NEWER_OPERATOR"]
    assert second[3:] == ["10m", "9m", "1m", "1m", "-", "-"]
    assert third[3:] == ["1m5s", "30s", "35s", "-", "30s", "5s"]
    assert rows(one, two, STATUS)[3][3:] == ["1h40m", "1h30m", "10m", "-", "-", "-"]


@pytest.mark.parametrize("field", [0.5, None, "0.5", [1], {}, {"until": "now", "step": True}])
def test_other_values_are_no_time(field: Any) -> None:
    assert spent_seconds({"timeSpent": field}) == {}


def test_namespaces_are_a_column_of_all_namespaces() -> None:
    assert rows(STATUS, with_namespace=True)[1][:2] == ["team", "job"]
