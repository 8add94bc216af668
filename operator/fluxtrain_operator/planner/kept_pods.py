"""Pods that have ended and that finalizers of others keep: their names are not free."""

from __future__ import annotations

from fluxtrain_operator import names
from fluxtrain_operator.planner.situation import Situation

KEPT_BY_FINALIZERS = "KeptByFinalizers"


def kept_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message about the first of those pods; None without one.

    Kueue's finalizer is not meant: it removes that itself.
    """
    store = situation.observed.rendezvous
    for pod in (*([store] if store is not None else []), *situation.observed.pods):
        others = [name for name in pod.finalizers if name != names.KUEUE_FINALIZER]
        if pod.deleting and pod.ended and others:
            text = "no other pod of this name can be created before they are removed"
            return KEPT_BY_FINALIZERS, f"{pod.name}: deleted, kept by {', '.join(others)}: {text}"
    return None
