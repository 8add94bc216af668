"""``timeline``, ``goodput``, ``logs`` and ``stacks``: what each says of statuses and logs."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.operator.kubectl.objects import make_event, make_training, running, state_of
from tests.operator.planner import pods
from tests.operator.planner.pods import LONG_AGO, NOW
from tests.trainer.rank_processes import proc_with, rank_process

from fluxtrain.contract.process import RankProcess
from fluxtrain.launch.stacks import ask_ranks
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.kubectl.client import JobObjects, event_time, events_of
from fluxtrain_operator.kubectl.logs import RankStacks, mlperf_log, rank_0_of, report, stacks_of
from fluxtrain_operator.kubectl.timeline import Entry, entries, goodput_table, spent_seconds, table


def test_a_job_without_status_has_been_created() -> None:
    assert entries(JobObjects(make_training())) == [Entry(LONG_AGO, "job", "Created", "")]


def test_all_entries_are_in_order() -> None:
    events = (
        make_event("NodeLost", "job-1: node n1 is lost; replaced", seconds_ago=500),
        make_event("Pulled", "done", "job-0", seconds_ago=7000),
    )
    objects = state_of(running(0), running(1), progress=pods.progress(), events=events)
    listed = entries(objects)
    assert [entry.time for entry in listed] == sorted(entry.time for entry in listed)
    reasons = [entry.reason for entry in listed]
    assert reasons.index("Created") < reasons.index("Pulled") < reasons.index("NodeLost")
    assert {"Training", "LastStep", "PodCreated", "Running"} <= set(reasons)
    last = next(entry for entry in listed if entry.reason == "LastStep")
    assert last.message == "newest step: 7"


def test_initial_conditions_say_nothing_and_later_ones_do() -> None:
    objects = state_of()
    assert not any("NotSuspended" in entry.reason for entry in entries(objects))
    for condition in objects.job["status"]["conditions"]:
        if condition["type"] == "Suspended":
            condition |= {"lastTransitionTime": stamp(NOW + 60), "message": "written anew"}
    last = entries(objects)[-1]
    assert (last.reason, last.message) == ("NotSuspended", "now: written anew")


def test_conditions_that_summarize_the_others_are_no_entries() -> None:
    about = [entry.about for entry in entries(state_of(running(0), running(1)))]
    assert "Training=False" in about
    assert not any(name.startswith(("Ready=", "Reconciling=", "Stalled=")) for name in about)


def test_restarts_of_a_container_are_entries() -> None:
    pod = running(0, names.RENDEZVOUS)
    times = {"startedAt": stamp(LONG_AGO - 60), "finishedAt": stamp(LONG_AGO - 9)}
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", **times}}
    pod["status"]["containerStatuses"][0]["lastState"] = ended
    listed = entries(replace(JobObjects(make_training()), pods=(pod,)))
    found = [(entry.reason, entry.message) for entry in listed if entry.about == "job-rendezvous"]
    assert ("OOMKilled", "container rendezvous, exit code 137") in found
    assert [reason for reason, _ in found].count("Running") == 2


def test_the_table_has_absolute_and_relative_times() -> None:
    listed = [
        Entry(NOW - 7800, "job", "Created", ""),
        Entry(NOW - 5, "job-0", "Pulled", "a\nmessage\tof lines"),
    ]
    assert table(listed, NOW).splitlines() == [
        "TIME                  AGE    ABOUT  REASON   MESSAGE",
        "2027-01-15T05:50:00Z  2h10m  job    Created",
        "2027-01-15T07:59:55Z  5s     job-0  Pulled   a message of lines",
    ]


def test_a_repeated_event_says_how_often() -> None:
    event = make_event("BackOff", "waits", "job-0") | {"count": 7}
    assert "waits (7 times)" in table(entries(JobObjects(make_training(), (), (event,))), NOW)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"lastTimestamp": stamp(9), "eventTime": None}, 9),
        ({"eventTime": "1970-01-01T00:00:09.000000Z", "lastTimestamp": None}, 9),
        ({"series": {"lastObservedTime": stamp(12)}, "eventTime": stamp(9)}, 12),
        ({"metadata": {"creationTimestamp": stamp(7)}}, 7),
        ({}, 0),
        ({"lastTimestamp": "never"}, 0),
    ],
)
def test_an_event_has_the_time_of_its_last_occurrence(times: Manifest, expected: float) -> None:
    assert event_time(times) == expected


def about(kind: str, name: str, uid: str = "") -> Manifest:
    return {"involvedObject": {"kind": kind, "name": name, "uid": uid}, "lastTimestamp": stamp(NOW)}


@pytest.mark.parametrize(
    ("event", "belongs"),
    [
        (about("FluxTraining", "job", "uid"), True),
        (about("FluxTraining", "job", "uid-of-an-earlier-one"), False),
        (about("FluxTraining", "job-2", "other"), False),
        (about("Pod", "job-0", "gone"), True),
        (about("Pod", "job-12"), True),
        (about("Pod", "job-rendezvous"), True),
        (about("Pod", "job-2-0"), False),
        (about("Pod", "job"), False),
        (about("Pod", "my-job-0"), False),
        (about("Node", "job-0"), False),
        ({"lastTimestamp": stamp(NOW)}, False),
        (about("Pod", "job-0") | {"lastTimestamp": stamp(LONG_AGO - 60)}, False),
    ],
)
def test_only_events_of_the_job_and_its_pods_belong_to_it(event: Manifest, belongs: bool) -> None:
    assert bool(events_of(make_training(), [event])) == belongs


def test_events_of_pods_with_a_shortened_name_belong_to_the_job() -> None:
    job = make_training()
    job["metadata"]["name"] = "a" * 63
    events = [about("Pod", names.pod("a" * 63, number)) for number in (0, 9, 10, 4095)]
    assert len(events_of(job, events)) == 4


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


LOG = """\
1970-01-01T00:01:39.900000000Z   File "old.py", line 1 in before
1970-01-01T00:01:40.100000000Z Thread 0x00007f0000000001 (most recent call first):
1970-01-01T00:01:40.100000001Z   File "loader.py", line 5 in read
1970-01-01T00:01:40.100000002Z 
1970-01-01T00:01:40.100000003Z Current thread 0x00007f0000000000 (most recent call first):
1970-01-01T00:01:40.100000004Z   File "distributed.py", line 88 in all_reduce
1970-01-01T00:01:40.150000000Z step 7, loss 0.5
1970-01-01T00:01:40.200000005Z   File "train.py", line 3 in <module>
1970-01-01T00:01:40.500000000Z Current thread 0x00007f0000000000 (most recent call first):
1970-01-01T00:01:40.500000001Z   File "distributed.py", line 88 in all_reduce
1970-01-01T00:01:40.500000002Z   File "train.py", line 3 in <module>
"""  # fmt: skip
AT_100, AT_100_3, AT_100_6 = 100.0, 100.3, 100.6


def process(rank: int, asked_at: float, state: str = "S", asked: bool = True) -> RankProcess:
    return RankProcess(rank, 50 + rank, state, asked_at, asked)


def stacks(rank: int, *frames: str, note: str = "") -> RankStacks:
    head = ["Current thread 0x1 (most recent call first):"] if frames else []
    return RankStacks(rank, f"job-{rank}", (*head, *(f"  {frame}" for frame in frames)), note)


def test_lines_belong_to_the_rank_that_was_asked_last() -> None:
    first, second = stacks_of("job-0", [process(0, AT_100), process(1, AT_100_3)], LOG)
    assert first.position == (
        'File "distributed.py", line 88 in all_reduce',
        'File "train.py", line 3 in <module>',
    )
    assert first.position == second.position
    assert not any("old.py" in line or "loss" in line for line in first.lines)
    assert 'File "loader.py", line 5 in read' in "\n".join(first.lines)


def test_a_rank_without_stacks_says_why() -> None:
    silent, importing, stopped = stacks_of(
        "job-0",
        [process(0, AT_100_6), process(1, 101.0, asked=False), process(2, 102.0, state="T")],
        LOG,
    )
    assert "printed no stacks" in silent.note
    assert "imports modules" in importing.note
    assert "is stopped by a signal" in stopped.note
    assert {rank.position for rank in (silent, importing, stopped)} == {()}


def test_the_rarest_position_comes_first() -> None:
    many = [stacks(rank, 'File "a.py", line 1 in all_reduce') for rank in range(16) if rank != 7]
    text = report([*many, stacks(7, 'File "b.py", line 2 in read'), stacks(16, note="has ended")])
    assert text.splitlines()[:3] == [
        'rank 7: File "b.py", line 2 in read',
        "rank 16: unknown: no stacks",
        'ranks 0-6, 8-15: File "a.py", line 1 in all_reduce',
    ]
    assert "== rank 16, pod job-16: has ended" in text
    assert text.index("== rank 6,") < text.index("== rank 7,")


def test_stacks_of_real_processes_are_those_of_each_rank(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    lines: list[str] = []

    def collect() -> None:
        with os.fdopen(reading) as file:
            for line in file:
                lines.append(f"{datetime.now(UTC).isoformat()} {line}")

    log = threading.Thread(target=collect)
    log.start()
    with (
        os.fdopen(writing, "wb") as stderr,
        rank_process(1, name="read", stderr=stderr) as second,
        rank_process(0, name="all_reduce", stderr=stderr) as first,
    ):
        asked = list(ask_ranks(proc_with(tmp_path, second, first)))
        time.sleep(0.2)
    log.join()
    ranks = stacks_of("job-0", asked, "".join(lines))
    assert [
        "waits_in_all_reduce" in ranks[0].position[0],
        "waits_in_read" in ranks[1].position[0],
    ] == [True, True]
    assert stamp(asked[0].time)[:19] <= lines[0][:19]
