"""The planner: returns what to do next for a job, given its observed objects and the time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import NodeFault, Status, read_status
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain_operator.base.errors import UnreadableError
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.limits import require_permitted
from fluxtrain_operator.base.names import earliest, seconds
from fluxtrain_operator.base.node_health import Fault
from fluxtrain_operator.base.settings import (
    NO_DEFAULTS,
    NO_RULES,
    JobPolicy,
    NetworkRules,
    PodDefaults,
)
from fluxtrain_operator.planner.changes import (
    MAX_PODS_PER_PLAN,
    blocking_failures,
    budgets,
    changes,
    clean_up,
    clean_up_times,
    is_settled,
    num_requested_pods,
)
from fluxtrain_operator.planner.faults import (
    exclusion_lifted,
    lift_times,
    new_faults,
    next_faults,
    next_retries,
    recovery_times,
    replacement_time,
)
from fluxtrain_operator.planner.groups import KEPT_BY_FINALIZERS, LABELS_CHANGED, release_deadline
from fluxtrain_operator.planner.guard import GRACE_SECONDS, Delete
from fluxtrain_operator.planner.observed import RESTORED, TERMINATING, CreateFailure, Observed
from fluxtrain_operator.planner.restarts import answer_deadline, new_losses, next_restarts
from fluxtrain_operator.planner.rules import decide, pending_deadline
from fluxtrain_operator.planner.situation import Decision, Situation
from fluxtrain_operator.planner.status import (
    FaultRecords,
    finished,
    finished_at,
    invalid_spec_status,
    next_status,
)
from fluxtrain_operator.planner.watchdog import (
    REPORTED_BY_AGENTS,
    has_stalled,
    no_answer_time,
    progress_deadline,
)
from fluxtrain_operator.resources.pods import pod_templates
from fluxtrain_operator.resources.support import revision_of
from fluxtrain_operator.resources.template import require_merge_keys

_STALE_SECONDS = 1.0
_REPORTED_ONLY = (
    *("NoAnswer", REPORTED_BY_AGENTS, "NodesUnknown", "UnhealthyGPUs", "UnhealthyNodes"),
    *("DisruptionLimited", LABELS_CHANGED, KEPT_BY_FINALIZERS),
)
"""Reasons of conditions that get an event, as the operator itself does nothing about them."""
_MIN_REQUEUE_SECONDS = 0.5
_SEEN_SECONDS = 5.0
"""Until the next look at whether the jobs that start after a complete one have seen it."""
EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True)
class Event:
    """A Kubernetes event to post."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: write the status, delete, create, post events.

    The status is written first, even an unchanged one if objects are deleted or created, and only over the
    version that was read: so no count is lost, and nothing is done for an outdated job. All other steps can
    be repeated.
    """

    status: Status
    delete: tuple[Delete, ...] = ()
    create: tuple[Manifest, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds after which to plan again if nothing changes."""
    decision: Decision | None = None
    """Why, for the log; None for a job that has finished or is rejected."""
    first_step_time: float | None = None
    """Unix time of the first step of the processes that reported last, for the metrics; None if unknown."""


def load(
    manifest: Mapping[str, Any],
    default_image: str,
    rendezvous_image: str = "",
    pod_defaults: PodDefaults = NO_DEFAULTS,
    policy: JobPolicy | None = None,
    network_rules: NetworkRules = NO_RULES,
) -> Job:
    """Return the job in ``manifest`` with these settings of the operator, and its pods.

    Raises ConfigError for a spec of which no pod can be made, NotPermittedError for one that ``policy`` does
    not permit, and UnreadableError for any other error: no job can stop the operator.
    """
    try:
        job = replace(
            Job.from_object(manifest, default_image),
            rendezvous_image=rendezvous_image,
            pod_defaults=pod_defaults,
            network_rules=network_rules,
        )
        if policy is not None:
            require_permitted(manifest, policy)
        require_merge_keys(job.spec.pod_template.written)
        templates = pod_templates(job)
        job = replace(job, pod_templates=templates, spec_revision=revision_of(job, templates))
    except ConfigError:
        raise
    except Exception as error:
        text = f"this operator cannot read it: {type(error).__name__}: {error}"
        raise UnreadableError("spec", UNSET, text) from error
    return job


def revision_to_read(job: Job, observed: Observed, now: float) -> str | None:
    """Return the name of the job's revision, if it is not the one that this operator makes of the spec."""
    name = Situation.of(job, observed, now).revision_name
    return None if name == job.spec_revision.name else name


