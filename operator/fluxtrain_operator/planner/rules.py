"""The planner's rules in order: the first that applies decides what happens to the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from fluxtrain.contract.resource.status import InPlaceRestart, Restarts
from fluxtrain.errors import EXIT_OK
from fluxtrain_operator.planner.backoff import num_failures
from fluxtrain_operator.planner.disruption import Reason
from fluxtrain_operator.planner.failures import OUT_OF_MEMORY, Failure, retry_time
from fluxtrain_operator.planner.in_place import (
    is_unanswered,
    next_in_place_restart,
)
from fluxtrain_operator.planner.predecessors import (
    FAILED,
    awaited_predecessors,
    predecessor_state,
)
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.planner.watchdog import has_stalled, stall_message
from fluxtrain_operator.timestamps import stamp

_FINISHING_SECONDS = 30.0  # agents wait 10 s for each other when their trainers exit
_STALLED_GRACE_SECONDS = 30  # stalled processes write no checkpoint


@dataclass(frozen=True)
class Decision:
    """What happens to the job, and why."""

    action: Literal["run", "restart", "hold", "wait", "suspend", "complete", "fail"]
    """``hold`` changes nothing, ``wait`` creates nothing yet, ``restart`` restarts the gang."""
    reason: str = ""
    """For machines, in CamelCase."""
    message: str = ""
    """For people."""
    uses_restart: bool = False
    """Whether a restart counts towards ``restart.maxRestarts``."""
    exit_code: int | None = None
    error_line: str = ""
    cause: Reason = Reason.PREVIOUS_ATTEMPT
    """Why pods are deleted, if any are."""
    grace_seconds: int | None = None
    """Grace period of the deleted pods; None: that of their spec."""
    requeue_time: float | None = None
    """Unix time at which to plan again."""
    in_place_restart: InPlaceRestart | None = None
    """The restart of all processes inside the living pods, if ``run`` includes one."""


RUN = Decision("run")
Rule = Callable[[Situation], Decision | None]


def decide(situation: Situation) -> Decision:
    """Return the decision of the first rule that applies; RUN if none does."""
    decisions = (rule(situation) for rule in RULES)
    return next((decision for decision in decisions if decision is not None), RUN)


def succeeded(situation: Situation) -> Decision | None:
    """Complete the job once a pod has succeeded and no program has failed.

    All ranks exit together: the other pods are about to exit, or are replacements that joined too late.
    """
    done = [pod for pod in situation.current if pod.succeeded and not pod.deleting]
    if not done or _program_failure(situation) is not None:
        return None
    deadline = min(pod.finished or pod.created for pod in done) + _FINISHING_SECONDS
    if situation.running and situation.now < deadline:
        message = "the other pods are about to end"
        return Decision("hold", "Finishing", message, requeue_time=deadline)
    return Decision(
        "complete", "Succeeded", "the run is over", cause=Reason.JOB_ENDED, exit_code=EXIT_OK
    )


def suspended(situation: Situation) -> Decision | None:
    """Suspend the job if its spec asks for it."""
    if not situation.job.spec.lifecycle.suspend:
        return None
    return Decision(
        "suspend", "Suspended", "spec.lifecycle.suspend is true", cause=Reason.SUSPENDED
    )


def deadline_exceeded(situation: Situation) -> Decision | None:
    """Fail a job that has been active for longer than ``activeDeadlineSeconds``."""
    limit = situation.job.spec.lifecycle.active_deadline_seconds
    start = situation.active_since
    if limit is None or start is None or situation.now < start + limit:
        return None
    return _fail("DeadlineExceeded", f"active for more than {limit} s")


def pending_deadline(situation: Situation) -> float | None:
    """Return the Unix time at which a job of which no node has run fails; None without such a limit."""
    limit = situation.job.spec.lifecycle.pending_deadline_seconds
    start = situation.active_since
    has_run = situation.progress is not None or any(pod.started for pod in situation.observed.pods)
    is_new = situation.attempt <= 1 and situation.job.status.phase in (None, "Pending")
    if limit is None or start is None or has_run or not is_new:
        return None
    return start + limit


def pending_deadline_exceeded(situation: Situation) -> Decision | None:
    """Fail a job of which no node has run for ``pendingDeadlineSeconds`` since it was admitted."""
    deadline = pending_deadline(situation)
    if deadline is None or situation.now < deadline:
        return None
    limit = situation.job.spec.lifecycle.pending_deadline_seconds
    return _fail("PendingDeadlineExceeded", f"no node has run for {limit} s")


def program_failed(situation: Situation) -> Decision | None:
    """Restart the gang after a program's failure, if its exit code and the budget allow it; else fail.

    The whole gang: an agent that exits with an error closes the rendezvous for all.
    """
    failure = _program_failure(situation)
    if failure is None:
        return None
    is_restarted = failure.pod.exit_code in situation.job.spec.restart.on_exit_codes
    if not (is_restarted or failure.reason == OUT_OF_MEMORY):
        return _with_exit(_fail(failure.reason, failure.message), failure)
    if exhausted := _restarts_exhausted(situation, failure.message):
        return _with_exit(exhausted, failure)
    line, time = failure.error_line, retry_time(failure, num_restarts(situation, failure))
    if situation.now < time:
        message = f"{failure.message}; starts again at {stamp(time)}"
        return Decision("hold", failure.reason, message, error_line=line, requeue_time=time)
    return Decision(
        "restart",
        failure.reason,
        failure.message,
        uses_restart=True,
        error_line=line,
        cause=Reason.PROGRAM_FAILED,
    )


def restarts_exceeded(situation: Situation) -> Decision | None:
    """Fail a job whose processes were restarted more often than ``maxRestarts`` allows.

    Each agent has the budget of its pod's creation, so that several can use more than there is.
    """
    limit, used = situation.job.spec.restart.max_restarts, situation.charged_restarts
    if used <= limit or not situation.new_process_restarts:
        return None
    newest = situation.new_process_restarts[-1]
    where = next((pod for pod in situation.current if pod.uid == newest.pod), None)
    place = f" in {where.name} on {where.node}" if where else ""
    message = f"{newest.cause}{place}; {limit} restarts are used up"
    return _fail("RestartsExhausted", message)


def waiting_for_jobs(situation: Situation) -> Decision | None:
    """Wait with the first attempt until all jobs of ``startAfter`` are complete."""
    if situation.attempt > 0:
        return None
    phases, names = situation.observed.predecessors, awaited_predecessors(situation)
    if not names:
        return None
    states = [predecessor_state(name, phases.get(name)) for name in names]
    failed = any(phases.get(name) == FAILED for name in names)
    reason = "WaitingForFailedJobs" if failed else "WaitingForJobs"
    return Decision("wait", reason, f"spec.lifecycle.startAfter: {'; '.join(states)}")


def resumed(situation: Situation) -> Decision | None:
    """Start a new attempt of a job that was suspended."""
    if situation.job.status.phase != "Suspended" or situation.attempt == 0:
        return None
    return _restart(Reason.RESUMED, "spec.lifecycle.suspend is false")


def spec_changed(situation: Situation) -> Decision | None:
    """Restart the gang if pods were created for another spec: all agents and ranks must agree."""
    for pod in situation.active:
        if not situation.matches_spec(pod):
            return _restart(Reason.SPEC_CHANGED, "the pods take over the changed spec")
        if not situation.queueing.fits(pod.nodes[1], situation.job.spec.nodes.max):
            message = f"Kueue's group was created for {pod.nodes[1]} nodes"
            return _restart(Reason.SCALED, message)
    return None


def revision_changed(situation: Situation) -> Decision | None:
    """Restart the gang if pods of another revision need a new pod: it cannot join them.

    Such pods were created by an operator without revisions, or their revision was lost while another version
    of the operator took over. If they train undisturbed, they go on.
    """
    agents, rendezvous = situation.active, situation.observed.rendezvous
    if not any(map(situation.has_other_revision, agents)):
        return None
    peers = [*agents, *([rendezvous] if rendezvous and not rendezvous.deleting else [])]
    same = len({peer.revision for peer in peers}) == 1 and not any(
        map(situation.unreachable, peers)
    )
    nodes = situation.job.spec.nodes
    sized = all(agent.nodes == (nodes.min, nodes.max) for agent in agents)
    if same and sized and len(peers) == nodes.max + 1:
        return None
    message = "a new pod cannot join those of another revision"
    return _restart(Reason.REVISION_CHANGED, message)


def group_ended(situation: Situation) -> Decision | None:
    """Queue the pods again, as another group, if Kueue has evicted them or its group has ended.

    Kueue ends a group with its last pod, and admits none after that.
    """
    left = [pod for pod in situation.active if not situation.queueing.is_never_admitted(pod)]
    need = situation.queueing.min_pods(situation.job, bool(situation.lost_members))
    if not situation.current or len(left) >= need:
        return None
    for failure in situation.failures:
        time = retry_time(failure, num_restarts(situation, failure))
        if situation.now < time:
            message = f"{failure.message}; queued again at {stamp(time)}"
            return Decision("hold", failure.reason, message, requeue_time=time)
    message = f"{len(left)} pods are left of Kueue's group; another is queued"
    return _restart(Reason.GROUP_ENDED, message)


def no_progress(situation: Situation) -> Decision | None:
    """Restart a job that has stalled; that uses a restart, as it may stall again.

    First the processes inside the pods; all pods if that did not happen, which uses no other restart, or did
    not help.
    """
    if not has_stalled(situation) or situation.guard.refusal(Reason.NO_PROGRESS):
        return None
    message = stall_message(situation)
    gang = replace(_restart(Reason.NO_PROGRESS, message), grace_seconds=_STALLED_GRACE_SECONDS)
    if is_unanswered(situation):
        return gang
    if exhausted := _restarts_exhausted(situation, message):
        return exhausted
    if restart := next_in_place_restart(situation):
        reason = str(Reason.NO_PROGRESS)
        return Decision("run", reason, message, uses_restart=True, in_place_restart=restart)
    return replace(gang, uses_restart=True)


RULES: tuple[Rule, ...] = (
    succeeded,
    suspended,
    deadline_exceeded,
    pending_deadline_exceeded,
    program_failed,
    restarts_exceeded,
    waiting_for_jobs,
    resumed,
    spec_changed,
    revision_changed,
    group_ended,
    no_progress,
)


def _program_failure(situation: Situation) -> Failure | None:
    return next((f for f in situation.failures if not f.infrastructure), None)


def num_restarts(situation: Situation, failure: Failure) -> int:
    """Return how often the job was restarted for the reason of ``failure``; each has its own delays.

    Failures of the infrastructure count for each pod on its own, see `backoff`. Older operators counted all
    reasons together.
    """
    if failure.infrastructure:
        return num_failures(situation, failure)
    restarts = situation.job.status.restarts or Restarts()
    return restarts.gang if restarts.charged is None else restarts.causes.get(failure.reason, 0)


def _restarts_exhausted(situation: Situation, message: str) -> Decision | None:
    limit = situation.job.spec.restart.max_restarts
    if situation.charged_restarts < limit:
        return None
    return _fail("RestartsExhausted", f"{message}; {limit} restarts are used up")


def _restart(cause: Reason, message: str) -> Decision:
    return Decision("restart", str(cause), message, cause=cause)


def _fail(reason: str, message: str) -> Decision:
    return Decision("fail", reason, message, cause=Reason.JOB_ENDED)


def _with_exit(decision: Decision, failure: Failure) -> Decision:
    return replace(decision, exit_code=failure.pod.exit_code, error_line=failure.error_line)
