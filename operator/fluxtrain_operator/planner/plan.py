"""The planner: from a job, what there is of it, and the time, to what to do next. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import Status, read_status
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain_operator.errors import UnreadableError
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.planner.changes import (
    MOST_PODS,
    Delete,
    asked_for,
    changes,
    clean_up,
    clean_up_due,
    in_the_way,
)
from fluxtrain_operator.planner.failures import due_again
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.obstacles import LEAVING, Blocker
from fluxtrain_operator.planner.rules import Decision, decide
from fluxtrain_operator.planner.situation import Situation, earliest, since
from fluxtrain_operator.planner.status import describe, finished, finished_at, refused
from fluxtrain_operator.planner.watchdog import deadline, unheard_at
from fluxtrain_operator.resources import Slot, rendezvous_pod, training_pod
from fluxtrain_operator.resources.template import check

__all__ = ["Delete", "Event", "Plan", "load", "plan", "refuse"]

_STALE_SECONDS = 1.0
_NOT_ACTED_ON = ("NoAnswer", "NodesUnknown", "UnhealthyGPUs")
"""Reasons of conditions that a person should hear of, as the operator does nothing about them."""
_SOONEST_SECONDS = 0.5


@dataclass(frozen=True)
class Event:
    """A transition worth telling."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: write the status, delete, create, post events.

    The status goes first, and only over the version that was read, even an equal one where there is
    anything to do: counters are then never lost, and what was planned from an old picture of the job, a
    finished one's pods for example, is never done. All that follows can be repeated.
    """

    status: Status
    delete: tuple[Delete, ...] = ()
    create: tuple[Manifest, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds after which to plan again though nothing happened."""


def load(manifest: Mapping[str, Any], default_image: str) -> Job:
    """Return the job in ``manifest``; ConfigError for what could not be made into pods.

    UnreadableError for any other error: one job is never the end of the others.
    """
    try:
        job = Job.from_object(manifest, default_image)
        check(job.spec.pod_template.written)
        training_pod(job, Slot(0), job.spec.scheduling.gang)
        rendezvous_pod(job)
    except ConfigError:
        raise
    except Exception as error:
        text = f"this operator cannot read it: {type(error).__name__}: {error}"
        raise UnreadableError("spec", UNSET, text) from error
    return job


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """Return what to do for ``job`` next."""
    if job.deleting or not job.is_ours:
        return Plan(job.status)
    if finished(job.status):
        return _after_the_end(job, observed, now)
    before = Situation.of(job, observed, now)
    if before.stale:
        return Plan(job.status, requeue_after=_STALE_SECONDS)
    decision = decide(before)
    after = before.at(_next_attempt(before, decision))
    delete, create = changes(after, decision)
    stuck = in_the_way(after, decision)
    status = describe(after, decision, asked_for(after, decision, create), stuck)
    return Plan(
        status=status,
        delete=tuple(delete),
        create=tuple(create),
        events=(*_events(before, decision, status, delete), *_obstructed(before, stuck)),
        requeue_after=earliest(
            [_next_look(before, decision, status), _retry(stuck, now), _go_on(create)]
        ),
    )


def refuse(manifest: Mapping[str, Any], error: ConfigError, now: float) -> Plan:
    """Return what to do for a job that ``load`` refused with ``error``: tell, and delete it in time."""
    metadata, before = manifest["metadata"], read_status(manifest.get("status"))
    status = refused(before, metadata.get("generation", 1), error, now)
    life = manifest.get("spec", {}).get("lifecycle")
    keep = life.get("ttlSecondsAfterFinished") if isinstance(life, dict) else None
    return _until_expired(metadata["name"], metadata.get("uid", ""), status, keep, now)


def _next_attempt(situation: Situation, decision: Decision) -> int:
    if decision.action == "restart":
        return situation.attempt + 1
    return max(1, situation.attempt) if decision.action == "run" else situation.attempt


