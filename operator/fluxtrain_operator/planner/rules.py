"""What is to become of a job: an ordered list of rules, the first that applies decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from fluxtrain.errors import EXIT_OK
from fluxtrain_operator.planner.failures import Failure, due_again
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation, since
from fluxtrain_operator.planner.watchdog import hangs
from fluxtrain_operator.timestamps import stamp

_COMPLETE, _FAILED = "Complete", "Failed"  # phases of the jobs that come before
_LEAVING_SECONDS = 30.0  # trainers end well together; their agents wait 10 s for each other
_HUNG_GRACE_SECONDS = 30  # processes that make no step leave no checkpoint either


@dataclass(frozen=True)
class Decision:
    """What happens to the job, and why."""

    action: Literal["run", "restart", "hold", "wait", "suspend", "complete", "fail"]
    """``hold``: leave everything as it is; ``wait``: begin later; ``restart``: the whole gang."""
    reason: str = ""
    """For machines, in CamelCase."""
    message: str = ""
    """For people."""
    charged: bool = False
    """Whether a restart counts against the budget."""
    exit_code: int | None = None
    error_line: str = ""
    grace_seconds: int | None = None
    """Grace of the pods that are deleted; None: their own."""
    due: float | None = None
    """Unix time at which to decide again."""


RUN = Decision("run")
Rule = Callable[[Situation], Decision | None]


def decide(situation: Situation) -> Decision:
    """Return what the first rule that applies says; to run, where none does."""
    for rule in RULES:
        decision = rule(situation)
        if decision is not None:
            return decision
    return RUN


def succeeded(situation: Situation) -> Decision | None:
    """The job is complete when a pod ended well and none of the others failed.

    All ranks leave together, so the others are about to end, or are too late: replacements of the lost.
    """
    done = [pod for pod in situation.current if pod.succeeded and not pod.deleting]
    if not done or _program_fault(situation) is not None:
        return None
    last_wait = min(pod.finished or pod.created for pod in done) + _LEAVING_SECONDS
    if situation.running and situation.now < last_wait:
        return Decision("hold", "Finishing", "the other pods are about to end", due=last_wait)
    return Decision("complete", "Succeeded", "the run is over", exit_code=EXIT_OK)


def suspended(situation: Situation) -> Decision | None:
    """A suspended job keeps no pods; they leave a checkpoint as they go."""
    if not situation.job.spec.lifecycle.suspend:
        return None
    return Decision("suspend", "Suspended", "spec.lifecycle.suspend is true")


def overdue(situation: Situation) -> Decision | None:
    """A job that has been active for too long fails."""
    limit = situation.job.spec.lifecycle.active_deadline_seconds
    start = since(situation.condition("Admitted"))
    if limit is None or start is None or situation.now < start + limit:
        return None
    return Decision("fail", "DeadlineExceeded", f"active for more than {limit} s")


def program_failed(situation: Situation) -> Decision | None:
    """The program's own error restarts the gang while the budget lasts, if its exit code is worth it.

    The gang, not the pod: an agent that gives up closes the rendezvous for all of them.
    """
    fault = _program_fault(situation)
    if fault is None:
        return None
    worth = fault.pod.exit_code in situation.job.spec.restart.on_exit_codes
    if not worth:
        return _with_traces(Decision("fail", fault.reason, fault.message), fault)
    if exhausted := _exhausted(situation, fault.message):
        return _with_traces(exhausted, fault)
    due = due_again(fault, situation.restarts.gang)
    if situation.now < due:
        text = f"{fault.message}; starts again at {stamp(due)}"
        return Decision("hold", fault.reason, text, error_line=fault.error_line, due=due)
    line = fault.error_line
    return Decision("restart", fault.reason, fault.message, charged=True, error_line=line)


def waits_for_others(situation: Situation) -> Decision | None:
    """A job that has not begun waits for the jobs that it comes after."""
    if situation.attempt > 0:
        return None
    before = situation.observed.jobs_before
    names = [
        name for name in situation.job.spec.lifecycle.start_after if before.get(name) != _COMPLETE
    ]
    if not names:
        return None
    told = [_how_it_is(name, before.get(name)) for name in names]
    failed = any(before.get(name) == _FAILED for name in names)
    reason = "WaitingForFailedJobs" if failed else "WaitingForJobs"
    return Decision("wait", reason, f"spec.lifecycle.startAfter: {'; '.join(told)}")


def resumed(situation: Situation) -> Decision | None:
    """A job that was suspended goes on in a new attempt."""
    if situation.job.status.phase != "Suspended" or situation.attempt == 0:
        return None
    return Decision("restart", "Resumed", "spec.lifecycle.suspend is false")


def outdated(situation: Situation) -> Decision | None:
    """Pods made for another spec are replaced together: agents must agree, and so must ranks."""
    for pod in situation.kept:
        if not situation.job.is_made_for(pod.spec_hash):
            return Decision("restart", "SpecChanged", "the pods take over the changed spec")
        if not _fits(pod, situation):
            low, high = pod.nodes
            text = f"the agents were started for {low} to {high} nodes"
            return Decision("restart", "Scaled", text)
    return None


def out_of_its_group(situation: Situation) -> Decision | None:
    """A job whose pods Kueue has sent away, or that are over, is queued anew: in another group.

    Kueue ends a group with its last pod, and admits none that comes later. A group with lost pods goes on
    as long as the others are enough.
    """
    left = [pod for pod in situation.kept if not pod.too_late]
    need = situation.job.spec.nodes.min if situation.counted_by_queue else 1
    queued = situation.job.spec.scheduling.queue_name is not None
    if not queued or not situation.current or len(left) >= need:
        return None
    for fault in situation.faults:
        if situation.now < (due := due_again(fault, 0)):
            text = f"{fault.message}; queued again at {stamp(due)}"
            return Decision("hold", fault.reason, text, due=due)
    text = f"{len(left)} pods are left of Kueue's group; another is queued"
    return Decision("restart", "GroupEnded", text)


def makes_no_progress(situation: Situation) -> Decision | None:
    """A job without a step for too long is restarted; that counts, or a hang would repeat for ever."""
    if not hangs(situation):
        return None
    last = situation.last_step
    text = "no step yet" if last is None else f"no step since {stamp(last)}"
    if exhausted := _exhausted(situation, text):
        return exhausted
    return Decision("restart", "NoProgress", text, charged=True, grace_seconds=_HUNG_GRACE_SECONDS)


RULES: tuple[Rule, ...] = (
    succeeded,
    suspended,
    overdue,
    program_failed,
    waits_for_others,
    resumed,
    outdated,
    out_of_its_group,
    makes_no_progress,
)


def _how_it_is(name: str, phase: str | None) -> str:
    if phase is None:
        return f"{name} does not exist"
    way_out = "; create it anew, or take it out of spec.lifecycle.startAfter"
    return f"{name} is {phase or 'new'}{way_out if phase == _FAILED else ''}"


def _fits(pod: Pod, situation: Situation) -> bool:
    """Return whether the agent in ``pod`` can meet the others.

    Agents with different maxima never agree on a complete rendezvous. One maximum that is too large for
    all is fine: it is how a job shrinks. Kueue, though, counts the pods of a group.
    """
    low, high = pod.nodes
    nodes = situation.job.spec.nodes
    queued = situation.job.spec.scheduling.queue_name is not None
    return low == nodes.min and (high == nodes.max if queued else high >= nodes.max)


def _program_fault(situation: Situation) -> Failure | None:
    return next((fault for fault in situation.faults if not fault.infrastructure), None)


def _exhausted(situation: Situation, text: str) -> Decision | None:
    limit = situation.job.spec.restart.max_restarts
    if situation.restarts.gang < limit:
        return None
    return Decision("fail", "RestartsExhausted", f"{text}; {limit} restarts are used up")


def _with_traces(decision: Decision, fault: Failure) -> Decision:
    return replace(decision, exit_code=fault.pod.exit_code, error_line=fault.error_line)
