"""The status: conditions as Kubernetes means them, and what becomes of a spec that no trainer accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from fluxtrain.contract.resource.status import CheckpointStatus, Condition, ProgressStatus, Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.generate.crd import resource_schema
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.planner.rules import RUN, Decision
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.planner.status import (
    Fact,
    conditions,
    describe,
    finished,
    finished_at,
    refused,
)
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.timestamps import seconds, stamp

NOW = 1_800_000_000.0
KINDS = ["Admitted", "Ready", "Progressing", "Healthy", "Suspended", "Complete", "Failed"]


def make_situation(status: Status | None = None, observed: Observed | None = None) -> Situation:
    manifest: dict[str, Any] = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "job", "uid": "uid", "generation": 3},
        "spec": {"run": {"preset": "micro"}, "nodes": {"min": 1, "max": 2}},
    }
    job = load(manifest, "trainer:1")
    job = replace(job, training=job.training.model_copy(update={"status": status}))
    return Situation(job, observed or Observed(), NOW, attempt=1)


def test_all_conditions_are_set_at_the_first_visit() -> None:
    status = describe(make_situation(), RUN, asked_for=2)
    assert [condition.type for condition in status.conditions] == KINDS
    assert {condition.observed_generation for condition in status.conditions} == {3}
    assert status.observed_generation == 3
    assert status.selector == "fluxtrain.dev/job=job,app.kubernetes.io/component=trainer"


def test_a_transition_time_moves_only_with_the_status() -> None:
    first = conditions([], [Fact("Ready", False, "PodsPending", "0 of 2")], 1, NOW)
    second = conditions(first, [Fact("Ready", False, "Starting", "no step yet")], 2, NOW + 60)
    third = conditions(second, [Fact("Ready", True, "Training")], 2, NOW + 90)
    assert [c.last_transition_time for c in (first[0], second[0], third[0])] == [
        stamp(NOW),
        stamp(NOW),
        stamp(NOW + 90),
    ]
    assert (second[0].reason, second[0].observed_generation) == ("Starting", 2)


def test_facts_leave_other_conditions_alone() -> None:
    before = conditions(
        [], [Fact("Ready", True, "Training"), Fact("Healthy", None, "Unclear")], 1, NOW
    )
    after = conditions(before, [Fact("Ready", True, "Training")], 1, NOW + 1)
    assert after == before
    assert after[1].status == "Unknown"


@pytest.mark.parametrize(
    ("action", "kind"), [("complete", "Complete"), ("fail", "Failed"), ("run", None)]
)
def test_a_job_is_over_when_a_final_condition_says_so(action: Any, kind: str | None) -> None:
    status = describe(make_situation(), Decision(action, "Because", "of that"), 0)
    assert finished(status) == (kind is not None)
    assert finished_at(status) == (None if kind is None else NOW)
    if kind:
        assert status.phase == kind


def test_the_status_passes_the_resources_own_schema() -> None:
    pods = tuple(
        Pod(f"job-{i}", f"u{i}", index=i, phase="Running", ready=True, started=NOW - 9)
        for i in range(2)
    )
    situation = make_situation(observed=Observed(pods=pods))
    status = describe(situation, Decision("fail", "Diverged", "x" * 9000, exit_code=3), 0)
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    jsonschema.Draft4Validator(resource_schema()["properties"]["status"]).validate(written)
    assert Status.model_validate(written) == status


def make_pod(**facts: Any) -> Pod:
    return Pod("job-0", "u0", **{"phase": "Running", "ready": True, "started": NOW - 9, **facts})


def test_the_start_is_set_once_a_pod_is_past_all_gates() -> None:
    waiting = make_pod(phase="Pending", started=None, gated=True)
    assert describe(make_situation(), RUN, 2).start_time is None
    assert describe(make_situation(observed=Observed((waiting,))), RUN, 2).start_time is None
    started = describe(make_situation(observed=Observed((make_pod(),))), RUN, 2)
    assert started.start_time == stamp(NOW)
    before = started.model_copy(update={"start_time": stamp(NOW - 50)})
    assert describe(make_situation(before), RUN, 2).start_time == stamp(NOW - 50)


@pytest.mark.parametrize("action", ["complete", "fail"])
def test_the_end_is_set_with_the_condition(action: Any) -> None:
    assert describe(make_situation(), RUN, 2).completion_time is None
    assert describe(make_situation(), Decision(action, "Because"), 0).completion_time == stamp(NOW)


def trained(seconds: float, ago: float = 0.0, **others: Any) -> ProgressStatus:
    """Return the progress of a job that spent ``seconds`` on steps, the last of them ``ago``."""
    return ProgressStatus(step=90, trainSeconds=seconds, lastStepTime=stamp(NOW - ago), **others)


def suspension(status: Any, seconds: float) -> Condition:
    """Return the condition as it was ``seconds`` ago."""
    since = stamp(NOW - seconds)
    return Condition(type="Suspended", status=status, reason="Why", lastTransitionTime=since)


def running_since(seconds: float, progress: ProgressStatus, **others: Any) -> Status:
    facts = {"conditions": [suspension("False", seconds)], **others}
    return Status(
        phase="Running", attempt=1, startTime=stamp(NOW - seconds), progress=progress, **facts
    )


@pytest.mark.parametrize(
    ("before", "goodput"),
    [
        (running_since(1000, trained(900)), 0.9),
        (running_since(1000, trained(450, ago=500)), 0.9),  # nothing is known after the last step
        (running_since(1000, trained(540), suspendedSeconds=400), 0.9),
        (running_since(1000, trained(5900), trainSecondsBefore=5000), 0.9),  # an older job's output
        (running_since(1000, trained(1001)), 1.0),  # times are to the second
        (running_since(1000, ProgressStatus(lastStepTime=stamp(NOW))), None),
        (running_since(0, trained(1)), None),
    ],
)
def test_goodput_is_the_part_of_the_time_that_steps_took(
    before: Status, goodput: float | None
) -> None:
    assert describe(make_situation(before), RUN, 2).goodput == goodput


def test_time_after_the_last_step_counts_once_the_job_is_over() -> None:
    before = running_since(1000, trained(450, ago=500))
    assert describe(make_situation(before), Decision("complete", "Succeeded"), 0).goodput == 0.45


def test_a_pause_is_no_part_of_the_time() -> None:
    paused = {"conditions": [suspension("True", 300)], "suspendedSeconds": 70}
    before = running_since(1000, trained(567, ago=310), **paused)
    still = describe(make_situation(before), Decision("suspend", "Suspended"), 0)
    assert (still.suspended_seconds, still.goodput) == (70, 0.9)
    resumed = describe(make_situation(before), Decision("restart", "Resumed"), 2)
    assert (resumed.suspended_seconds, resumed.goodput) == (370, 0.9)
    again = describe(make_situation(resumed), RUN, 2)
    assert (again.suspended_seconds, again.goodput) == (370, 0.9), "no step since: nothing new"


def test_a_resumed_job_has_a_goodput_again_with_its_first_step() -> None:
    before = running_since(1000, trained(600, firstStepTime=stamp(NOW)), suspendedSeconds=250)
    assert describe(make_situation(before), RUN, 2).goodput == 0.8


def test_time_that_the_output_held_before_is_noted_once() -> None:
    said = Progress(trained(5010), train_seconds_before=5000.0)
    first = describe(make_situation(observed=Observed(progress=said)), RUN, 2)
    assert first.train_seconds_before == 5000
    resumed = Progress(trained(5300), train_seconds_before=5290.0)
    second = describe(make_situation(first, Observed(progress=resumed)), RUN, 2)
    assert second.train_seconds_before == 5000


def ended(words: Progress | None, **facts: Any) -> Pod:
    how = {"phase": "Succeeded", "exit_code": 0, "finished": NOW - 1, **facts}
    return make_pod(last_words=words, **how)


def test_a_job_that_is_over_has_its_last_words() -> None:
    polled = ProgressStatus(step=290, trainLoss=0.9, lastStepTime=stamp(NOW - 9))
    final = ProgressStatus(step=300, trainLoss=0.5, evalLoss=0.6, lastStepTime=stamp(NOW - 2))
    words = Progress(final, CheckpointStatus(step=300), process_restarts=4)
    pods = Observed((ended(words), ended(None)))
    before = Status(phase="Running", attempt=1, progress=polled, checkpoint={"step": 280})
    status = describe(make_situation(before, pods), Decision("complete", "Succeeded"), 0)
    assert status.progress == final
    assert status.checkpoint == CheckpointStatus(step=300)
    assert status.restarts is not None
    assert status.restarts.process == 4


@pytest.mark.parametrize("asked", [None, NOW - 9], ids=["before a step", "at a step"])
def test_last_words_are_newer_than_an_answer_from_before_the_end(asked: float | None) -> None:
    last = ProgressStatus(step=300, lastStepTime=stamp(NOW - 2))
    answer = ProgressStatus(step=290, lastStepTime=None if asked is None else stamp(asked))
    observed = Observed((ended(Progress(last)),), progress=Progress(answer))
    over = describe(make_situation(None, observed), Decision("complete", "Succeeded"), 0)
    assert over.progress == last


def test_last_words_are_no_news_to_who_has_heard_later_ones() -> None:
    early = Progress(ProgressStatus(step=100, lastStepTime=stamp(NOW - 60)))
    late = ProgressStatus(step=120, lastStepTime=stamp(NOW - 30))
    pods = Observed((ended(early, phase="Failed", exit_code=137),))
    before = Status(phase="Running", attempt=1, progress=late)
    assert describe(make_situation(before, pods), RUN, 2).progress == late
    again = Progress(ProgressStatus(step=101, lastStepTime=stamp(NOW - 31)))
    said = replace(pods, progress=again)
    assert describe(make_situation(before, said), RUN, 2).progress == again.status, "it lives"


ERROR = ConfigError("spec.run.optim.beta1", 2, "must be below 1")


def test_a_job_that_no_trainer_accepts_fails_with_path_and_rule() -> None:
    status = refused(Status(), 1, ERROR, NOW)
    assert (status.phase, finished(status)) == ("Failed", True)
    assert refused(status, 1, ERROR, NOW + 60) == status, "told once"
    assert status.completion_time == stamp(NOW)
    assert status.conditions[0].reason == "InvalidSpec"
    assert "spec.run.optim.beta1: got 2; must be below 1" in status.conditions[0].message


def test_a_running_job_outlives_an_edit_that_no_trainer_accepts() -> None:
    before = describe(make_situation(), RUN, 2)
    status = refused(before, 4, ERROR, NOW)
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
