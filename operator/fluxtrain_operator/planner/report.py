"""Rank 0's newest report: its answer at /progress, or a termination message, which may be newer.

A pod may end and be deleted before the operator plans again: what it told last counts until a rank 0 answers.

A trainer tells when it made steps by its own clock, which may differ from the operator's by hours, and how
long before the report the last one was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fluxtrain.contract.resource.status import ProgressStatus, StragglerStatus
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.timestamps import seconds, stamp

_LATENCY_SECONDS = 5.0
"""By how much the times of one step in two reports may differ."""


@dataclass(frozen=True)
class Report:
    """The progress in a report."""

    progress: Progress
    time: float
    """Unix time of the report."""
    is_final: bool = False
    """Whether it is the last one of processes that have ended."""

    @cached_property
    def last_step_time(self) -> float | None:
        """Return the Unix time of the last step, from an older trainer by its clock; None before a step."""
        told, since = self._told_last, self.progress.seconds_since_step
        if told is None or since is None:
            return told
        return max(0.0, self.time - max(0.0, since))

    @property
    def first_step_time(self) -> float | None:
        """Return the Unix time of the first step of the same processes; None before it."""
        first = seconds(self.progress.status.first_step_time)
        if first is None or self._told_last is None or self.last_step_time is None:
            return None
        return self.last_step_time - (self._told_last - first)

    @property
    def _told_last(self) -> float | None:
        return seconds(self.progress.status.last_step_time)

    def follows(self, before: ProgressStatus | None) -> bool:
        """Return whether the last step is not older than that of ``before``."""
        last, known = self.last_step_time, seconds(before.last_step_time) if before else None
        is_exact = self.progress.seconds_since_step is None  # both by the clock of an older trainer
        latency = 0.0 if is_exact else _LATENCY_SECONDS
        return last is not None and (known is None or last >= known - latency)

    def status_after(self, before: ProgressStatus | None, pods: Sequence[Pod]) -> ProgressStatus:
        """Return the progress for the status, with the straggler if it runs in one of ``pods``.

        The time of the last step is that of ``before`` if it is the same step: each report tells another one.
        """
        status, last = self.progress.status, self.last_step_time
        time, straggler = status.last_step_time, self._straggler(pods)
        if last is not None and self.progress.seconds_since_step is not None:
            known = before.last_step_time if before and before.step == status.step else None
            time = known if _is_same(known, last) else stamp(last)
        if time == status.last_step_time and straggler is None:
            return status
        return status.model_copy(update={"last_step_time": time, "straggler": straggler})

    def _straggler(self, pods: Sequence[Pod]) -> StragglerStatus | None:
        """Return the straggler; None if there is none, or if it runs in none of ``pods``."""
        found = self.progress.straggler
        pod = next((pod for pod in pods if found and pod.uid == found.pod), None)
        if found is None or pod is None:
            return None
        return StragglerStatus(
            rank=found.rank,
            pod=pod.name,
            node=pod.node,
            cause=found.cause,
            slowdown=found.slowdown,
        )


def _is_same(known: str | None, last: float) -> bool:
    """Return whether a step at ``known`` may be one that another report has at ``last``."""
    time = seconds(known)
    return time is not None and abs(last - time) <= _LATENCY_SECONDS


def newest_report(observed: Observed, now: float) -> Report | None:
    """Return the report with the latest step; None without a report."""
    answer, gone = observed.progress, observed.final_pod
    reports = [] if answer is None else [Report(answer, now - answer.age)]
    for pod in (*observed.pods, *([gone] if answer is None and gone is not None else [])):
        if pod.final_progress is not None:
            time = pod.finished or pod.created
            reports.append(Report(pod.final_progress, time, is_final=True))
    return max(reports, key=lambda report: report.last_step_time or 0.0, default=None)
