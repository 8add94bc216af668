"""From a situation and a decision to the status: phase for people, conditions for machines, counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from fluxtrain.contract.resource.status import Condition, NodesStatus, Restarts, Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.errors import UnreadableError
from fluxtrain_operator.planner.obstacles import LEAVING, Blocker
from fluxtrain_operator.planner.rules import Decision
from fluxtrain_operator.planner.situation import Situation, since
from fluxtrain_operator.planner.watchdog import unheard
from fluxtrain_operator.timestamps import seconds, stamp

Phase = Literal["Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed"]
Kind = Literal["Admitted", "Ready", "Progressing", "Healthy", "Suspended", "Complete", "Failed"]
_AS_WANTED, _DEGRADED = "AsWanted", "Degraded"
_LONGEST_MESSAGE = 4096


class Fact(NamedTuple):
    """What a condition says; None is unknown."""

    kind: Kind
    holds: bool | None
    reason: str
    message: str = ""


def describe(
    situation: Situation, decision: Decision, asked_for: int, stuck: Sequence[Blocker] = ()
) -> Status:
    """Return the status that follows from ``decision``, taken in ``situation``.

    ``situation`` is already in the attempt that the decision leads to; ``asked_for`` is how many of its
    pods have been asked for, and ``stuck`` why others, or what they need, cannot be made.
    """
    job, before = situation.job, situation.job.status
    restarts = situation.restarts
    if decision.charged:
        restarts = Restarts(process=restarts.process, pod=restarts.pod, gang=restarts.gang + 1)
    phase = _phase(situation, decision)
    facts = [
        _admitted(situation, decision, stuck),
        _ready(situation, decision, phase, stuck),
        _progressing(situation, decision, phase),
        _unobstructed(_healthy(situation, decision, phase), stuck),
        _suspended(situation, decision),
        Fact("Complete", phase == "Complete", *_end(decision, "complete")),
        Fact("Failed", phase == "Failed", *_end(decision, "fail")),
    ]
    words = situation.words
    status = Status(
        phase=phase,
        conditions=conditions(before.conditions, facts, job.generation, situation.now),
        observedGeneration=job.generation,
        nodes=NodesStatus(ready=sum(pod.ready for pod in situation.running), desired=asked_for),
        selector=_selector(job.name),
        attempt=situation.attempt,
        restarts=restarts,
        progress=situation.progress,
        checkpoint=(words.checkpoint if words else None) or before.checkpoint,
        startTime=_start_time(situation, facts[0]),
        completionTime=stamp(situation.now) if decision.action in ("complete", "fail") else None,
        suspendedSeconds=_suspended_seconds(situation, decision),
        trainSecondsBefore=_train_seconds_before(situation),
        goodput=before.goodput,
        exitCode=decision.exit_code if phase in ("Complete", "Failed") else None,
        lastError=decision.error_line[:_LONGEST_MESSAGE] or before.last_error,
    )
    return status.model_copy(update={"goodput": _goodput(status)})


def refused(before: Status, generation: int, error: ConfigError, now: float) -> Status:
    """Return the status of a job whose spec no trainer would accept.

    A job that has pods keeps them and its phase, and says what is wrong; one that has none fails, where
    that would not change with another operator.
    """
    message = str(error)[:_LONGEST_MESSAGE]
    fails = before.attempt == 0 and not isinstance(error, UnreadableError)
    fact = Fact("Failed" if fails else "Healthy", fails, "InvalidSpec", message)
    found = conditions(before.conditions, [fact], generation, now)
    changes: dict[str, Any] = {"conditions": found, "observed_generation": generation}
    if fails:
        changes |= {"phase": "Failed", "completion_time": before.completion_time or stamp(now)}
    return before.model_copy(update=changes)


def finished(status: Status) -> bool:
    """Return whether the job is over, for good."""
    return any(c.type in ("Complete", "Failed") and c.status == "True" for c in status.conditions)


def finished_at(status: Status) -> float | None:
    """Return the Unix time at which the job was over."""
    ends = [since(c) for c in status.conditions if c.type in ("Complete", "Failed")]
    return next((end for end in ends if end is not None), None)


def conditions(
    before: Iterable[Condition], facts: Iterable[Fact], generation: int, now: float
) -> list[Condition]:
    """Return ``before`` with ``facts`` laid over it; a time changes only where a status does."""
    known = {condition.type: condition for condition in before}
    for fact in facts:
        value = _STATUS[fact.holds]
        old = known.get(fact.kind)
        moved = old is None or old.status != value
        known[fact.kind] = Condition(
            type=fact.kind,
            status=value,
            reason=fact.reason,
            message=fact.message[:_LONGEST_MESSAGE],
            lastTransitionTime=stamp(now) if old is None or moved else old.last_transition_time,
            observedGeneration=generation,
        )
    return list(known.values())


_STATUS: dict[bool | None, Literal["True", "False", "Unknown"]] = {
    True: "True",
    False: "False",
    None: "Unknown",
}


def _phase(situation: Situation, decision: Decision) -> Phase:
    ends: dict[str, Phase] = {"complete": "Complete", "fail": "Failed", "suspend": "Suspended"}
    if decision.action in ends:
        return ends[decision.action]
    if decision.action == "hold" and decision.reason == "Finishing":
        return "Running"
    if situation.stepping:
        return "Running"
    restarts = situation.restarts
    if situation.progress is not None or restarts.gang or restarts.pod or decision.charged:
        return "Restarting"
    return "Starting" if situation.enough else "Pending"


def _admitted(situation: Situation, decision: Decision, stuck: Sequence[Blocker]) -> Fact:
    if decision.action in ("wait", "suspend"):
        return Fact("Admitted", False, decision.reason, decision.message)
    if stuck and not situation.enough:
        return Fact("Admitted", False, *_obstructed(stuck))
    gated = [pod for pod in situation.kept if pod.gated]
    if gated and not situation.enough:
        gates = sorted({gate for pod in gated for gate in pod.gates})
        text = f"{len(gated)} pods wait at a scheduling gate: {', '.join(gates)}"
        return Fact("Admitted", False, "SchedulingGated", text)
    if situation.gang != situation.job.spec.scheduling.gang:
        return Fact("Admitted", True, "NoPodGroups", "the cluster has no API for scheduling.gang")
    unknown = ", ".join(situation.job.unknown)
    text = (
        f"this operator is older than the definition, and leaves out {unknown}" if unknown else ""
    )
    return Fact("Admitted", True, "Admitted", text)


def _obstructed(stuck: Sequence[Blocker]) -> tuple[str, str]:
    """Return the reason and the words of the first obstacle, and how many there are like it."""
    first = stuck[0]
    num_others = sum(obstacle.reason == first.reason for obstacle in stuck) - 1
    others = f"; {num_others} more like it" if num_others else ""
    return first.reason, f"{first.message[: _LONGEST_MESSAGE - len(others)]}{others}"


def _ready(
    situation: Situation, decision: Decision, phase: Phase, stuck: Sequence[Blocker]
) -> Fact:
    if phase == "Running":
        return Fact("Ready", True, "Training", f"{len(situation.running)} nodes train")
    if stuck and not situation.enough:
        return Fact("Ready", False, *_obstructed(stuck))
    if decision.reason:
        return Fact("Ready", False, decision.reason, decision.message)
    if situation.enough:
        return Fact("Ready", False, "Starting", "no step yet")
    return Fact("Ready", False, *_why_pending(situation))


def _why_pending(situation: Situation) -> tuple[str, str]:
    """Return the scheduler's or kubelet's own words about the first pod that waits."""
    need = situation.job.spec.nodes.min
    count = f"{len(situation.running)} of at least {need} nodes are up"
    told = next((pod for pod in situation.kept if pod.waiting and not pod.running), None)
    if told is None:
        return "PodsPending", count
    reason, _, text = told.waiting.partition(": ")
    reason = reason if reason.isalnum() and reason[0].isalpha() else "PodsPending"
    return reason, f"{count}; {told.name}: {text or reason}"


def _progressing(situation: Situation, decision: Decision, phase: Phase) -> Fact:
    if decision.action == "run" and unheard(situation):
        text = "no trainer answers at /progress, which is no fault: is the port reachable?"
        return Fact("Progressing", None, "NoAnswer", text)
    if phase == "Running":
        return Fact("Progressing", True, "Stepping")
    if decision.reason == "NoProgress" or phase in ("Complete", "Failed", "Suspended"):
        return Fact("Progressing", False, decision.reason, decision.message)
    return Fact("Progressing", None, "NotTraining")


def _unobstructed(healthy: Fact, stuck: Sequence[Blocker]) -> Fact:
    """Return ``healthy``, or why objects cannot be made where nothing worse is known."""
    if not stuck or stuck[0].reason == LEAVING or healthy.reason not in (_AS_WANTED, _DEGRADED):
        return healthy
    return Fact("Healthy", False, *_obstructed(stuck))


def _healthy(situation: Situation, decision: Decision, phase: Phase) -> Fact:
    if decision.action == "fail" or decision.charged:
        return Fact("Healthy", False, decision.reason, decision.message)
    if situation.suspects and situation.cannot_see:
        text = (
            f"{situation.cannot_see}: the control plane does not hear of them; nothing is replaced"
        )
        return Fact("Healthy", False, "NodesUnknown", text)
    if situation.untold_gpus:
        text = f"{situation.cannot_tell_gpus}: not believed; nothing is replaced"
        return Fact("Healthy", False, "UnhealthyGPUs", text)
    for pod in situation.current:
        if situation.unreachable(pod):
            return Fact("Healthy", False, "NodeLost", f"{pod.name}: node {pod.node} is lost")
        if situation.condemned(pod):
            why = situation.observed.nodes[pod.node].unhealthy
            return Fact("Healthy", False, "UnhealthyGPU", f"{pod.name}: node {pod.node}: {why}")
    if situation.suspects:
        pod = situation.suspects[0]
        text = (
            f"{pod.name}: node {pod.node} is not ready; it is kept while training goes on with it"
        )
        return Fact("Healthy", False, "NodeNotReady", text)
    if situation.faults:
        return Fact("Healthy", False, situation.faults[0].reason, situation.faults[0].message)
    wanted = situation.job.spec.nodes.max
    if phase == "Running" and len(situation.running) < wanted and decision.action == "run":
        return Fact("Healthy", False, _DEGRADED, f"{len(situation.running)} of {wanted} nodes")
    return Fact("Healthy", True, _AS_WANTED)


def _suspended(situation: Situation, decision: Decision) -> Fact:
    if decision.action != "suspend":
        return Fact("Suspended", False, "NotSuspended")
    left = len(situation.observed.pods)
    if left:
        return Fact("Suspended", False, "Stopping", f"{left} pods leave a checkpoint and go")
    return Fact("Suspended", True, "Suspended")


def _end(decision: Decision, action: str) -> tuple[str, str]:
    if decision.action == action:
        return decision.reason, decision.message
    return "NotYet", ""


def _selector(job: str) -> str:
    return ",".join(f"{key}={value}" for key, value in names.trainer_selector(job).items())


def _start_time(situation: Situation, admitted: Fact) -> str | None:
    """Return when a pod was first past all gates: waiting in a queue is no part of the job's time."""
    before = situation.job.status.start_time
    free = admitted.holds and any(not pod.gated for pod in situation.current)
    return before or (stamp(situation.now) if free else None)


