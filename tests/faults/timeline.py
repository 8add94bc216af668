"""What was seen of a job while it was disturbed, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
