"""The status: conditions as Kubernetes means them, and what becomes of a spec that no trainer accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from fluxtrain.contract.status import Condition, ProgressStatus, Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.crd import resource_schema
from fluxtrain_operator.decide import RUN, Decision
from fluxtrain_operator.observed import Observed, Pod
from fluxtrain_operator.plan import load
from fluxtrain_operator.situation import Situation
from fluxtrain_operator.status import Fact, conditions, describe, finished, finished_at, refused
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


def test_goodput_is_the_part_of_the_time_that_steps_took() -> None:
    admitted = Condition(
        type="Admitted", status="True", reason="Admitted", lastTransitionTime=stamp(NOW - 1000)
    )
    progress = ProgressStatus(step=90, samples=7200, samplesPerSecond=8.0, lastStepTime=stamp(NOW))
    before = Status(phase="Running", attempt=1, conditions=[admitted], progress=progress)
    assert describe(make_situation(before), RUN, 2).goodput == 0.9
    late = admitted.model_copy(update={"last_transition_time": stamp(NOW - 10)})
    resumed = before.model_copy(update={"conditions": [late]})
    assert describe(make_situation(resumed), RUN, 2).goodput is None


ERROR = ConfigError("spec.run.optim.beta1", 2, "must be below 1")


def test_a_job_that_no_trainer_accepts_fails_with_path_and_rule() -> None:
    status = refused(Status(), 1, ERROR, NOW)
    assert (status.phase, finished(status)) == ("Failed", True)
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
