"""One fault, its limits and outcome, and what was seen of a job while it was disturbed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.target import CHECKPOINT_STEPS, Target

NEW_POD = "new pod"
"""What the text of a sign begins with that reports a pod, before its name."""


@dataclass(frozen=True)
class Seen:
    """The newest step of metrics.jsonl at a time, in seconds of a monotonic clock."""

    at: float
    step: int


@dataclass(frozen=True)
class Sign:
    """Something that the rendezvous, the operator or Kubernetes reported at a time."""

    at: float
    text: str


def lost_steps(steps: Sequence[Seen]) -> int:
    """Return how many steps were done again: the sum of all decreases of the newest step."""
    return sum(max(0, before.step - after.step) for before, after in pairwise(steps))


def longest_pause(steps: Sequence[Seen], began: float) -> float:
    """Return the longest time in seconds without a new step, one beyond all before, from ``began`` on.

    ``steps`` begin before ``began``.
    """
    newest = max((seen.step for seen in steps if seen.at <= began), default=0)
    last, longest = began, 0.0
    for seen in steps:
        if seen.at > began and seen.step > newest:
            newest, longest, last = seen.step, max(longest, seen.at - last), seen.at
    return longest


def first_sign(signs: Sequence[Sign], began: float) -> Sign | None:
    """Return the first sign from ``began`` on, with its time since then; None if there is none."""
    later = [sign for sign in signs if sign.at >= began]
    first = min(later, key=lambda sign: sign.at, default=None)
    return first and Sign(first.at - began, first.text)


def seconds_to_new_pod(signs: Sequence[Sign], began: float) -> float | None:
    """Return the seconds from ``began`` until the first new training pod was seen; None if there is none."""
    new = [sign for sign in signs if sign.text.startswith(f"{NEW_POD} ")]
    first = first_sign([sign for sign in new if not sign.text.endswith("-rendezvous")], began)
    return first and first.at


LOSS_TOLERANCE = 1e-4
CRASH_STEPS = 2 * CHECKPOINT_STEPS
"""Steps that a crash may cost: those since the newest checkpoint, as the next one may be incomplete."""


@dataclass(frozen=True)
class Limits:
    """What must hold after a fault, besides samples used once and an unchanged loss curve."""

    lost_steps: int = 0
    pause_seconds: float = 20.0
    """Without a new step. Starting processes takes most of it: 10 s on an idle machine, 50 on a busy one."""
    charged: int = 0
    """Restarts that count towards ``restart.maxRestarts``."""
    replaced_seconds: float | None = None
    """Until the first new training pod is created; None if there need not be one."""


@dataclass(frozen=True)
class Fault:
    """A row: ``inject`` disturbs a job that trains, and undoes it at the end of its context."""

    text: str
    inject: Callable[[Target], AbstractContextManager[None]]
    limits: Limits = field(default_factory=Limits)
    own_job: dict[str, Any] | None = None
    """Fields of the spec of a job of its own; None: the job that most rows share."""
    spread: bool = False
    """Whether each node must have one training pod before: after an earlier fault two may share one."""
    prepare: Callable[[Path], None] | None = None
    """Writes data to the output of its own job before that is created."""
    other_name: str = ""
    """If it is not that of ``inject``, with hyphens."""

    @property
    def name(self) -> str:
        """Return what `make faults` calls it."""
        return self.other_name or self.inject.__name__.replace("_", "-")


@dataclass
class Outcome:
    """What was measured of one fault."""

    fault: Fault
    steps: tuple[int, int] = (0, 0)
    """The newest step before the fault and after it."""
    detected: Sign | None = None
    """The first report of it, with seconds since the fault."""
    replaced_seconds: float | None = None
    """Until the first new training pod was created; None if there was none."""
    lost_steps: int = 0
    pause_seconds: float = 0.0
    charged: int = 0
    """Restarts that count towards ``restart.maxRestarts``."""
    causes: dict[str, int] = field(default_factory=dict)
    """All restarts by reason, also those that do not count."""
    wrong_samples: int | None = None
    """Steps with lost or repeated samples; None if not known."""
    loss_difference: float | None = None
    """Largest difference from the undisturbed run; None if not known."""
    error: str = ""
    """Why the row could not be finished."""

    @property
    def faults(self) -> list[str]:
        """Return what does not hold."""
        limits, found = self.fault.limits, [self.error] if self.error else []
        if self.lost_steps > limits.lost_steps:
            found.append(f"{self.lost_steps} steps lost, at most {limits.lost_steps} expected")
        if self.pause_seconds > limits.pause_seconds:
            found.append(
                f"{self.pause_seconds:.0f} s without a new step, at most {limits.pause_seconds:.0f} expected"
            )
        if not self._is_replaced_in_time:
            seconds = (
                "no" if self.replaced_seconds is None else f"{self.replaced_seconds:.0f} s until a"
            )
            found.append(f"{seconds} new training pod, {limits.replaced_seconds:.0f} s expected")
        if self.charged != limits.charged and not self.error:
            found.append(f"{self.charged} restarts charged, {limits.charged} expected")
        if self.wrong_samples != 0:
            wrong = self.wrong_samples
            found.append("samples unknown" if wrong is None else f"samples of {wrong} steps wrong")
        if self.loss_difference is None or not self.loss_difference < LOSS_TOLERANCE:
            found.append(f"loss curve: {self.loss_difference}")
        return found

    @property
    def _is_replaced_in_time(self) -> bool:
        limit, seconds = self.fault.limits.replaced_seconds, self.replaced_seconds
        return limit is None or (seconds is not None and seconds <= limit)