def revision_of_pods(job: Job, observed: Observed, now: float) -> Revision:
    """Return what new pods of the job are made from."""
    return Situation.of(job, observed, now).revision


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """Return what to do next for ``job``."""
    if job.deleting or not job.is_managed:
        return Plan(job.status)
    if finished(job.status):
        return _plan_finished(job, observed, now)
    before = Situation.of(job, observed, now)
    if before.stale:
        # the API server refuses it if the cache lags behind; if not, somebody has set the status back
        status = job.status.model_copy(update={"attempt": before.newest_attempt})
        return Plan(status, requeue_after=_STALE_SECONDS)
    decision = decide(before)
    attempt = before.attempt + (decision.action == "restart")
    attempt = max(1, attempt) if decision.action == "run" else attempt
    after = before.after(decision, attempt)
    delete, create = changes(after, decision)
    has_more = sum(manifest["kind"] == "Pod" for manifest in create) >= MAX_PODS_PER_PLAN
    failures = blocking_failures(after, decision)
    is_known = is_settled(after, failures)  # what is in the way is named at once
    reported = failures if is_known else ()
    num_requested = num_requested_pods(after, decision, create, delete)
    restarts = next_restarts(before, decision, after.attempt, delete)
    faults = new_faults(before, decision, delete)
    records = FaultRecords(
        node_faults=next_faults(before, faults),
        retries=next_retries(before, decision.action in ("run", "restart"), delete),
        exclusion_lifted=exclusion_lifted(before, delete),
    )
    status = next_status(after, decision, num_requested, reported, restarts, records)
    return Plan(
        status=status,
        delete=tuple(delete),
        create=tuple(create),
        events=(
            *_events(before, decision, status, delete),
            *_loss_events(before, decision),
            *_exclusion_events(before, faults),
            *_create_failure_events(before, reported),
        ),
        requeue_after=earliest(
            [
                _requeue_after(before, decision, status),
                _retry(failures, now),
                0.0 if has_more else None if is_known else _MIN_REQUEUE_SECONDS,
            ]
        ),
        decision=decision,
        first_step_time=before.report.first_step_time if before.report is not None else None,
    )


def plan_invalid(
    manifest: Mapping[str, Any], error: ConfigError, observed: Observed, now: float
) -> Plan:
    """Return the plan of a job that ``load`` rejected: report ``error``, and delete the job after its TTL.

    Its pods run on. Once all have ended it needs no disruption budget: none is replaced.
    """
    metadata, before = manifest["metadata"], read_status(manifest.get("status"))
    status = invalid_spec_status(before, metadata.get("generation", 1), error, now)
    lifecycle = manifest.get("spec", {}).get("lifecycle")
    ttl = lifecycle.get("ttlSecondsAfterFinished") if isinstance(lifecycle, dict) else None
    expiry = _plan_expiry(metadata["name"], metadata.get("uid", ""), status, ttl, now)
    is_empty = all(pod.ended for pod in observed.pods)
    return replace(expiry, delete=(*expiry.delete, *(budgets(observed) if is_empty else ())))


def _plan_finished(job: Job, observed: Observed, now: float) -> Plan:
    """Return the plan of a finished job: clean up its pods, and delete it after its TTL."""
    ttl = job.spec.lifecycle.ttl_seconds_after_finished
    status = job.status.model_copy(update={"observed_generation": job.generation})
    expiry = _plan_expiry(job.name, job.uid, status, ttl, now)
    if expiry.delete and observed.is_awaited:
        expiry = Plan(status, requeue_after=_SEEN_SECONDS)
    if expiry.delete:
        return expiry
    situation = Situation(job, observed, now, job.status.attempt)
    wait = earliest(time - now for time in clean_up_times(situation) if time > now)
    return replace(
        expiry,
        delete=tuple(clean_up(situation)),
        requeue_after=earliest([expiry.requeue_after, wait]),
    )


def _plan_expiry(name: str, uid: str, status: Status, ttl: object, now: float) -> Plan:
    """Return the plan that deletes a finished job ``ttl`` seconds after its end."""
    end = finished_at(status)
    if end is None or not isinstance(ttl, int):
        return Plan(status)
    if now >= end + ttl:
        return Plan(status, delete=(Delete(KIND, name, uid),))
    return Plan(status, requeue_after=max(_MIN_REQUEUE_SECONDS, end + ttl - now))


