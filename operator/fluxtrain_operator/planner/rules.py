"""The planner's rules in order: the first that applies decides what happens to the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from fluxtrain.contract.process import PROCESS_FAILED
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.planner.faults import replacement_time
from fluxtrain_operator.planner.groups import (
    FAILED,
    awaited_predecessors,
    has_ended,
    members_before,
    predecessor_state,
    survives_restart,
)
from fluxtrain_operator.planner.guard import (
    EVICTED,
    HARDWARE_CODES,
    INIT_CONTAINER_FAILED,
    OUT_OF_MEMORY,
    PROBE_FAILED,
    START_ERROR,
    Failure,
    Reason,
)
from fluxtrain_operator.planner.restarts import (
    answer_deadline,
    is_unanswered,
    needs_all_pods,
    new_failures,
    next_in_place_restart,
    next_pod_replacement,
)
from fluxtrain_operator.planner.situation import (
    RUN,
    Decision,
    Situation,
    fail,
    restart_all,
    restarts_exhausted,
)
from fluxtrain_operator.planner.watchdog import has_stalled, stall_message

# The planner's rules for failures of the program: pods are replaced, all pods restart, or the job
# fails.


def program_failed(situation: Situation) -> Decision | None:
    """Fail the job after a program's failure that no restart fixes, or beyond the budget.

    Else restart all pods, if it does not suffice to replace those that failed, see `failed_pods`.
    """
    for failure in situation.program_failures:
        if not _is_restarted(situation, failure):
            return _with_exit(fail(failure.reason, failure.message), failure)
    new = new_failures(situation)
    if new and (exhausted := restarts_exhausted(situation, new[0].message)):
        return _with_exit(exhausted, new[0])
    if not needs_all_pods(situation):
        return None
    failure = (*new, *situation.program_failures)[0]
    line, time = failure.error_line, replacement_time(situation, failure)
    if situation.now < time:
        message = f"{failure.message}; starts again at {stamp(time)}"
        return Decision("hold", failure.reason, message, error_line=line, requeue_time=time)
    return Decision(
        "restart",
        failure.reason,
        failure.message,
        uses_restart=bool(new),
        error_line=line,
        cause=Reason.PROGRAM_FAILED,
        keeps_group=survives_restart(situation),
    )


def processes_failed(situation: Situation) -> Decision | None:
    """Fail the job after an error of processes that agents have restarted, but that must not be restarted."""
    if EXIT_ERROR in situation.job.spec.restart.on_exit_codes:
        return None
    new = situation.new_process_restarts
    failed = next((restart for restart in new if restart.cause == PROCESS_FAILED), None)
    if failed is None:
        return None
    pod = next((pod.name for pod in situation.current if pod.uid == failed.pod), "")
    where = f"{pod}: " if pod else ""
    message = f"{where}a process ended with exit code {EXIT_ERROR}, not in spec.restart.onExitCodes"
    return replace(fail("ProgramError", message), exit_code=EXIT_ERROR)


def failed_pods(situation: Situation) -> Decision | None:
    """Replace the pods in which the program failed; the others keep their pods and regroup from memory.

    Failures at one end of the program use one restart.
    """
    replacement, new = next_pod_replacement(situation), new_failures(situation)
    if replacement is None or answer_deadline(situation) is not None:
        return None
    failure = (*new, *situation.program_failures)[0]
    if new and situation.now < min(replacement_time(situation, failure) for failure in new):
        return None
    return Decision(
        "run",
        failure.reason,
        failure.message,
        uses_restart=bool(new),
        error_line=failure.error_line,
        pod_replacement=replacement,
    )


def _is_restarted(situation: Situation, failure: Failure) -> bool:
    """Return whether a restart may help: also after signals of the hardware, or if it has started before."""
    code, progress = failure.pod.exit_code, situation.progress
    if failure.reason == START_ERROR:
        return progress is not None and progress.step > 0
    is_named = code in situation.job.spec.restart.on_exit_codes or code in HARDWARE_CODES
    return is_named or failure.reason in _CHARGED_REASONS


def _with_exit(decision: Decision, failure: Failure) -> Decision:
    return replace(decision, exit_code=failure.pod.exit_code, error_line=failure.error_line)


_FINISHING_SECONDS = 30.0  # agents wait 10 s for each other when their trainers exit
_STALLED_GRACE_SECONDS = 30  # stalled processes write no checkpoint


Rule = Callable[[Situation], Decision | None]
_CHARGED_REASONS = (OUT_OF_MEMORY, INIT_CONTAINER_FAILED, EVICTED, PROBE_FAILED)
"""Failures of the program that use a restart, whatever its exit code is."""


def decide(situation: Situation) -> Decision:
    """Return the decision of the first rule that applies; RUN if none does."""
    decisions = (rule(situation) for rule in RULES)
    return next((decision for decision in decisions if decision is not None), RUN)


def succeeded(situation: Situation) -> Decision | None:
    """Complete the job once a pod has succeeded and no program has failed.

    All ranks exit together: the other pods are about to exit, or are replacements that joined too late. A
    pod that is stopped before the end of the run does not exit with 0, so it may be deleted meanwhile.
    """
    done = [pod for pod in situation.current if pod.succeeded]
    if not done or situation.program_failures:
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
    return fail("DeadlineExceeded", f"active for more than {limit} s")


def pending_deadline(situation: Situation, start: float | None) -> float | None:
    """Return the Unix time at which a job that has never run fails; None without such a limit.

    ``start`` is since when the job has been active. Nodes run only with the rendezvous pod; one that ends
    again and again counts as one that has not run.
    """
    limit = situation.job.spec.lifecycle.pending_deadline_seconds
    num_started = sum(pod.started is not None for pod in situation.observed.pods)
    has_run = situation.progress is not None or (num_started and not situation.lacks_rendezvous)
    phases = (None, "Pending", *(["Starting"] if situation.rendezvous_problem else []))
    is_new = situation.attempt <= 1 and situation.job.status.phase in phases
    if limit is None or start is None or has_run or not is_new:
        return None
    return start + limit


def pending_deadline_exceeded(situation: Situation) -> Decision | None:
    """Fail a job that has not run for ``pendingDeadlineSeconds`` since it was admitted."""
    deadline = pending_deadline(situation, situation.active_since)
    if deadline is None or situation.now < deadline:
        return None
    limit = situation.job.spec.lifecycle.pending_deadline_seconds
    if situation.has_min_nodes:
        who, problem = "the rendezvous pod has not", situation.rendezvous_problem
    else:
        waiting = (pod.wait_reason for pod in situation.current if pod.cannot_start)
        refused = ((f.reason, f.message) for f in situation.observed.create_failures)
        who, problem = "no node has", next(chain(waiting, refused), None)
    text = f"{who} run for {limit} s{f'; {problem[1]}' if problem else ''}"
    return fail("PendingDeadlineExceeded", text)


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
    return fail("RestartsExhausted", message)


def waiting_for_jobs(situation: Situation) -> Decision | None:
    """Wait with the first attempt until all jobs of ``startAfter`` are complete."""
    if situation.attempt > 0:
        return None
    phases, names = situation.observed.predecessors, awaited_predecessors(situation)
    if not names:
        return None
    if situation.observed.cycle:
        text = f"{' starts after '.join(situation.observed.cycle)}: none of them can start"
        return Decision("wait", "CyclicDependency", f"spec.lifecycle.startAfter: {text}")
    states = [predecessor_state(name, phases.get(name)) for name in names]
    failed = any(phases.get(name) == FAILED for name in names)
    reason = "WaitingForFailedJobs" if failed else "WaitingForJobs"
    return Decision("wait", reason, f"spec.lifecycle.startAfter: {'; '.join(states)}")


def resumed(situation: Situation) -> Decision | None:
    """Start a new attempt of a job that was suspended."""
    if situation.job.status.phase != "Suspended" or situation.attempt == 0:
        return None
    return restart_all(Reason.RESUMED, "spec.lifecycle.suspend is false")


def spec_changed(situation: Situation) -> Decision | None:
    """Restart the gang if pods were created for another spec: all agents and ranks must agree."""
    for pod in (*situation.active, *members_before(situation)):
        if not situation.matches_spec(pod):
            return restart_all(Reason.SPEC_CHANGED, "the pods take over the changed spec")
        if not situation.queueing.fits(pod.nodes[1], situation.job.spec.nodes.max):
            message = f"Kueue's group was created for {pod.nodes[1]} nodes"
            return restart_all(Reason.SCALED, message)
    return None


def revision_changed(situation: Situation) -> Decision | None:
    """Restart the gang if pods of another revision need a new pod: it cannot join them.

    The revision of such pods was lost while another version of the operator took over. If they train
    undisturbed, they go on.
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
    return restart_all(Reason.REVISION_CHANGED, message)


