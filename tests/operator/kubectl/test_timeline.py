"""``timeline``: everything that has a time, in order, each line on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.kubectl.objects import make_event, make_training, running, state_of
from tests.operator.planner import pods
from tests.operator.planner.pods import LONG_AGO, NOW

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.kubectl.client import JobObjects, event_time, events_of
from fluxtrain_operator.kubectl.timeline import Entry, entries, table


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
            condition["lastTransitionTime"] = stamp(NOW + 60)
    assert [entry.reason for entry in entries(objects)][-1] == "NotSuspended"


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