def _requeue_after(situation: Situation, decision: Decision, status: Status) -> float | None:
    """Return the seconds until time alone changes the plan."""
    now, lifecycle = situation.now, situation.job.spec.lifecycle
    times = [decision.requeue_time]
    if decision.action in ("run", "restart", "hold"):
        times += [replacement_time(situation, f) for f in situation.failures]
        times += [progress_deadline(situation), no_answer_time(situation)]
        times += [answer_deadline(situation), release_deadline(situation)]
        times += [situation.rendezvous_deadline, situation.guard.recheck_time]
        times += [*recovery_times(situation), *lift_times(situation)]
        times += [now + GRACE_SECONDS] if has_stalled(situation) else []
        rendezvous = situation.observed.rendezvous
        pods = [*situation.observed.pods, *([rendezvous] if rendezvous else [])]
        times += [*map(situation.deletion_timeout, pods)]
        start, limit = seconds(status.active_since), lifecycle.active_deadline_seconds
        times.append(start + limit if start is not None and limit is not None else None)
        times.append(pending_deadline(situation, start))
    if decision.action in ("complete", "fail"):
        ttl = lifecycle.ttl_seconds_after_finished
        times += [None if ttl is None else now + ttl, *clean_up_times(situation)]
    next_time = earliest(time for time in times if time is None or time > now)
    return None if next_time is None else max(_MIN_REQUEUE_SECONDS, next_time - now)


def _events(
    situation: Situation, decision: Decision, status: Status, deleted: list[Delete]
) -> Iterator[Event]:
    before = situation.job.status
    if decision.action == "restart":
        kind: EventType = "Warning" if decision.uses_restart else "Normal"
        yield Event(kind, decision.reason, f"attempt {status.attempt}: {decision.message}")
    elif decision.in_place_restart is not None:
        text = f"all processes restart in place: {decision.message}"
        yield Event("Warning", decision.reason, text)
    elif status.phase != before.phase:
        kind = "Warning" if status.phase in ("Failed", "Restarting") else "Normal"
        yield Event(kind, str(status.phase), decision.message or f"was {before.phase or 'new'}")
    reasons = {condition.type: condition.reason for condition in before.conditions}
    for condition in status.conditions:
        changed = condition.reason != reasons.get(condition.type)
        if changed and condition.reason in _REPORTED_ONLY:
            yield Event("Warning", condition.reason, condition.message)
    deleted_uids = {delete.uid for delete in deleted}
    for failure in situation.failures:
        if failure.pod.uid in deleted_uids and decision.action == "run":
            yield Event("Warning", failure.reason, f"{failure.message}; replaced")
    for pod in situation.current:
        if situation.unreachable(pod) and pod.uid in deleted_uids and not pod.deleting:
            yield Event("Warning", "NodeLost", f"{situation.loss_of(pod)}; replaced")


def _loss_events(situation: Situation, decision: Decision) -> Iterator[Event]:
    """Yield an event for each pod that others have disrupted."""
    for pod, reason in new_losses(situation, decision, ()):
        where = f" on {pod.node}" if pod.node else ""
        yield Event("Warning", reason, f"{pod.name}{where}: {pod.disruption_message}")


def _exclusion_events(situation: Situation, faults: list[NodeFault]) -> Iterator[Event]:
    """Yield an event for each node that is excluded from now on."""
    for fault in faults:
        known = Fault(fault.node, fault.reason, seconds(fault.time) or 0.0)
        if situation.observed.distrust.would_exclude(known):
            message = f"{fault.node}: {fault.reason}, after other faults: new pods go elsewhere"
            yield Event("Warning", "NodeExcluded", message)


def _create_failure_events(
    situation: Situation, failures: tuple[CreateFailure, ...]
) -> Iterator[Event]:
    """Yield an event for the first failure, unless a condition has its reason already."""
    reported = {condition.reason for condition in situation.job.status.conditions}
    for failure in failures[:1]:
        if failure.reason not in reported:
            kind: EventType = "Normal" if failure.reason in (TERMINATING, RESTORED) else "Warning"
            yield Event(kind, failure.reason, failure.message)


def _retry(failures: tuple[CreateFailure, ...], now: float) -> float | None:
    """Return the seconds until the next failed object is created again."""
    time = earliest(f.retry_time for f in failures if now < f.retry_time < math.inf)
    return None if time is None else max(_MIN_REQUEUE_SECONDS, time - now)
