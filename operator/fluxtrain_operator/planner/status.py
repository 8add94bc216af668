"""The status: phase, conditions and counts, from a situation and a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple
from zlib import crc32

from fluxtrain.contract.resource.status import (
    CONDITION_TYPES,
    MAX_LOG_HEADS,
    Condition,
    LogHead,
    NodeFault,
    NodesStatus,
    Restarts,
    Retry,
    Status,
    TimeSpent,
)
from fluxtrain.errors import ConfigError, redacted
from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import NotPermittedError, UnreadableError
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import duration, seconds, stamp
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.faults import repeated_failure, replacement_time
from fluxtrain_operator.planner.groups import (
    completed_predecessors,
    found_pods,
    kept_problem,
    label_problem,
    release_deadline,
)
from fluxtrain_operator.planner.guard import Reason
from fluxtrain_operator.planner.observed import NAME_CONFLICT, TERMINATING, CreateFailure, Pod
from fluxtrain_operator.planner.situation import Decision, Situation, true_since
from fluxtrain_operator.planner.watchdog import (
    REPORTED_BY_AGENTS,
    goodput,
    has_no_answer,
    has_stalled,
    next_time_spent,
    with_stall,
    without_suspension,
)

Phase = Literal["Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed"]
Kind = Literal[
    "Ready", "Reconciling", "Stalled", "Admitted", "Training", "Progressing", "Healthy", "Suspended",
    "Complete", "Failed",
]  # fmt: skip
Verdict = Literal["Current", "InProgress", "Failed"]
"""What programs that wait, such as ``helm --wait``, make of a job; the words are kstatus's."""
_VERDICTS: dict[Phase, Verdict] = {
    "Pending": "InProgress",
    "Starting": "InProgress",
    "Running": "Current",
    "Suspended": "Current",
    "Restarting": "InProgress",
    "Complete": "Current",
    "Failed": "Failed",
}
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
    """What a status keeps of faults, next to their counts."""

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
    training = _training(situation, decision, phase, failures)
    suspended = _suspended(situation, decision)
    scaling = _scaling(situation, decision, failures)
    updates = [
        *_summary(phase, training, suspended, scaling),
        admitted,
        training,
        _progressing(situation, decision, phase),
        _healthy(situation, decision, phase, failures),
        suspended,
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

    A job with pods keeps them and its phase; it is stalled, unless another operator may accept it. One
    without fails then.
    """
    is_stalled = not isinstance(error, UnreadableError)
    fails = before.attempt == 0 and is_stalled
    reason = "NotPermitted" if isinstance(error, NotPermittedError) else "InvalidSpec"
    because = reason, str(error)[:_MAX_MESSAGE]
    updates = [ConditionUpdate("Failed" if fails else "Healthy", fails, *because)]
    if not finished(before):
        stalled = ConditionUpdate("Stalled", True, *because) if is_stalled else _NOT_STALLED
        updates = [ConditionUpdate("Ready", False, *because), _NOT_RECONCILING, stalled, *updates]
    changes: dict[str, Any] = {
        "conditions": conditions(before.conditions, updates, generation, now),
        "observed_generation": generation,
    }
    if fails:
        changes |= {"phase": "Failed", "completion_time": before.completion_time or stamp(now)}
    return before.model_copy(update=changes)


def finished(status: Status) -> bool:
    return any(c.type in ("Complete", "Failed") and c.status == "True" for c in status.conditions)


def finished_at(status: Status) -> float | None:
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
    return "Starting" if situation.can_start else "Pending"


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
    awaited = situation.gang.waits_for(situation.job, situation.observed.group_state)
    if awaited and not situation.has_min_nodes:
        return ConditionUpdate("Admitted", False, "PodGroupPending", awaited)
    return ConditionUpdate("Admitted", True, "Admitted", _unknown_fields(situation.job))


def _unknown_fields(job: Job) -> str:
    if not job.unknown_fields:
        return ""
    fields = ", ".join(job.unknown_fields)
    return f"this operator is older than the definition, and leaves out {fields}"


def _create_failure(failures: Sequence[CreateFailure]) -> tuple[str, str]:
    """Return reason and message of the first failure, and the number of those with the same reason."""
    first = failures[0]
    if first.reason == NAME_CONFLICT:  # it names all
        return first.reason, first.message
    num_others = sum(failure.reason == first.reason for failure in failures) - 1
    others = f"; {num_others} more like it" if num_others else ""
    return first.reason, f"{first.message[: _MAX_MESSAGE - len(others)]}{others}"


_NOT_RECONCILING = ConditionUpdate("Reconciling", False, "NotReconciling")
_NOT_STALLED = ConditionUpdate("Stalled", False, "NotStalled")


def _summary(
    phase: Phase, training: ConditionUpdate, suspended: ConditionUpdate, scaling: str
) -> list[ConditionUpdate]:
    """Return Ready, Reconciling and Stalled, with the reasons of what the job does or has come to."""
    verdict, because = _VERDICTS[phase], (training.reason, training.message)
    if phase == "Suspended" and not suspended.value:
        verdict, because = "InProgress", (suspended.reason, suspended.message)
    reconciling = because if verdict == "InProgress" else ("Scaling", scaling) if scaling else None
    return [
        ConditionUpdate("Ready", verdict == "Current", *because),
        ConditionUpdate("Reconciling", True, *reconciling) if reconciling else _NOT_RECONCILING,
        ConditionUpdate("Stalled", True, *because) if verdict == "Failed" else _NOT_STALLED,
    ]


def _scaling(situation: Situation, decision: Decision, failures: Sequence[CreateFailure]) -> str:
    """Return how many nodes join or leave those that train; empty if none does.

    At no known time joins a pod that cannot start, as for want of room, or that the API server refuses, and
    leaves one on a lost node or kept by a finalizer.
    """
    if decision.action != "run":
        return ""
    num_max, num_running = situation.job.spec.nodes.max, len(situation.running)
    is_refused = any(failure.reason != TERMINATING for failure in failures)
    expected = len(situation.active) if is_refused else num_max
    blocked = sum(pod.gated or pod.cannot_start for pod in situation.active)
    left = [
        pod
        for pod in situation.current
        if not (pod.ended or pod.kept_by or situation.unreachable(pod))
    ]
    joining, leaving = expected - num_running - blocked, len(left) - num_max
    moves = ("to leave", leaving) if leaving > 0 else ("to join", joining)
    return f"{num_running} of {num_max} nodes train; {moves[0]}: {moves[1]}" if moves[1] > 0 else ""


def _training(
    situation: Situation, decision: Decision, phase: Phase, failures: Sequence[CreateFailure]
) -> ConditionUpdate:
    if phase == "Running":
        count = len(situation.running)
        text = "1 node trains" if count == 1 else f"{count} nodes train"
        return ConditionUpdate("Training", True, "Training", text)
    if failures and not situation.can_start:
        return ConditionUpdate("Training", False, *_create_failure(failures))
    if decision.reason:
        return ConditionUpdate("Training", False, decision.reason, decision.message)
    if situation.can_start:
        return ConditionUpdate("Training", False, "Starting", "no step yet")
    return ConditionUpdate("Training", False, *_pending_reason(situation))


def _pending_reason(situation: Situation) -> tuple[str, str]:
    """Return the reason and message of a pod whose program has failed and that is replaced later.

    Else those that the scheduler or kubelet reports of the first waiting pod, training pods before the
    rendezvous pod, and pods that cannot start before those that are being created.
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
    rendezvous = situation.observed.rendezvous
    pods = [*situation.active, *([rendezvous] if rendezvous is not None else [])]
    waiting = (pod for pod in pods if pod.waiting and not pod.running)
    pod = min(waiting, key=lambda pod: not pod.cannot_start, default=None)
    if pod is not None:
        reason, message = pod.wait_reason
        return reason, f"{count}; {message}"
    if situation.has_min_nodes:
        count = f"{count}; the rendezvous pod does not run"
    return "PodsPending", count


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
        problem = problem or situation.rendezvous_problem
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
    num_left = len([*left, *found_pods(situation, Reason.LABEL_REMOVED, Reason.RESTORED)])
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


_WRITE_SECONDS, _WRITE_JITTER = 60.0, 0.25
"""Interval of two status writes for progress alone, and by which fraction of it jobs differ."""
_NEW_SECONDS, _NEW_WRITE_SECONDS = 300.0, 5.0
"""For how long, and how often, the status of new processes is written: someone may watch them."""


def start_time(situation: Situation, admitted: bool) -> str | None:
    """Return when a pod first passed all scheduling gates: time in a queue does not count."""
    before = situation.job.status.start_time
    started = admitted and any(not pod.gated for pod in situation.current)
    return before or (stamp(situation.now) if started else None)


def active_since(situation: Situation, decision: Decision, admitted: bool) -> str | None:
    """Return since when the job is active; None while it is not: until it starts, suspended, or in a queue.

    A pod that is refused or lost later ends no activity, else deadlines would begin anew with it.
    """
    is_queued = bool(situation.current) and all(map(_is_queued, situation.current))
    if decision.action in ("suspend", "wait") or is_queued:
        return None
    started = admitted and any(not pod.gated for pod in situation.current)
    known = situation.active_since
    return stamp(known if known is not None else situation.now) if known or started else None


def _is_queued(pod: Pod) -> bool:
    return pod.gated and names.KUEUE_GATE in pod.gates


def suspended_seconds(situation: Situation, decision: Decision) -> int | None:
    """Return the total length of all suspensions that have ended."""
    before, began = situation.job.status, true_since(situation.condition("Suspended"))
    if began is None or before.start_time is None or decision.action == "suspend":
        return before.suspended_seconds
    return (before.suspended_seconds or 0) + max(0, int(situation.now - began))


def train_seconds_before(situation: Situation) -> float | None:
    """Return the training time that the output contained before this job, as first reported."""
    before, latest = situation.job.status.train_seconds_before, situation.latest_progress
    return latest.train_seconds_before if before is None and latest is not None else before


def with_times(situation: Situation, decision: Decision, status: Status) -> Status:
    """Return ``status`` with the time spent; with the progress of before if its write is not due yet.

    The status is written on transitions, for the last progress of processes that have ended, and for other
    progress alone only from time to time.
    """
    before = situation.job.status
    times = {"time_spent": before.time_spent, "goodput": before.goodput, "eta": before.eta}
    reported = {"progress": before.progress, "log_heads": before.log_heads}
    unchanged = status.model_copy(update={**times, **reported})
    is_due = situation.now >= _write_time(situation) or _has_final_steps(situation)
    is_new = is_due and (status.progress, status.log_heads) != (before.progress, before.log_heads)
    if unchanged == before and not is_new:
        return unchanged
    spent = _time_spent(situation, decision, status)
    return status.model_copy(update={"time_spent": spent, "goodput": goodput(spent)})


def _has_final_steps(situation: Situation) -> bool:
    """Return whether processes that have ended tell more steps than the status has."""
    before, report = situation.job.status.progress, situation.report
    shown = before.step if before is not None else 0
    return report is not None and report.is_final and report.progress.status.step > shown


def _write_time(situation: Situation) -> float:
    """Return the Unix time from which progress alone is a reason to write the status.

    A job's uid spreads the writes of jobs that started together.
    """
    before, progress = situation.job.status, situation.progress
    last = seconds(before.time_spent.until) if before.time_spent is not None else None
    if last is None:
        return situation.now
    if progress is None or sum(progress.phase_seconds.values()) < _NEW_SECONDS:
        return last + _NEW_WRITE_SECONDS
    spread = crc32(situation.job.uid.encode()) / 2**32
    return last + _WRITE_SECONDS * (1 + _WRITE_JITTER * spread)


def _time_spent(situation: Situation, decision: Decision, status: Status) -> TimeSpent | None:
    before, latest = situation.job.status, situation.latest_progress
    started = before.model_copy(update={"start_time": status.start_time})
    if true_since(situation.condition("Suspended")) is not None:
        return without_suspension(started, situation.now)
    resumed_from = latest.train_seconds_before if latest is not None else None
    cause = _time_cause(situation, decision)
    spent = next_time_spent(started, status.progress, situation.now, cause, resumed_from)
    answer = situation.observed.any_progress
    if decision.reason != "NoProgress" or not decision.uses_restart or answer is None:
        return spent
    return with_stall(spent, answer.phase, answer.seconds_since_progress or 0.0)


def _time_cause(situation: Situation, decision: Decision) -> str:
    """Return what the time since the last write is lost by, as far as no trainer reports its phase."""
    if decision.action == "suspend":
        return "save"
    nodes = situation.job.status.nodes
    had_min_nodes = nodes is not None and nodes.ready >= situation.job.spec.nodes.min
    return "start" if had_min_nodes else "pending"


# Faults of nodes as the condition Healthy reports them.


def node_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message of the most severe fault of a node; None if there is none."""
    guard = situation.guard
    is_concerned = guard.on_not_ready_nodes or has_stalled(situation)
    if is_concerned and guard.control_plane_outage:
        text = "the control plane does not hear of them; nothing is replaced"
        return "NodesUnknown", f"{guard.control_plane_outage}: {text}"
    if guard.ignores_unhealthy_gpus:
        text = f"{guard.gpu_exporter_fault}: nothing is replaced"
        return "UnhealthyGPUs", text
    if guard.ignores_unhealthy_nodes:
        text = f"{guard.node_detector_fault}: nothing is replaced"
        return "UnhealthyNodes", text
    if guard.postponed:
        text = "stay for now: too many are replaced at a time, see --disruption-percent"
        return "DisruptionLimited", f"{len(guard.postponed)} pods on faulty nodes {text}"
    for pod in situation.current:
        if situation.unreachable(pod):
            return "NodeLost", situation.loss_of(pod)
        if (reason := guard.unhealthy_reason(pod)) is not None:
            node = situation.observed.nodes[pod.node]
            fault = node.problem if reason is Reason.UNHEALTHY_NODE else node.unhealthy
            return str(reason), f"{pod.name}: node {pod.node}: {fault}"
    for pod in guard.on_not_ready_nodes[:1]:
        text = "is not ready; it is kept while training continues on it"
        return "NodeNotReady", f"{pod.name}: node {pod.node} {text}"
    return None


def next_heads(before: Sequence[LogHead], progress: Progress | None, now: float) -> list[LogHead]:
    """Return ``before`` with the head in ``progress``, if its chain is longer than all that were seen.

    What was seen first stays: a chain only grows. Of too many, the one nearest to its neighbours in time
    goes, by the operator's clock: many heads that are reported later do not displace those before.
    """
    head = progress.log_head if progress is not None else None
    if head is None or (before and head[0] <= before[-1].records):
        return list(before)
    heads = [*before, LogHead(records=head[0], sha256=head[1], time=stamp(now))]
    while len(heads) > MAX_LOG_HEADS:
        between = range(1, len(heads) - 1)
        del heads[min(between, key=lambda at: _seen(heads[at + 1]) - _seen(heads[at - 1]))]
    return heads


def _seen(head: LogHead) -> float:
    return seconds(head.time) or 0.0
