"""Why a pod ended, and whose fault it was: the infrastructure's, which is free, or the program's."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_USAGE,
)
from fluxtrain_operator.planner.observed import Pod

YOUNG_SECONDS = 60.0
"""A pod that ended sooner than this may well do so again: its replacement waits."""
_INFRASTRUCTURE_DELAY = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 10.0, 300.0
_LONGEST_LINE = 1024

_FROM_OUTSIDE = {137: "SIGKILL", 143: "SIGTERM"}
_OUT_OF_MEMORY = "OOMKilled"
_REASONS = {
    EXIT_ERROR: ("ProgramError", "the program failed"),
    EXIT_USAGE: ("InvalidJob", "the job's files or data are wrong"),
    EXIT_DIVERGED: ("Diverged", "the loss or its gradient is no longer finite"),
    EXIT_STORAGE: ("StorageError", "the output could not be written"),
}


@dataclass(frozen=True)
class Failure:
    """The end of one pod that did not end well."""

    pod: Pod
    infrastructure: bool
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people."""

    @property
    def error_line(self) -> str:
        """Return the last line that the container wrote before it ended."""
        lines = [line.strip() for line in self.pod.message.splitlines() if line.strip()]
        return lines[-1][:_LONGEST_LINE] if lines else ""


def failure_of(pod: Pod) -> Failure | None:
    """Return why ``pod`` failed; None where it has not, or where it is being deleted anyway."""
    if not pod.ended or pod.succeeded or pod.deleting:
        return None
    if pod.disrupted:
        return _infrastructure(pod, "Disrupted", pod.reason or "evicted or preempted")
    if pod.exit_code is None:  # kubelet never ran it, or lost it: rejected, evicted, node shut down
        return _infrastructure(pod, pod.reason or "PodLost", pod.message or "never ran")
    if pod.reason == _OUT_OF_MEMORY:
        return _program(pod, _OUT_OF_MEMORY, "out of memory")
    if pod.exit_code == EXIT_STOPPED:
        return _infrastructure(pod, "Stopped", "asked to stop; it left a checkpoint")
    if pod.exit_code in _FROM_OUTSIDE:
        return _infrastructure(pod, "Killed", f"{_FROM_OUTSIDE[pod.exit_code]} from outside")
    return _program(pod, *_REASONS.get(pod.exit_code, ("ProgramError", "the program failed")))


def due_again(fault: Failure, used: int) -> float:
    """Return the Unix time at which what failed may start again.

    At once after a long life, or for the program's first error; else later with each restart ``used``.
    """
    pod = fault.pod
    ended = pod.finished or pod.created
    if ended - (pod.started or ended) >= YOUNG_SECONDS:
        return ended
    if fault.infrastructure:
        return ended + _INFRASTRUCTURE_DELAY
    return ended + (min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(used - 1, 10)) if used else 0.0)


def _infrastructure(pod: Pod, reason: str, text: str) -> Failure:
    return Failure(pod, True, _camel(reason), f"{pod.name}: {text}")


def _program(pod: Pod, reason: str, text: str) -> Failure:
    fault = Failure(pod, False, _camel(reason), f"{pod.name}: exit code {pod.exit_code}, {text}")
    line = fault.error_line
    return Failure(pod, False, fault.reason, f"{fault.message}: {line}" if line else fault.message)


def _camel(reason: str) -> str:
    """Return ``reason`` as a condition's reason may be; kubelet's are, and some are not."""
    kept = "".join(c for c in reason if c.isascii() and c.isalnum())[:128]
    return kept if kept[:1].isalpha() else f"Pod{kept}"
