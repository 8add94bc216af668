"""The status: conditions, times, goodput, and invalid specs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tests.operator.planner import pods
from tests.operator.planner.pods import NOW, make_job

from fluxtrain.contract.resource.status import (
    CheckpointStatus,
    Condition,
    ProgressStatus,
    Status,
    TimeSpent,
)
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.generate.crd import resource_schema
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.situation import RUN, Decision, Situation
from fluxtrain_operator.planner.status import (
    ConditionUpdate,
    conditions,
    finished,
    finished_at,
    invalid_spec_status,
    next_status,
)

KINDS = ["Admitted", "Ready", "Progressing", "Healthy", "Suspended", "Complete", "Failed"]


def make_situation(status: Status | None = None, observed: Observed | None = None) -> Situation:
    job = replace(make_job(status), generation=3)
    return Situation(job, observed or Observed(), NOW, attempt=1)


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
    assert status.conditions[0].reason == "InvalidSpec"
    assert "spec.run.optim.beta1: got 2; must be below 1" in status.conditions[0].message


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
