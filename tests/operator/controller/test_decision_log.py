"""The log of decisions: one record for each decision, with its reason; none for progress alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.operator.jobs import make_training

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import Condition, InPlaceRestart, ProgressStatus, Status
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.executor import decision_fields, log_decision
from fluxtrain_operator.planner.guard import Delete
from fluxtrain_operator.planner.plan import Event, Plan
from fluxtrain_operator.planner.situation import RUN, Decision

FAILURE = Decision("restart", "ProgramError", "job-0: exit code 1", uses_restart=True)
MANIFEST = make_training()


def condition(kind: str, value: Any, reason: str) -> Condition:
    return Condition(type=kind, status=value, reason=reason, lastTransitionTime=stamp(0))


def running(**changes: Any) -> Status:
    conditions = [condition("Ready", "True", "Training")]
    return Status(phase="Running", attempt=2, conditions=conditions, **changes)


def fields(plan: Plan, before: Status | None = None) -> dict[str, Any]:
    result = decision_fields(MANIFEST, before or running(), plan)
    assert result is not None
    return result


def test_progress_alone_is_not_logged() -> None:
    plan = Plan(running(progress=ProgressStatus(step=9)), decision=RUN)
    assert decision_fields(MANIFEST, running(), plan) is None


def test_a_decision_has_its_reason_and_its_objects() -> None:
    pod = {"kind": "Pod", "metadata": {"name": "job-0"}}
    plan = Plan(running(), (Delete("Pod", "job-1"),), (pod,), decision=FAILURE)
    values = fields(plan)
    assert (values["namespace"], values["job"], values["attempt"]) == ("ns", "job", 2)
    assert (values["action"], values["reason"]) == ("restart", "ProgramError")
    assert values["detail"] == "job-0: exit code 1"
    assert (values["delete"], values["create"]) == (["Pod/job-1"], ["Pod/job-0"])


def test_a_restart_in_place_has_an_action_of_its_own() -> None:
    restart = InPlaceRestart(attempt=2, generation=1, step=7, time=stamp(0))
    decision = Decision("run", "NoProgress", "hangs", True, in_place_restart=restart)
    values = fields(Plan(running(), (Delete("Pod", "job-rendezvous"),), decision=decision))
    assert (values["action"], values["reason"]) == ("restart in place", "NoProgress")


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(running(), events=(Event("Warning", "NodeLost", "gone"),), decision=RUN), "NodeLost"),
        (Plan(Status(phase="Pending"), decision=RUN), "Desired"),
        (
            Plan(
                Status(phase="Failed", conditions=[condition("Failed", "True", "InvalidSpec")]),
            ),
            "InvalidSpec",
        ),
        (Plan(running(), (Delete(KIND, "job"),)), "Expired"),
        (Plan(running(), (Delete("Pod", "job-0"),)), "CleanPods"),
    ],
    ids=["event", "phase", "condition", "expired", "clean_up"],
)
def test_a_plan_without_a_reason_of_its_own_has_one(plan: Plan, reason: str) -> None:
    assert fields(plan)["reason"] == reason


def test_changed_conditions_are_listed() -> None:
    after = running().model_copy(update={"conditions": [condition("Ready", "False", "NodeLost")]})
    assert fields(Plan(after, decision=RUN))["conditions"] == ["Ready=False NodeLost"]


def test_many_names_are_counted() -> None:
    plan = Plan(running(), tuple(Delete("Pod", f"job-{n}") for n in range(4096)), decision=FAILURE)
    names = fields(plan)["delete"]
    assert (len(names), names[-1]) == (17, "and 4080 more")


def test_the_text_has_the_reason_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_decision(MANIFEST, Status(), Plan(running(), decision=FAILURE))
    (record,) = caplog.records
    assert record.getMessage() == "ns/job: restart, ProgramError: job-0: exit code 1"


def test_a_percent_sign_in_a_message_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decision = Decision("fail", "ProgramError", "100%s full %(x)d")
    log_decision(MANIFEST, Status(), Plan(running(), decision=decision))
    assert caplog.records[0].getMessage().endswith("100%s full %(x)d")
