"""The status keeps the heads of the log's chain that the trainer told, and what is hostile is left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.operator.planner.pods import NOW, make_job

from fluxtrain.contract.resource.status import (
    MAX_LOG_HEADS,
    LogHead,
    ProgressStatus,
    Status,
    TimeSpent,
    read_status,
)
from fluxtrain.mlperf.chain_verify import read_heads
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.situation import RUN, Situation
from fluxtrain_operator.planner.status import next_heads, next_status


def told(records: int, digit: str = "a") -> Progress:
    progress = Progress.from_json({"logHead": {"records": records, "sha256": digit * 64}})
    assert progress is not None
    return progress


def test_the_status_has_the_head_and_verify_reads_it() -> None:
    progress = replace(told(7), status=ProgressStatus(step=3, lastStepTime=stamp(NOW - 1)))
    situation = Situation(make_job(None), Observed(progress=progress), NOW, attempt=1)
    status = next_status(situation, RUN, num_requested=1)
    assert status.log_heads == [LogHead(records=7, sha256="a" * 64, time=stamp(NOW))]
    values = status.model_dump(mode="json", by_alias=True)
    assert read_status(values).log_heads == status.log_heads
    (head,) = read_heads({"status": values})
    assert (head.records, head.sha256, head.time) == (7, "a" * 64, stamp(NOW))


def test_a_head_alone_is_no_reason_to_write_the_status_at_once() -> None:
    def next_after(before: Status, records: int, now: float) -> Status:
        progress = replace(told(records), status=ProgressStatus(step=3, lastStepTime=stamp(NOW)))
        situation = Situation(make_job(before), Observed(progress=progress), now, attempt=1)
        return next_status(situation, RUN, num_requested=1)

    first = next_after(Status(), 7, NOW)
    first = first.model_copy(update={"time_spent": TimeSpent(until=stamp(NOW))})
    assert next_after(first, 8, NOW + 1) == first
    assert [head.records for head in next_after(first, 8, NOW + 90).log_heads] == [7, 8]


def test_a_chain_that_became_shorter_or_other_changes_no_head() -> None:
    before = next_heads([], told(7), NOW)
    for again in (told(7, "b"), told(6, "b"), None, Progress(ProgressStatus())):
        assert next_heads(before, again, NOW + 60) == before


def test_of_many_heads_the_first_the_last_and_some_between_are_kept() -> None:
    heads: list[LogHead] = []
    for records in range(1, 2000):
        heads = next_heads(heads, told(records), NOW + records)
    found = [head.records for head in heads]
    assert len(found) == MAX_LOG_HEADS
    assert (found[0], found[-1]) == (1, 1999)
    assert max(b - a for a, b in pairwise(found)) < 600


def test_many_heads_that_are_told_later_do_not_displace_those_told_before() -> None:
    heads: list[LogHead] = []
    for minute in range(10):
        heads = next_heads(heads, told(minute + 1), NOW + 60 * minute)
    honest = [head.records for head in heads]
    for second in range(1, 120):
        heads = next_heads(
            heads, told(1000 * 2 ** min(second, 20) + second, "b"), NOW + 540 + second
        )
    assert len(heads) == MAX_LOG_HEADS
    assert [head.records for head in heads if head.sha256 == "a" * 64] == honest


@pytest.mark.parametrize(
    "head",
    [
        *(None, 7, "a" * 64, [], {}),
        {"records": 7},
        {"records": 0, "sha256": "a" * 64},
        {"records": -1, "sha256": "a" * 64},
        {"records": True, "sha256": "a" * 64},
        {"records": 7.0, "sha256": "a" * 64},
        {"records": 10**400, "sha256": "a" * 64},
        {"records": 7, "sha256": "A" * 64},
        {"records": 7, "sha256": "a" * 63},
        {"records": 7, "sha256": "a" * 64 + "\n"},
        {"records": 7, "sha256": ["a"] * 64},
    ],
)
def test_what_is_no_head_is_left_out(head: Any) -> None:
    progress = Progress.from_json({"step": 3, "logHead": head})
    assert progress is not None
    assert progress.log_head is None
    assert progress.status.step == 3