def group_ended(situation: Situation) -> Decision | None:
    """Queue the pods again, as another group, if Kueue has evicted them or its group has ended.

    Kueue ends a group with its last pod, and admits none after that.
    """
    if not has_ended(situation):
        return None
    for failure in situation.failures:
        time = replacement_time(situation, failure)
        if situation.now < time:
            message = f"{failure.message}; queued again at {stamp(time)}"
            return Decision("hold", failure.reason, message, requeue_time=time)
    message = f"{len(situation.active)} pods are left of Kueue's group; another is queued"
    return restart_all(Reason.GROUP_ENDED, message)


def no_progress(situation: Situation) -> Decision | None:
    """Restart a job that has stalled; that uses a restart, as it may stall again.

    First the processes inside the pods; all pods if that did not happen, which uses no other restart, or did
    not help.
    """
    if not has_stalled(situation) or situation.guard.refusal(Reason.NO_PROGRESS):
        return None
    message = stall_message(situation)
    gang = replace(
        restart_all(Reason.NO_PROGRESS, message),
        grace_seconds=_STALLED_GRACE_SECONDS,
        keeps_group=survives_restart(situation),
    )
    if is_unanswered(situation):
        return gang
    if exhausted := restarts_exhausted(situation, message):
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
    processes_failed,
    restarts_exceeded,
    waiting_for_jobs,
    resumed,
    spec_changed,
    revision_changed,
    group_ended,
    failed_pods,
    no_progress,
)
