"""``logs``: which pod has rank 0, and which part of its log is the whole MLPerf log."""

from __future__ import annotations

import json

import pytest

from fluxtrain_operator.kubectl.logs import mlperf_log, rank_0_of


def event(time: float, key: str) -> str:
    return f":::MLLOG {json.dumps({'time_ms': time, 'key': key})}"


BEGIN = [event(1, "cache_clear"), event(1, "init_start"), event(5, "run_start")]
BLOCK = event(7, "block_start")


def test_only_events_are_part_of_the_mlperf_log() -> None:
    assert mlperf_log(["step 1", BEGIN[0], "", f"[rank0] {BEGIN[1]}  "]) == BEGIN[:2]


def test_events_that_restarted_processes_repeat_stand_once() -> None:
    first, second = [*BEGIN, event(9, "block_stop")], [*BEGIN, BLOCK]
    assert mlperf_log([*first, "Traceback", *second]) == second


@pytest.mark.parametrize("lines", [[], ["step 1"], ["MLLOG"]])
def test_a_log_without_events_has_no_mlperf_log(lines: list[str]) -> None:
    assert mlperf_log(lines) == []


@pytest.mark.parametrize(
    ("texts", "pod"),
    [
        ({"job-0": "", "job-1": "\n".join([*BEGIN, BLOCK])}, "job-1"),
        ({"job-0": "\n".join(BEGIN), "job-1": "\n".join([*BEGIN, BLOCK])}, "job-1"),
        ({"job-0": "\n".join([*BEGIN, BLOCK]), "job-1": "\n".join(BEGIN) + "\nx" * 99}, "job-0"),
        ({"job-0": "short", "job-1": "a longer log"}, "job-1"),
        ({"job-0": ":::MLLOG {broken", "job-1": BLOCK}, "job-1"),
        ({"job-0": ':::MLLOG {"time_ms": "x"}', "job-1": BLOCK}, "job-1"),
        ({"job-0": ":::MLLOG [1]"}, "job-0"),
    ],
    ids=["only_one", "newer", "newer_but_shorter", "no_events", "broken", "no_time", "no_object"],
)
def test_rank_0_is_in_the_pod_with_the_newest_event(texts: dict[str, str], pod: str) -> None:
    assert rank_0_of(texts) == pod
