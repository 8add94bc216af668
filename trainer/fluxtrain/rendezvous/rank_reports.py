"""What the rendezvous service answers at /progress: ranks whose trainers may not answer themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fluxtrain.contract.members import pod_of
from fluxtrain.contract.progress import phase_of, stall_seconds
from fluxtrain.rendezvous.messages import RankReport

_NUM_FIRST = 2
"""Ranks that stopped first: the first of them is told apart from the next one."""

AgentReport = tuple[str, RankReport]
"""An agent, and the progress of one of its ranks."""


def progress_report(reports: Sequence[AgentReport]) -> dict[str, Any]:
    """Return the answer: of each phase the ranks that stall last, and of all those that stopped first.

    So it is small for any number of ranks, and its reader finds the same deadline as from all of them.
    """
    chosen = {each[1].rank: each for each in sorted(reports, key=_stop_order)[:_NUM_FIRST]}
    by_phase = defaultdict[tuple[str, bool], list[AgentReport]](list)
    for each in reports:
        by_phase[each[1].phase, each[1].step_seconds is None].append(each)
    for of_phase in by_phase.values():
        for last in (min(of_phase, key=_silent), max(of_phase, key=_seconds_left)):
            chosen[last[1].rank] = last
    return {"ranks": [_entry(*chosen[rank]) for rank in sorted(chosen)]}


def _stop_order(each: AgentReport) -> tuple[bool, int, float]:
    """Return the order of `fluxtrain_operator.planner.watchdog`."""
    _, report = each
    return not report.frozen, report.step, -_silent(each)


def _silent(each: AgentReport) -> float:
    return each[1].seconds_since_progress


def _seconds_left(each: AgentReport) -> float:
    """Return the seconds until the rank has stalled, unless the job sets its own limit."""
    _, report = each
    phase = phase_of(report.phase)
    return (stall_seconds(phase, report.step_seconds) if phase else 0.0) - _silent(each)


def _entry(agent: str, report: RankReport) -> dict[str, Any]:
    return {
        "rank": report.rank,
        "pod": pod_of(agent),
        "phase": report.phase,
        "step": report.step,
        "secondsSinceProgress": round(report.seconds_since_progress, 3),
        **({"stepSeconds": report.step_seconds} if report.step_seconds is not None else {}),
        **({"stack": report.stack} if report.stack else {}),
        **({"frozen": True} if report.frozen else {}),
        **({"generation": report.generation} if report.generation else {}),
    }
