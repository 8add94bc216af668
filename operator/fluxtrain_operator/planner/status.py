"""The status: phase, conditions and counts, from a situation and a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from fluxtrain.contract.redaction import redacted
from fluxtrain.contract.resource.status import (
    CONDITION_TYPES,
    Condition,
    NodeFault,
    NodesStatus,
    Restarts,
    Retry,
    Status,
)
from fluxtrain.errors import ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.durations import duration
from fluxtrain_operator.errors import NotPermittedError, UnreadableError
from fluxtrain_operator.job import Job
from fluxtrain_operator.planner.backoff import repeated_failure, replacement_time
from fluxtrain_operator.planner.changed_labels import label_problem, unwatched_pods
from fluxtrain_operator.planner.create_failures import TERMINATING, CreateFailure
from fluxtrain_operator.planner.decision import Decision
from fluxtrain_operator.planner.disruption import Reason
from fluxtrain_operator.planner.kept_pods import kept_problem
from fluxtrain_operator.planner.log_heads import next_heads
from fluxtrain_operator.planner.node_problems import node_problem
from fluxtrain_operator.planner.pod_group import release_deadline
from fluxtrain_operator.planner.predecessors import completed_predecessors
from fluxtrain_operator.planner.situation import Situation, true_since
from fluxtrain_operator.planner.times import (
    active_since,
    start_time,
    suspended_seconds,
    train_seconds_before,
    with_times,
)
from fluxtrain_operator.planner.watchdog import REPORTED_BY_AGENTS, has_no_answer
from fluxtrain_operator.timestamps import stamp

Phase = Literal["Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed"]
Kind = Literal["Admitted", "Ready", "Progressing", "Healthy", "Suspended", "Complete", "Failed"]
_HEALTHY, _DEGRADED, _NO_PROGRESS = "AsExpected", "Degraded", str(Reason.NO_PROGRESS)
_MAX_FOREIGN = 8
"""Conditions of other types, such as those of another version of the operator, that are kept. A status with
as many as it may have could never be written again."""
_MAX_MESSAGE = 4096
_MAX_ETA_SECONDS = 3650 * 86_400.0
"""A longer estimate, ten years, is not shown: the rate that it was computed from is not credible."""
_VALUES: dict[bool | None, Literal["True", "False", "Unknown"]] = {
    True: "True",
    False: "False",
    None: "Unknown",
}


class FaultRecords(NamedTuple):
    """What a status keeps of faults, beside their counts."""

    node_faults: list[NodeFault]
    retries: list[Retry]
    exclusion_lifted: str | None


class ConditionUpdate(NamedTuple):
    """The value of a condition; None is Unknown."""

    type: Kind
    value: bool | None
    reason: str
    message: str = ""


def next_status(
    situation: Situation,
    decision: Decision,
    num_requested: int,
    failures: Sequence[CreateFailure] = (),
    restarts: Restarts | None = None,
    records: FaultRecords | None = None,
) -> Status:
    """Return the status after ``decision``.

    ``situation`` is in the attempt that follows, ``num_requested`` pods of which were requested; ``failures``
    are why others, or objects that they need, cannot be created; ``restarts`` are those so far, ``records``
    those of faults.
    """
    records = records or FaultRecords([], [], None)
    job, before = situation.job, situation.job.status
    phase = _phase(situation, decision)
    admitted = _admitted(situation, decision, failures)
    updates = [
        admitted,
        _ready(situation, decision, phase, failures),
        _progressing(situation, decision, phase),
        _healthy(situation, decision, phase, failures),
        _suspended(situation, decision),
        ConditionUpdate("Complete", phase == "Complete", *_end_reason(decision, "complete")),
        ConditionUpdate("Failed", phase == "Failed", *_end_reason(decision, "fail")),
    ]
    starts = decision.action in ("run", "restart")
    revision = situation.revision.name if starts else before.revision
    unchanged = revision == before.revision
    latest = situation.latest_progress
    num_ready = sum(pod.ready for pod in situation.running)
    status = Status(
        phase=phase,
        conditions=conditions(before.conditions, updates, job.generation, situation.now),
        observedGeneration=job.generation,
        nodes=NodesStatus(ready=num_ready, desired=num_requested),
        selector=names.as_text(names.trainer_selector(job.name)),
        attempt=situation.attempt,
        groupAttempt=situation.group if situation.group != situation.attempt else None,
        revision=revision,
        previousRevision=before.previous_revision if unchanged else before.revision,
        restarts=restarts or situation.restarts,
        inPlaceRestart=situation.in_place_restart,
        podReplacement=situation.pod_replacement,
        nodeFaults=records.node_faults,
        retries=records.retries,
        exclusionLifted=records.exclusion_lifted,
        progress=situation.progress,
        eta=_eta(situation, phase),
        checkpoint=(latest.checkpoint if latest else None) or before.checkpoint,
        logHeads=next_heads(before.log_heads, latest, situation.now),
        startTime=start_time(situation, bool(admitted.value)),
        activeSince=active_since(situation, decision, bool(admitted.value)),
        completionTime=stamp(situation.now) if decision.action in ("complete", "fail") else None,
        suspendedSeconds=suspended_seconds(situation, decision),
        trainSecondsBefore=train_seconds_before(situation),
        exitCode=decision.exit_code if phase in ("Complete", "Failed") else None,
        completedPredecessors=completed_predecessors(situation),
        lastError=redacted(decision.error_line)[:_MAX_MESSAGE] or before.last_error,
    )
    return with_times(situation, decision, status)


def invalid_spec_status(before: Status, generation: int, error: ConfigError, now: float) -> Status:
    """Return the status of a job whose spec is rejected with ``error``.

    A job with pods keeps them and its phase. One without fails, unless another operator may accept it.
    """
    fails = before.attempt == 0 and not isinstance(error, UnreadableError)
    kind: Kind = "Failed" if fails else "Healthy"
    reason = "NotPermitted" if isinstance(error, NotPermittedError) else "InvalidSpec"
    update = ConditionUpdate(kind, fails, reason, str(error)[:_MAX_MESSAGE])
    changes: dict[str, Any] = {
        "conditions": conditions(before.conditions, [update], generation, now),
        "observed_generation": generation,
    }
    if fails:
        changes |= {"phase": "Failed", "completion_time": before.completion_time or stamp(now)}
    return before.model_copy(update=changes)


def finished(status: Status) -> bool:
    """Return whether the job is complete or failed."""
    return any(c.type in ("Complete", "Failed") and c.status == "True" for c in status.conditions)


def finished_at(status: Status) -> float | None:
    """Return the Unix time at which the job finished."""
    ends = [true_since(c) for c in status.conditions if c.type in ("Complete", "Failed")]
    return next((end for end in ends if end is not None), None)


def conditions(
    before: Iterable[Condition], updates: Iterable[ConditionUpdate], generation: int, now: float
) -> list[Condition]:
    """Return ``before`` with ``updates``; a transition time changes only with the status."""
    result = {condition.type: condition for condition in before}
    foreign = [kind for kind in result if kind not in CONDITION_TYPES]
    for kind in foreign[_MAX_FOREIGN:]:
        del result[kind]
    for update in updates:
        value, old = _VALUES[update.value], result.get(update.type)
        message = redacted(update.message)[:_MAX_MESSAGE]
        facts = value, update.reason, message, generation
        if old and (old.status, old.reason, old.message, old.observed_generation) == facts:
            continue  # comparing and validating all of them anew is a third of a plan's time
        result[update.type] = Condition(
            type=update.type,
            status=value,
            reason=update.reason,
            message=message,
            lastTransitionTime=old.last_transition_time
            if old and old.status == value
            else stamp(now),
            observedGeneration=generation,
        )
    return list(result.values())


def _phase(situation: Situation, decision: Decision) -> Phase:
    ends: dict[str, Phase] = {"complete": "Complete", "fail": "Failed", "suspend": "Suspended"}
    if decision.action in ends:
        return ends[decision.action]
    if decision.action == "hold" and decision.reason == "Finishing":
        return "Running"
    if situation.has_stepped:
        return "Running"
    restarts = situation.restarts
    if situation.progress is not None or restarts.gang or restarts.pod or decision.uses_restart:
        return "Restarting"
    return "Starting" if situation.has_min_nodes else "Pending"


def _admitted(
    situation: Situation, decision: Decision, failures: Sequence[CreateFailure]
) -> ConditionUpdate:
    if decision.action in ("wait", "suspend"):
        return ConditionUpdate("Admitted", False, decision.reason, decision.message)
    if failures and not situation.has_min_nodes:
        return ConditionUpdate("Admitted", False, *_create_failure(failures))
    gated = [pod for pod in situation.active if pod.gated]
    if gated and not situation.has_min_nodes:
        gates = sorted({gate for pod in gated for gate in pod.gates})
        message = f"{len(gated)} pods wait at a scheduling gate: {', '.join(gates)}"
        return ConditionUpdate("Admitted", False, "SchedulingGated", message)
    reason, message = situation.gang.admission
    return ConditionUpdate("Admitted", True, reason, message or _unknown_fields(situation.job))


def _unknown_fields(job: Job) -> str:
    if not job.unknown_fields:
        return ""
    fields = ", ".join(job.unknown_fields)
    return f"this operator is older than the definition, and leaves out {fields}"


def _create_failure(failures: Sequence[CreateFailure]) -> tuple[str, str]:
    """Return reason and message of the first failure, and the number of those with the same reason."""
    first = failures[0]
    num_others = sum(failure.reason == first.reason for failure in failures) - 1
    others = f"; {num_others} more like it" if num_others else ""
    return first.reason, f"{first.message[: _MAX_MESSAGE - len(others)]}{others}"


def _ready(
    situation: Situation, decision: Decision, phase: Phase, failures: Sequence[CreateFailure]
) -> ConditionUpdate:
    if phase == "Running":
        count = len(situation.running)
        text = "1 node trains" if count == 1 else f"{count} nodes train"
        return ConditionUpdate("Ready", True, "Training", text)
    if failures and not situation.has_min_nodes:
        return ConditionUpdate("Ready", False, *_create_failure(failures))
    if decision.reason:
        return ConditionUpdate("Ready", False, decision.reason, decision.message)
    if situation.has_min_nodes:
        return ConditionUpdate("Ready", False, "Starting", "no step yet")
    return ConditionUpdate("Ready", False, *_pending_reason(situation))


def _pending_reason(situation: Situation) -> tuple[str, str]:
    """Return the reason and message of a pod whose program has failed and that is replaced later.

    Else those that the scheduler or kubelet reports of the first waiting pod.
    """
    for failure in situation.program_failures:
        time = replacement_time(situation, failure)
        if time > situation.now:
            return failure.reason, f"{failure.message}; starts again at {stamp(time)}"
    need = situation.job.spec.nodes.min
    count = f"{len(situation.running)} of at least {need} nodes are up"
    if (deadline := release_deadline(situation)) is not None:
        lost = ", ".join(pod.name for pod in situation.lost_members)
        text = f"Kueue's group waits until {stamp(deadline)} for the places of {lost}"
        return "GroupWaits", f"{count}; {text}, whose nodes are lost"
    pod = next((p for p in situation.active if p.waiting and not p.running), None)
    if pod is None:
        return "PodsPending", count
    reason, _, message = pod.waiting.partition(": ")
    reason = reason if reason.isalnum() and reason[0].isalpha() else "PodsPending"
    return reason, f"{count}; {pod.name}: {message or reason}"


def _progressing(situation: Situation, decision: Decision, phase: Phase) -> ConditionUpdate:
    if decision.action == "run" and has_no_answer(situation):
        return _unanswered(situation, phase)
    if phase == "Running":
        return ConditionUpdate("Progressing", True, "Stepping")
    if decision.reason == _NO_PROGRESS or phase in ("Complete", "Failed", "Suspended"):
        return ConditionUpdate("Progressing", False, decision.reason, decision.message)
    return ConditionUpdate("Progressing", None, "NotTraining")


def _unanswered(situation: Situation, phase: Phase) -> ConditionUpdate:
    """Return what is known of a job none of whose trainers answers: what agents report, or nothing."""
    answer = situation.observed.any_progress
    if answer is None:
        text = "no trainer answers at /progress, which is no fault: is the port reachable?"
        return ConditionUpdate("Progressing", None, "NoAnswer", text)
    text = f"agents report phase {answer.phase}, but no trainer answers at /progress"
    text = f"{text}: step, loss and speed are outdated; is the port reachable?"
    value = True if phase == "Running" else None
    return ConditionUpdate("Progressing", value, REPORTED_BY_AGENTS, text)


def _healthy(
    situation: Situation, decision: Decision, phase: Phase, failures: Sequence[CreateFailure]
) -> ConditionUpdate:
    """Return the most severe problem; a create failure only if there is none."""
    if decision.action == "fail" or decision.uses_restart or decision.reason == _NO_PROGRESS:
        problem: tuple[str, str] | None = decision.reason, decision.message
    else:
        failed = next(((f.reason, f.message) for f in situation.failures), None)
        problem = node_problem(situation) or repeated_failure(situation) or failed
    if problem is None and failures and failures[0].reason != TERMINATING:
        problem = _create_failure(failures)
    if problem is None:
        problem = kept_problem(situation) or label_problem(situation)
    if problem is None:
        problem = _degraded(situation, decision, phase)
    if problem is None:
        return ConditionUpdate("Healthy", True, _HEALTHY)
    return ConditionUpdate("Healthy", False, *problem)


def _degraded(situation: Situation, decision: Decision, phase: Phase) -> tuple[str, str] | None:
    num_running, desired = len(situation.running), situation.job.spec.nodes.max
    if phase == "Running" and num_running < desired and decision.action == "run":
        return _DEGRADED, f"{num_running} of {desired} nodes"
    return None


def _suspended(situation: Situation, decision: Decision) -> ConditionUpdate:
    if decision.action != "suspend":
        return ConditionUpdate("Suspended", False, "NotSuspended")
    left = [pod for pod in situation.observed.pods if not pod.kept_by]
    num_left = len(left) + len([*unwatched_pods(situation)])
    if num_left:
        message = f"{num_left} pods leave a checkpoint and go"
        return ConditionUpdate("Suspended", False, "Stopping", message)
    return ConditionUpdate("Suspended", True, "Suspended")


def _end_reason(decision: Decision, action: str) -> tuple[str, str]:
    if decision.action == action:
        return decision.reason, decision.message
    return "NotYet", ""


def _eta(situation: Situation, phase: Phase) -> str | None:
    """Return the time to the last step; a column of dates would show it as an age."""
    progress = situation.progress
    remaining = progress.remaining_seconds if progress is not None else None
    if phase != "Running" or remaining is None or remaining > _MAX_ETA_SECONDS:
        return None
    return duration(remaining)