def _suspended_seconds(situation: Situation, decision: Decision) -> int | None:
    """Return the length of all pauses that are over."""
    before, began = situation.job.status, since(situation.condition("Suspended"))
    if began is None or before.start_time is None or decision.action == "suspend":
        return before.suspended_seconds
    return (before.suspended_seconds or 0) + max(0, int(situation.now - began))


def _train_seconds_before(situation: Situation) -> float | None:
    """Return the training time of the run that is another job's, as the first words of this one had it."""
    before, words = situation.job.status.train_seconds_before, situation.words
    return words.train_seconds_before if before is None and words is not None else before


def _goodput(status: Status) -> float | None:
    """Return the part of the job's time that went into steps that counted."""
    progress, start = status.progress, seconds(status.start_time)
    if start is None or progress is None or progress.train_seconds is None:
        return status.goodput
    pause = next(c.last_transition_time for c in status.conditions if c.type == "Suspended")
    known = (progress.last_step_time, pause)  # suspendedSeconds lacks a pause that goes on
    end = seconds(status.completion_time) or max(seconds(time) or 0.0 for time in known)
    elapsed = end - start - (status.suspended_seconds or 0)
    useful = progress.train_seconds - (status.train_seconds_before or 0.0)
    return round(min(1.0, max(0.0, useful) / elapsed), 4) if elapsed > 0 else status.goodput
