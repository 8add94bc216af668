"""Decision: what happens to a job, and why; the rules return it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fluxtrain.contract.resource.status import InPlaceRestart, PodReplacement
from fluxtrain_operator.planner.disruption import Reason
from fluxtrain_operator.planner.situation import Situation


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
    pod_replacement: PodReplacement | None = None
    """The replacement of the pods in which the program failed, if ``run`` includes one."""
    keeps_group: bool = False
    """Whether the pods of a ``restart`` join Kueue's group of those before."""


RUN = Decision("run")


def restart_all(cause: Reason, message: str) -> Decision:
    """Return the restart of all pods, which uses no restart of the budget."""
    return Decision("restart", str(cause), message, cause=cause)


def fail(reason: str, message: str) -> Decision:
    """Return the end of the job with ``reason``."""
    return Decision("fail", reason, message, cause=Reason.JOB_ENDED)


def restarts_exhausted(situation: Situation, message: str) -> Decision | None:
    """Return the end of a job whose budget has no restart left; None if it has one."""
    limit = situation.job.spec.restart.max_restarts
    if situation.charged_restarts < limit:
        return None
    return fail("RestartsExhausted", f"{message}; {limit} restarts are used up")
