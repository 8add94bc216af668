"""Pods whose labels somebody has changed: reported, or replaced if no watch finds them any more."""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation

LABELS_CHANGED = "LabelsChanged"


def label_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message about the first training pod whose labels were changed; None without one."""
    for pod in situation.active:
        if pod.changed_labels:
            keys = ", ".join(pod.changed_labels)
            effect = "Services, network policies and other selectors may not find it"
            return LABELS_CHANGED, f"{pod.name}: somebody has changed {keys}: {effect}"
    return None


def unwatched_pods(situation: Situation) -> Iterator[Pod]:
    """Yield the job's own pods that it found when it wanted to create them: no watch reports them."""
    for failure in situation.observed.create_failures:
        if failure.uid:
            yield Pod(failure.name, failure.uid)
