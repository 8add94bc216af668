"""Why a pod failed, and whether that counts against the restart budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_UNFIT,
    EXIT_USAGE,
)
from fluxtrain_operator.planner.observed import Pod

SHORT_LIVED_SECONDS = 60.0
"""A pod that failed sooner after its start is restarted with a delay."""
_MIN_DELAY, _MAX_DELAY = 10.0, 300.0
_MAX_LINE = 1024

_SIGNALS = {137: "SIGKILL", 143: "SIGTERM"}
UNFIT_NODE = "UnfitNode"
"""The preflight found the node of a pod too slow."""
START_ERROR = "StartError"
"""The container runtime could not start the main container: the image is wrong, or a device is gone."""
INIT_CONTAINER_FAILED = "InitContainerFailed"
HARDWARE_CODES = (128 + 4, 128 + 7, 128 + 11)
"""SIGILL, SIGBUS, SIGSEGV."""
_START_ERRORS = (START_ERROR, "ContainerCannotRun")  # of containerd and of others
OUT_OF_MEMORY = "OOMKilled"
"""The kubelet's reason; a restart, on another node or from a snapshot, may need less memory."""
_REASONS = {
    EXIT_ERROR: ("ProgramError", "the program failed"),
    EXIT_USAGE: ("InvalidJob", "the job's files or data are wrong"),
    EXIT_DIVERGED: ("Diverged", "the loss or its gradient is no longer finite"),
    EXIT_STORAGE: ("StorageError", "the output could not be written"),
}


@dataclass(frozen=True)
class Failure:
    """The failure of one pod."""

    pod: Pod
    infrastructure: bool
    """Whether the infrastructure failed, which costs no restart; else the program did."""
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people."""

    @property
    def is_short_lived(self) -> bool:
        """Return whether the pod failed soon after its start, or never started."""
        ended = self.pod.finished or self.pod.created
        return ended - (self.pod.started or ended) < SHORT_LIVED_SECONDS

    @property
    def error_line(self) -> str:
        """Return the last line of the container's termination message."""
        lines = [line.strip() for line in self.pod.message.splitlines() if line.strip()]
        return lines[-1][:_MAX_LINE] if lines else ""


def failure_of(pod: Pod) -> Failure | None:
    """Return why ``pod`` failed; None if it has not failed, or is being deleted."""
    if not pod.ended or pod.succeeded or pod.deleting:
        return None
    if pod.disrupted:
        return _infrastructure(pod, "Disrupted", pod.reason or "evicted or preempted")
    if pod.exit_code is None:  # kubelet rejected, evicted or lost it
        return _infrastructure(pod, pod.reason or "PodLost", pod.message or "never ran")
    if pod.reason == OUT_OF_MEMORY:
        return _program(pod, OUT_OF_MEMORY, "out of memory")
    if pod.init_container and pod.exit_code not in _SIGNALS:
        return _program(pod, INIT_CONTAINER_FAILED, f"init container {pod.init_container} failed")
    if pod.reason in _START_ERRORS:
        return _program(pod, START_ERROR, "its container could not be started")
    if pod.exit_code == EXIT_STOPPED:
        return _infrastructure(pod, "Stopped", "asked to stop; it left a checkpoint")
    if pod.exit_code == EXIT_UNFIT:
        return _unfit(pod)
    if pod.exit_code in _SIGNALS:
        return _infrastructure(pod, "Killed", f"{_SIGNALS[pod.exit_code]} from outside")
    return _program(pod, *_REASONS.get(pod.exit_code, ("ProgramError", "the program failed")))


def retry_time(failure: Failure, num_restarts: int) -> float:
    """Return the Unix time at which the pod or the gang may be restarted.

    At once if the pod was not short-lived, or if this is the program's first failure; else after a delay
    that doubles with ``num_restarts``, which were for the same reason.
    """
    ended = failure.pod.finished or failure.pod.created
    num_delays = num_restarts + failure.infrastructure
    if not failure.is_short_lived or num_delays == 0:
        return ended
    return ended + min(_MAX_DELAY, _MIN_DELAY * 2.0 ** min(num_delays - 1, 10))


def _infrastructure(pod: Pod, reason: str, text: str) -> Failure:
    return Failure(pod, True, _camel(reason), f"{pod.name}: {text}")


def _unfit(pod: Pod) -> Failure:
    """Return the failure of a pod whose preflight found its node too slow."""
    failure = _infrastructure(pod, UNFIT_NODE, f"node {pod.node} is unfit")
    line = failure.error_line
    return replace(failure, message=f"{failure.message}: {line}") if line else failure


def _program(pod: Pod, reason: str, text: str) -> Failure:
    failure = Failure(pod, False, _camel(reason), f"{pod.name}: exit code {pod.exit_code}, {text}")
    line = failure.error_line
    message = f"{failure.message}: {line}" if line else failure.message
    return Failure(pod, False, failure.reason, message)


def _camel(reason: str) -> str:
    """Return ``reason`` as a valid reason of a condition."""
    letters = "".join(c for c in reason if c.isascii() and c.isalnum())[:128]
    return letters if letters[:1].isalpha() else f"Pod{letters}"