def _after_the_end(job: Job, observed: Observed, now: float) -> Plan:
    """Clean up, and delete the job itself when its time has come; never create."""
    keep = job.spec.lifecycle.ttl_seconds_after_finished
    waiting = _until_expired(job.name, job.uid, job.status, keep, now)
    if waiting.delete:
        return waiting
    situation = Situation(job, observed, now, job.status.attempt)
    due = earliest(time - now for time in clean_up_due(situation) if time > now)
    return replace(
        waiting,
        delete=tuple(clean_up(situation)),
        requeue_after=earliest([waiting.requeue_after, due]),
    )


def _until_expired(name: str, uid: str, status: Status, keep: object, now: float) -> Plan:
    """Return the plan that deletes a job ``keep`` seconds after its end, or waits for that."""
    end = finished_at(status)
    if end is None or not isinstance(keep, int):
        return Plan(status)
    if now >= end + keep:
        return Plan(status, delete=(Delete(KIND, name, uid),))
    return Plan(status, requeue_after=max(_SOONEST_SECONDS, end + keep - now))


def _next_look(situation: Situation, decision: Decision, status: Status) -> float | None:
    """Return the seconds to the next moment at which time alone changes the plan."""
    now, life = situation.now, situation.job.spec.lifecycle
    times = [decision.due]
    if decision.action in ("run", "restart", "hold"):
        times += [due_again(fault, situation.restarts.gang) for fault in situation.faults]
        times += [deadline(situation), unheard_at(situation), situation.judged_at]
        times += [*(situation.overdue_at(p) for p in situation.observed.pods)]
        start = since(next((c for c in status.conditions if c.type == "Admitted"), None))
        limit = life.active_deadline_seconds
        times.append(start + limit if start is not None and limit is not None else None)
    if decision.action in ("complete", "fail"):
        keep = life.ttl_seconds_after_finished
        times += [None if keep is None else now + keep, *clean_up_due(situation)]
    due = earliest(time for time in times if time is None or time > now)
    return None if due is None else max(_SOONEST_SECONDS, due - now)


def _events(
    situation: Situation, decision: Decision, status: Status, deleted: list[Delete]
) -> Iterator[Event]:
    before = situation.job.status
    if decision.action == "restart":
        kind: Literal["Normal", "Warning"] = "Warning" if decision.charged else "Normal"
        yield Event(kind, decision.reason, f"attempt {status.attempt}: {decision.message}")
    elif status.phase != before.phase:
        bad = status.phase in ("Failed", "Restarting")
        text = decision.message or f"was {before.phase or 'new'}"
        yield Event("Warning" if bad else "Normal", str(status.phase), text)
    reasons = {condition.type: condition.reason for condition in before.conditions}
    for condition in status.conditions:
        news = condition.reason != reasons.get(condition.type)
        if news and condition.reason in _NOT_ACTED_ON:
            yield Event("Warning", condition.reason, condition.message)
    going = {delete.uid for delete in deleted}
    for fault in situation.faults:
        if fault.infrastructure and fault.pod.uid in going and decision.action == "run":
            yield Event("Warning", fault.reason, f"{fault.message}; replaced")
    for pod in situation.current:
        if situation.unreachable(pod) and pod.uid in going and not pod.deleting:
            yield Event("Warning", "NodeLost", f"{pod.name}: node {pod.node} is lost; replaced")


def _obstructed(situation: Situation, stuck: tuple[Blocker, ...]) -> Iterator[Event]:
    """Yield what people must know of, once: the conditions know what has been told."""
    told = {condition.reason for condition in situation.job.status.conditions}
    for obstacle in stuck[:1]:
        if obstacle.reason not in told:
            kind: Literal["Normal", "Warning"] = (
                "Normal" if obstacle.reason == LEAVING else "Warning"
            )
            yield Event(kind, obstacle.reason, obstacle.message)


def _go_on(create: list[Manifest]) -> float | None:
    """Return 0 where there may be more to create than one plan does."""
    return 0.0 if sum(wanted["kind"] == "Pod" for wanted in create) >= MOST_PODS else None


def _retry(stuck: tuple[Blocker, ...], now: float) -> float | None:
    """Return the seconds after which something that could not be made is tried again."""
    due = earliest(o.due for o in stuck if now < o.due < math.inf)
    return None if due is None else max(_SOONEST_SECONDS, due - now)
