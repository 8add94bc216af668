"""What is observed and what the status says of it: conditions, times, goodput, heads of the log's chain.

Missing, malformed or hostile values have defaults or are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from tests.operator.planner import pods
from tests.operator.planner.pods import NOW, make_job
from tests.operator.planner.pods import make_pod as pod_of_job
from tests.operator.verdicts import CASES, CURRENT, FAILED, IN_PROGRESS

from fluxtrain.contract.resource.status import (
    MAX_LOG_HEADS,
    CheckpointStatus,
    Condition,
    LogHead,
    ProgressStatus,
    Status,
    TimeSpent,
    read_status,
)
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.chain_verify import read_heads
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.base.reports import Progress, Straggler
from fluxtrain_operator.generate.crd import resource_schema
from fluxtrain_operator.planner.guard import failure_of
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.situation import RUN, Decision, Report, Situation, newest_report
from fluxtrain_operator.planner.status import (
    ConditionUpdate,
    conditions,
    finished,
    finished_at,
    invalid_spec_status,
    next_heads,
    next_status,
)
from fluxtrain_operator.resources.scheduling import Queueing

KINDS = [
    "Ready", "Reconciling", "Stalled", "Admitted", "Training", "Progressing", "Healthy", "Suspended",
    "Complete", "Failed",
]  # fmt: skip
SUMMARIES = {
    CURRENT: {("True", "False", "False")},
    IN_PROGRESS: {
        ("False", "True", "False"),
        ("True", "True", "False"),
        ("False", "False", "False"),
    },
    FAILED: {("False", "False", "True")},
}
"""The values of Ready, Reconciling and Stalled; never are the last two true at once."""


def make_situation(status: Status | None = None, observed: Observed | None = None) -> Situation:
    job = replace(make_job(status), generation=3)
    return Situation(job, observed or Observed(), NOW, attempt=1)


@pytest.mark.parametrize("name", CASES)
def test_ready_reconciling_and_stalled_summarize_a_status(name: str) -> None:
    case = CASES[name]
    values = {condition.type: condition.status for condition in case.status.conditions}
    if case.generation == case.status.observed_generation:
        assert tuple(values[kind] for kind in KINDS[:3]) in SUMMARIES[case.verdict]
    else:
        assert case.verdict == IN_PROGRESS, "programs that wait compare the generations first"
    assert values.get("Training", "False") == str(case.status.phase == "Running")


def test_the_first_status_has_all_conditions() -> None:
    status = next_status(make_situation(), RUN, num_requested=2)
    assert [condition.type for condition in status.conditions] == KINDS
    assert {condition.observed_generation for condition in status.conditions} == {3}
    assert status.observed_generation == 3
    assert status.selector == "fluxtrain.dev/job=job,app.kubernetes.io/component=trainer"


def test_a_transition_time_changes_only_with_the_status() -> None:
    first = conditions([], [ConditionUpdate("Ready", False, "PodsPending", "0 of 2")], 1, NOW)
    second = conditions(
        first, [ConditionUpdate("Ready", False, "Starting", "no step yet")], 2, NOW + 60
    )
    third = conditions(second, [ConditionUpdate("Ready", True, "Training")], 2, NOW + 90)
    assert [c.last_transition_time for c in (first[0], second[0], third[0])] == [
        stamp(NOW),
        stamp(NOW),
        stamp(NOW + 90),
    ]
    assert (second[0].reason, second[0].observed_generation) == ("Starting", 2)


def test_an_update_keeps_other_conditions() -> None:
    before = conditions(
        [],
        [ConditionUpdate("Ready", True, "Training"), ConditionUpdate("Healthy", None, "Unclear")],
        1,
        NOW,
    )
    after = conditions(before, [ConditionUpdate("Ready", True, "Training")], 1, NOW + 1)
    assert after == before
    assert after[1].status == "Unknown"


@pytest.mark.parametrize(
    ("action", "kind"), [("complete", "Complete"), ("fail", "Failed"), ("run", None)]
)
def test_a_job_is_finished_if_a_final_condition_is_true(action: Any, kind: str | None) -> None:
    status = next_status(make_situation(), Decision(action, "Because", "of that"), 0)
    assert finished(status) == (kind is not None)
    assert finished_at(status) == (None if kind is None else NOW)
    if kind:
        assert status.phase == kind


def test_the_status_is_valid_for_the_schema() -> None:
    situation = make_situation(observed=Observed((make_pod(0), make_pod(1))))
    status = next_status(situation, Decision("fail", "Diverged", "x" * 9000, exit_code=3), 0)
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    jsonschema.Draft4Validator(resource_schema()["properties"]["status"]).validate(written)
    assert Status.model_validate(written) == status


def make_pod(index: int = 0, **changes: Any) -> Pod:
    return pods.make_pod(index, **{"started": NOW - 9, **changes})


def test_the_start_time_is_set_once_a_pod_has_passed_all_gates() -> None:
    waiting = make_pod(phase="Pending", started=None, gated=True)
    assert next_status(make_situation(), RUN, 2).start_time is None
    assert next_status(make_situation(observed=Observed((waiting,))), RUN, 2).start_time is None
    started = next_status(make_situation(observed=Observed((make_pod(),))), RUN, 2)
    assert started.start_time == stamp(NOW)
    before = started.model_copy(update={"start_time": stamp(NOW - 50)})
    assert next_status(make_situation(before), RUN, 2).start_time == stamp(NOW - 50)


@pytest.mark.parametrize("action", ["complete", "fail"])
def test_the_end_is_set_with_the_condition(action: Any) -> None:
    assert next_status(make_situation(), RUN, 2).completion_time is None
    assert next_status(make_situation(), Decision(action, "Because"), 0).completion_time == stamp(
        NOW
    )


def trained(seconds: float, ago: float = 0.0, **others: Any) -> ProgressStatus:
    """Return the progress of a job that spent ``seconds`` on steps, the last of them ``ago``."""
    return ProgressStatus(step=90, trainSeconds=seconds, lastStepTime=stamp(NOW - ago), **others)


def suspension(status: Any, seconds: float) -> Condition:
    """Return the condition as it was ``seconds`` ago."""
    since = stamp(NOW - seconds)
    return Condition(type="Suspended", status=status, reason="Why", lastTransitionTime=since)


def test_a_suspension_is_excluded_from_goodput() -> None:
    before = Status(
        phase="Running",
        attempt=1,
        startTime=stamp(NOW - 1000),
        progress=trained(567, ago=310),
        conditions=[suspension("True", 300)],
        suspendedSeconds=70,
        timeSpent=TimeSpent(until=stamp(NOW - 300), step=567, other=63),
    )
    still = next_status(make_situation(before), Decision("suspend", "Suspended"), 0)
    assert (still.suspended_seconds, still.goodput) == (70, 0.9)
    resumed = next_status(make_situation(before), Decision("restart", "Resumed"), 2)
    assert (resumed.suspended_seconds, resumed.goodput) == (370, 0.9)
    again = next_status(make_situation(resumed), RUN, 2)
    assert (again.suspended_seconds, again.goodput) == (370, 0.9), "no step since: nothing new"


def test_earlier_training_time_of_the_output_is_recorded_once() -> None:
    report = Progress(trained(5010), train_seconds_before=5000.0)
    first = next_status(make_situation(observed=Observed(progress=report)), RUN, 2)
    assert first.train_seconds_before == 5000
    resumed = Progress(trained(5300), train_seconds_before=5290.0)
    second = next_status(make_situation(first, Observed(progress=resumed)), RUN, 2)
    assert second.train_seconds_before == 5000


def ended(final: Progress | None, **changes: Any) -> Pod:
    end = {"phase": "Succeeded", "exit_code": 0, "finished": NOW - 1, **changes}
    return make_pod(final_progress=final, **end)


def test_a_finished_job_has_the_progress_of_the_termination_message() -> None:
    polled = ProgressStatus(step=290, trainLoss=0.9, lastStepTime=stamp(NOW - 9))
    final = ProgressStatus(step=300, trainLoss=0.5, evalLoss=0.6, lastStepTime=stamp(NOW - 2))
    report = Progress(final, CheckpointStatus(step=300), process_restarts=4)
    observed = Observed((ended(report), ended(None)))
    before = Status(phase="Running", attempt=1, progress=polled, checkpoint={"step": 280})
    status = next_status(make_situation(before, observed), Decision("complete", "Succeeded"), 0)
    assert status.progress == final
    assert status.checkpoint == CheckpointStatus(step=300)
    assert status.restarts is not None
    assert status.restarts.process == 4


@pytest.mark.parametrize("asked", [None, NOW - 9], ids=["before a step", "at a step"])
def test_a_termination_message_is_newer_than_an_earlier_answer(asked: float | None) -> None:
    last = ProgressStatus(step=300, lastStepTime=stamp(NOW - 2))
    answer = ProgressStatus(step=290, lastStepTime=None if asked is None else stamp(asked))
    observed = Observed((ended(Progress(last)),), progress=Progress(answer))
    over = next_status(make_situation(None, observed), Decision("complete", "Succeeded"), 0)
    assert over.progress == last


def test_an_older_termination_message_is_ignored() -> None:
    early = Progress(ProgressStatus(step=100, lastStepTime=stamp(NOW - 60)))
    late = ProgressStatus(step=120, lastStepTime=stamp(NOW - 30))
    observed = Observed((ended(early, phase="Failed", exit_code=137),))
    before = Status(phase="Running", attempt=1, progress=late)
    assert next_status(make_situation(before, observed), RUN, 2).progress == late
    again = Progress(ProgressStatus(step=101, lastStepTime=stamp(NOW - 31)))
    answered = replace(observed, progress=again)
    assert next_status(make_situation(before, answered), RUN, 2).progress == again.status


ERROR = ConfigError("spec.run.optim.beta1", 2, "must be below 1")


def test_a_job_with_an_invalid_spec_fails_with_path_and_rule() -> None:
    status = invalid_spec_status(Status(), 1, ERROR, NOW)
    assert (status.phase, finished(status)) == ("Failed", True)
    assert invalid_spec_status(status, 1, ERROR, NOW + 60) == status
    assert status.completion_time == stamp(NOW)
    for condition in (c for c in status.conditions if c.type in ("Ready", "Stalled", "Failed")):
        assert condition.reason == "InvalidSpec"
        assert "spec.run.optim.beta1: got 2; must be below 1" in condition.message


def test_a_running_job_survives_an_invalid_edit() -> None:
    before = next_status(make_situation(), RUN, 2)
    status = invalid_spec_status(before, 4, ERROR, NOW)
    assert (status.phase, finished(status)) == (before.phase, False)
    healthy = next(c for c in status.conditions if c.type == "Healthy")
    assert (healthy.status, healthy.reason, healthy.observed_generation) == (
        "False",
        "InvalidSpec",
        4,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-01T00:00:00Z", 1_767_225_600.0),
        ("2026-01-01T00:00:00.5Z", 1_767_225_600.5),
        ("2026-01-01T01:00:00+01:00", 1_767_225_600.0),
        ("soon", None),
        (None, None),
        (17, None),
    ],
)
def test_timestamps_are_read(text: object, expected: float | None) -> None:
    assert seconds(text) == expected


def test_timestamps_are_written_as_kubernetes_does() -> None:
    assert stamp(1_767_225_600.9) == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("remaining", "eta"),
    [(None, None), (0.0, "0s"), (7_800.0, "2h10m"), (1e18, None)],
)
def test_the_eta_is_that_of_a_job_that_trains(remaining: float | None, eta: str | None) -> None:
    job, answer = pods.running(), pods.progress()
    changed = answer.status.model_copy(update={"remaining_seconds": remaining})
    answer = replace(answer, status=changed)
    training = pods.plan_with(job, *pods.make_pods(2, job), progress=answer, now=NOW + 10).status
    assert (training.phase, training.eta) == ("Running", eta)
    assert pods.plan_with(pods.with_status(job, training)).status.eta is None


def test_conditions_have_no_credentials() -> None:
    message = "cannot read https://me:secret@example.com/a?sig=secret"
    (condition,) = conditions([], [ConditionUpdate("Failed", True, "Error", message)], 1, 0.0)
    assert condition.message == "cannot read https://***@example.com/a?***"


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


def test_a_report_without_the_seconds_since_its_step_is_believed() -> None:
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


def test_of_the_same_processes_a_later_step_is_newer_than_an_answer_that_came_late() -> None:
    def report(step: int, since: float, began: float = 5.0) -> Progress:
        times = {"lastStepTime": stamp(6.0), "firstStepTime": stamp(began)}
        return Progress(ProgressStatus(step=step, **times), seconds_since_step=since)

    pods = (pod_of_job(0, final_progress=report(300, 0.0), finished=NOW - 9),)
    found = newest_report(Observed(pods, progress=report(298, 1.0)), NOW)
    assert found is not None
    assert found.progress.status.step == 300
    assert found.follows(report(298, 1.0).status)
    found = newest_report(Observed(pods, progress=report(7, 1.0, began=9.0)), NOW)
    assert found is not None
    assert found.progress.status.step == 7, "they were started anew"


def test_the_report_with_the_latest_step_is_the_newest() -> None:
    def report(step: int, since: float | None) -> Progress:
        last = None if since is None else stamp(1.0)
        return Progress(ProgressStatus(step=step, lastStepTime=last), seconds_since_step=since)

    assert newest_report(Observed(), NOW) is None
    pods = (pod_of_job(0), pod_of_job(1, final_progress=report(5, 3.0), finished=NOW - 20))
    for since, newest in ((22.0, 7), (24.0, 5), (None, 5)):
        found = newest_report(Observed(pods, progress=report(7, since)), NOW)
        assert found is not None
        assert found.progress.status.step == newest


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


def manifest(component: str = names.TRAINER, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "job-3",
            "uid": "u",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                names.LABEL_COMPONENT: component,
                names.LABEL_INDEX: "3",
                names.LABEL_ATTEMPT: "2",
            },
            "annotations": {names.ANNOTATION_NODES: "2:8", names.ANNOTATION_REPLACEMENT: "5"},
        },
        "spec": {"nodeName": "node-1"},
        "status": status,
    }


def container(**state: Any) -> list[dict[str, Any]]:
    sidecar = {"name": "sidecar", "state": {"running": {}}}
    return [sidecar, {"name": names.TRAINER, "state": state}]


def test_a_running_pod_is_parsed() -> None:
    running = {"running": {"startedAt": "2026-01-01T00:00:10Z"}}
    ready = [{"type": "Ready", "status": "True"}]
    pod = Pod.from_object(
        manifest(phase="Running", conditions=ready, containerStatuses=container(**running))
    )
    assert (pod.index, pod.attempt, pod.replacement, pod.nodes) == (3, 2, 5, (2, 8))
    assert (pod.node, pod.ready, pod.running, pod.ended) == ("node-1", True, True, False)
    assert pod.started == pod.created + 10


def test_a_pod_has_ended_even_if_its_sidecar_runs() -> None:
    terminated = {
        "exitCode": 3,
        "reason": "Error",
        "message": "a\nb\n",
        "finishedAt": "2026-01-01T01:00:00Z",
    }
    pod = Pod.from_object(
        manifest(phase="Running", containerStatuses=container(terminated=terminated))
    )
    assert (pod.ended, pod.running, pod.exit_code) == (True, False, 3)
    failure = failure_of(pod)
    assert failure is not None
    assert (failure.reason, failure.error_line, failure.infrastructure) == ("Diverged", "b", False)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            ]},
            "Unschedulable: no room",
        ),
        (
            {"containerStatuses": container(waiting={"reason": "ImagePullBackOff", "message": "no such"})},
            "ImagePullBackOff: no such",
        ),
        ({"containerStatuses": container(waiting={"reason": "ContainerCreating"})}, "ContainerCreating"),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_waiting_pod_has_a_reason(status: dict[str, Any], expected: str) -> None:
    assert Pod.from_object(manifest(**status)).waiting == expected


def test_a_scheduling_gate_is_parsed() -> None:
    gate = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    assert Pod.from_object(manifest(conditions=gate)).gated


def test_kueues_gate_and_finalizer_are_parsed() -> None:
    managed = manifest()
    managed["metadata"]["finalizers"] = [names.KUEUE_FINALIZER]
    managed["spec"]["schedulingGates"] = [{"name": names.KUEUE_GATE}]
    pod = Pod.from_object(managed)
    queueing = Queueing()
    assert (pod.gates, pod.finalizers) == ((names.KUEUE_GATE,), (names.KUEUE_FINALIZER,))
    assert (queueing.is_member(pod), queueing.is_never_admitted(pod)) == (True, False)
    managed["metadata"]["deletionGracePeriodSeconds"] = 0
    assert (pod.forced, Pod.from_object(managed).forced) == (False, True)
    del managed["metadata"]["finalizers"]
    assert queueing.is_never_admitted(Pod.from_object(managed))


@pytest.mark.parametrize(
    "malformed",
    [
        {},
        {"metadata": None, "spec": None, "status": None},
        {"metadata": {"labels": {names.LABEL_INDEX: "x", names.LABEL_ATTEMPT: None}}},
        {"metadata": {"annotations": {names.ANNOTATION_NODES: "many"}}},
        {"status": {"conditions": [None, 1], "containerStatuses": {"a": 1}}},
        {"metadata": {"creationTimestamp": "yesterday", "deletionTimestamp": 3}},
    ],
)
def test_malformed_fields_of_a_pod_have_defaults(malformed: dict[str, Any]) -> None:
    pod = Pod.from_object(malformed)
    assert (pod.index, pod.phase, pod.nodes, pod.ended) == (0, "Pending", (1, 1), False)


@pytest.mark.parametrize("number", ["99999999999", "9" * 5000])
def test_a_huge_number_in_an_annotation_is_bounded(number: str) -> None:
    pod = Pod.from_object({"metadata": {"annotations": {names.ANNOTATION_REPLACEMENT: number}}})
    assert pod.replacement == 10**9


def test_pods_are_grouped_by_component() -> None:
    rendezvous = manifest(names.RENDEZVOUS)
    observed = Observed.from_objects(
        [rendezvous, manifest(), {"metadata": {}}], predecessors={"a": "Complete"}
    )
    assert [pod.index for pod in observed.pods] == [3]
    assert observed.rendezvous is not None
    assert observed.predecessors == {"a": "Complete"}


@pytest.mark.parametrize(
    ("node", "ready", "unhealthy"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, True, ""),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, False, ""),
        ({"status": {}}, False, ""),
        (
            {"metadata": {"labels": {"metricsexporter.amd.com.gpu.3.state": "unhealthy"}}},
            False,
            "label metricsexporter.amd.com.gpu.3.state=unhealthy",
        ),
        ({"metadata": {"labels": {"metricsexporter.amd.com.gpu.3.state": "healthy"}}}, False, ""),
        (
            {"spec": {"taints": [{"key": "amd-gpu-unhealthy", "effect": "NoSchedule"}]}},
            False,
            "taint amd-gpu-unhealthy",
        ),
    ],
)
def test_a_node_is_parsed(node: dict[str, Any], ready: bool, unhealthy: str) -> None:
    view = NodeView.from_object(node)
    assert (view.ready, view.unhealthy) == (ready, unhealthy)


@pytest.mark.parametrize(
    ("node", "changes"),
    [
        ({}, {}),
        ({"spec": {"unschedulable": True}}, {"cordoned": True}),
        ({"spec": {"unschedulable": "yes"}}, {}),
        ({"metadata": {"creationTimestamp": "1970-01-01T00:01:00Z"}}, {"created": 60.0}),
        ({"metadata": {"name": "n1", "labels": {names.HOSTNAME: "n1"}}}, {"name": "n1"}),
        (
            {"metadata": {"name": "n1", "labels": {names.HOSTNAME: "host-1"}}},
            {"name": "n1", "hostname": "host-1"},
        ),
        (
            {"status": {"conditions": [{"type": "KernelDeadlock", "status": "True"}]}},
            {"problem": "condition KernelDeadlock=True"},
        ),
    ],
)
def test_what_else_is_read_of_a_node(node: dict[str, Any], changes: dict[str, Any]) -> None:
    assert NodeView.from_object(node) == NodeView(**{"name": "", "ready": False, **changes})


def test_progress_is_parsed() -> None:
    progress = Progress.from_json(
        {
            "phase": "step", "step": 7, "steps": 30, "epoch": 2, "epochs": 5, "samples": 56,
            "trainLoss": 0.123456789, "mfu": None,
            "samplesPerSecond": 8.5, "targetSamples": 7_077_888,
            "lastStepTime": 1_767_225_610.9, "checkpointStep": 5,
            "checkpointTime": 1_767_225_600.0, "processRestarts": 2, "port": 9464,
        }
    )  # fmt: skip
    assert progress is not None
    assert (progress.status.step, progress.status.samples) == (7, 56)
    found = (progress.status.steps, progress.status.epoch, progress.status.epochs)
    assert found == (30, 2, 5)
    assert (progress.status.train_loss, progress.status.mfu) == (0.123457, None)
    assert progress.status.target_samples == 7_077_888
    assert progress.status.last_step_time == "2026-01-01T00:00:10Z"
    assert progress.checkpoint is not None
    assert (progress.checkpoint.step, progress.process_restarts) == (5, 2)


def test_the_ranks_of_a_node_are_parsed() -> None:
    first = {
        "rank": 0,
        "phase": "step",
        "step": 7,
        "secondsInPhase": 9.5,
        "secondsSinceProgress": 2,
    }
    second = {**first, "rank": 1, "stepSeconds": 0.5, "stack": "wait (queue:7)\nmore"}
    invalid = [None, 7, {}, {**first, "phase": "walking"}, {**first, "secondsSinceProgress": "7"}]
    progress = Progress.from_json({**first, "ranks": [first, second, *invalid]})
    assert progress is not None
    ranks = [(r.rank, r.step, r.seconds_since_progress, r.stack) for r in progress.ranks]
    assert ranks == [(0, 7, 2.0, ""), (1, 7, 2.0, "wait (queue:7)")]
    assert progress.seconds_since_progress == 2.0
    alone = Progress.from_json(first)
    assert alone is not None
    assert alone.ranks == progress.ranks[:1], "a process whose node has no list reports itself"
    many = Progress.from_json({"ranks": [first] * 100_000})
    assert many is not None
    assert len(many.ranks) == 64
    silent = Progress.from_json({"phase": "step"})
    assert silent is not None
    assert (silent.phase, silent.ranks, silent.seconds_since_progress) == ("step", (), None)


def test_the_ranks_that_agents_report_are_parsed() -> None:
    first = {"rank": 3, "pod": "uid-1", "phase": "step", "step": 7, "secondsSinceProgress": 2}
    frozen = {**first, "rank": 2, "frozen": True, "generation": 4, "stack": "its state"}
    invalid = [None, 7, {}, {**first, "pod": 7}, {**first, "pod": ""}, {**first, "pod": "x" * 65}]
    invalid += [{**first, "phase": "walking"}, {**first, "secondsSinceProgress": "7"}]
    progress = Progress.from_agents({"ranks": [first, frozen, *invalid], "step": 9, "trainLoss": 1})
    assert progress is not None
    assert (progress.by_agents, progress.rank, progress.phase) == (True, 2, "step")
    assert progress.status == ProgressStatus(), "nothing of the run"
    assert [(r.rank, r.pod, r.frozen, r.generation) for r in progress.ranks] == [
        (3, "uid-1", False, 0),
        (2, "uid-1", True, 4),
    ]
    assert progress.of_pods({"uid-1"}) == progress
    assert progress.of_pods({"uid-2"}) is None
    many = Progress.from_agents({"ranks": [first] * 100_000})
    assert many is not None
    assert len(many.ranks) == 64
    for answer in (None, 7, [], {}, {"ranks": None}, {"ranks": {}}, {"ranks": invalid}):
        assert Progress.from_agents(answer) is None, answer
    for value in (1, "true", None, [True]):
        unclear = Progress.from_agents({"ranks": [{**first, "frozen": value}]})
        assert unclear is not None
        assert not unclear.ranks[0].frozen


@pytest.mark.parametrize(
    ("value", "generation"),
    [(3, 3), (0, 0), (-1, 0), (True, 0), ("3", 0), (None, 0), (1.5, 0), (10**400, 2**31 - 1)],
)
def test_the_generation_of_a_rank_is_bounded(value: object, generation: int) -> None:
    first = {"rank": 0, "phase": "step", "secondsSinceProgress": 2}
    for values in ({**first, "generation": value}, {"ranks": [{**first, "generation": value}]}):
        progress = Progress.from_json(values)
        assert progress is not None
        assert [rank.generation for rank in progress.ranks] == [generation]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 1e400, -1, 10**30, 10**400, True, "7", None, [], {}],
    ids=repr,
)
def test_invalid_values_of_a_trainer_leave_the_status_valid(value: object) -> None:
    keys = (
        "step", "samples", "trainLoss", "lastStepTime", "firstStepTime", "checkpointStep",
        "processRestarts", "trainSeconds", "trainSecondsBefore", "secondsSinceStep",
    )  # fmt: skip
    progress = Progress.from_json(dict.fromkeys(keys, value))
    assert progress is not None
    assert 0 <= progress.status.step < 2**31
    assert 0 <= progress.status.samples <= 2**53
    numbers = (
        progress.status.train_loss,
        progress.train_seconds_before,
        progress.seconds_since_step,
    )
    for number in numbers:
        assert number is None or math.isfinite(number)
    assert progress.status.last_step_time is None


@pytest.mark.parametrize(
    ("since", "finished"),
    [(2.0, "2026-01-01T00:00:12Z"), (None, None), (0.0, "2026-01-01T00:00:10Z")],
)
def test_a_termination_message_is_as_old_as_the_end_of_its_pod(
    since: float | None, finished: str | None
) -> None:
    message = '{"rank": 0, "lastStepTime": 1767225610.9, "secondsSinceStep": 0.3}'
    terminated = {"exitCode": 1, "message": message, "finishedAt": finished}
    pod = Pod.from_object(manifest(containerStatuses=container(terminated=terminated)))
    assert pod.final_progress is not None
    assert pod.final_progress.seconds_since_step == since


STRAGGLER = {"rank": 3, "host": "job-1", "pod": "uid-1", "cause": "data", "slowdown": 1.41421}


def test_a_straggler_is_parsed() -> None:
    progress = Progress.from_json({"straggler": STRAGGLER})
    assert progress is not None
    assert progress.straggler == Straggler(3, "uid-1", "data", 1.41)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"slowdown": s}
            for s in (math.nan, math.inf, -1.0, 0, 1.0, 1e9, 10**400, True, "2", None)
        ),
        *({"rank": rank} for rank in (-1, 2**31, 10**400, 1.5, True, "3", None)),
        *({"cause": cause} for cause in ("", "network", None, 1, [], {})),
    ],
    ids=repr,
)
def test_a_straggler_with_an_invalid_value_is_ignored(change: dict[str, object]) -> None:
    progress = Progress.from_json({"step": 7, "straggler": {**STRAGGLER, **change}})
    assert progress is not None
    assert (progress.status.step, progress.straggler) == (7, None)


@pytest.mark.parametrize("straggler", [None, 1, "rank 3", [], [STRAGGLER], {}])
def test_what_is_no_straggler_is_ignored(straggler: object) -> None:
    progress = Progress.from_json({"straggler": straggler})
    assert progress is not None
    assert progress.straggler is None


@pytest.mark.parametrize("pod", [None, 7, [], "x" * 10**6])
def test_the_pod_of_a_straggler_is_bounded(pod: object) -> None:
    straggler = Straggler.from_json({**STRAGGLER, "pod": pod})
    assert straggler is not None
    assert len(straggler.pod) <= 64


@pytest.mark.parametrize("answer", [None, 1, "x", []])
def test_an_answer_that_is_no_mapping_has_no_progress(answer: object) -> None:
    assert Progress.from_json(answer) is None


@pytest.mark.parametrize(
    ("message", "text", "step"),
    [
        ('{"message": "a\\nb", "rank": 0, "step": 7}', "a\nb", 7),
        ('{"rank": 0, "step": 7}', "", 7),
        ("\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07text\r\n\x00end", "red  text\n end", None),
        ('{"message": "a\\u001b[2Jb\\u202ec"}', "ab c", None),
        ('{"message": "killed", "rank": 4, "step": 7}', "killed", None),  # only rank 0's counts
        ('{"message": "no step yet"}', "no step yet", None),
        ("the end of a log\nof some lines", "the end of a log\nof some lines", None),
        ('{"message": "cut off by kube', '{"message": "cut off by kube', None),
        ("[" * 5000, "[" * 5000, None),
        ("17", "17", None),
        ('{"message": {"odd": 1}}', "{'odd': 1}", None),
        (None, "", None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_termination_message_is_parsed(message: object, text: str, step: int | None) -> None:
    terminated = {"exitCode": 1, "message": message}
    pod = Pod.from_object(manifest(containerStatuses=container(terminated=terminated)))
    assert pod.message == text
    assert (pod.final_progress.status.step if pod.final_progress else None) == step
