"""The planner's rules for failures of the program: pods are replaced, all pods restart, or the job fails."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.contract.members import PROCESS_FAILED
from fluxtrain.errors import EXIT_ERROR
from fluxtrain_operator.planner.backoff import replacement_time
from fluxtrain_operator.planner.decision import Decision, fail, restart_all, restarts_exhausted
from fluxtrain_operator.planner.disruption import Reason
from fluxtrain_operator.planner.failures import (
    HARDWARE_CODES,
    INIT_CONTAINER_FAILED,
    OUT_OF_MEMORY,
    START_ERROR,
    Failure,
)
from fluxtrain_operator.planner.pod_group import survives_restart
from fluxtrain_operator.planner.pod_replacement import (
    answer_deadline,
    has_stepped_since,
    is_closed,
    needs_all_pods,
    new_failures,
    next_pod_replacement,
)
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.timestamps import stamp


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
    told = situation.new_process_restarts
    failed = next((restart for restart in told if restart.cause == PROCESS_FAILED), None)
    if failed is None:
        return None
    pod = next((pod.name for pod in situation.current if pod.uid == failed.pod), "")
    where = f"{pod}: " if pod else ""
    message = f"{where}a process ended with exit code {EXIT_ERROR}, not in spec.restart.onExitCodes"
    return replace(fail("ProgramError", message), exit_code=EXIT_ERROR)


def rendezvous_closed(situation: Situation) -> Decision | None:
    """Restart the gang if an agent whose failure is not observed any more has closed the rendezvous for all.

    Only those of older images do; another generation never forms. If its pod was replaced, its failure was
    charged, unless steps were made since; if it was deleted, it does not count.
    """
    if not is_closed(situation):
        return None
    last = situation.pod_replacement
    alive = situation.observed.heard.alive
    if last is None and any(pod.uid not in alive for pod in situation.running):
        return None  # the pod of that agent may end only now
    message = "an agent has closed the rendezvous"
    uses_restart = last is not None and has_stepped_since(situation, last)
    if uses_restart and (exhausted := restarts_exhausted(situation, message)):
        return exhausted
    return replace(
        restart_all(Reason.PROGRAM_FAILED, message),
        uses_restart=uses_restart,
        keeps_group=survives_restart(situation),
    )


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
    return is_named or failure.reason in (OUT_OF_MEMORY, INIT_CONTAINER_FAILED)


def _with_exit(decision: Decision, failure: Failure) -> Decision:
    return replace(decision, exit_code=failure.pod.exit_code, error_line=failure.error_line)
