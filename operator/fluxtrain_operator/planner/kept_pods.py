"""Deleted pods that run no longer and that finalizers of others keep: their names are not free."""

from __future__ import annotations

from itertools import count

from fluxtrain_operator import names
from fluxtrain_operator.planner.situation import Situation

KEPT_BY_FINALIZERS = "KeptByFinalizers"


def kept_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message about the first of those pods; None without one."""
    observed = situation.observed
    for pod in (*observed.kept_rendezvous, *observed.pods):
        if pod.kept_by:
            text = "another pod takes its place, under another name"
            return (
                KEPT_BY_FINALIZERS,
                f"{pod.name}: deleted, kept by {', '.join(pod.kept_by)}: {text}",
            )
    return None


def rendezvous_name(situation: Situation) -> str:
    """Return the name of the next rendezvous pod: the first that no kept one has."""
    taken = {pod.name for pod in situation.observed.kept_rendezvous}
    candidates = (names.rendezvous(situation.job.name, number) for number in count(1))
    return next(name for name in candidates if name not in taken)
