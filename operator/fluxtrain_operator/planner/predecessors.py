"""The jobs of ``startAfter``: which of them are complete, or have ended, also if they are gone by now."""

from __future__ import annotations

from fluxtrain_operator.planner.situation import Situation

COMPLETE, FAILED = "Complete", "Failed"
_REMEDY = "it, or take it out of spec.lifecycle.startAfter"


def completed_predecessors(situation: Situation) -> list[str]:
    """Return the jobs of ``startAfter`` that are complete, or were when they were seen last.

    With ``startWhen: Ended`` failed ones count as well. One that exists counts by its present phase: if it
    was created again, it must complete again. Once the job has begun they stay as they are.
    """
    before, phases = situation.job.status, situation.observed.predecessors
    known = set(before.completed_predecessors)
    if before.attempt > 0:
        return before.completed_predecessors
    lifecycle = situation.job.spec.lifecycle
    enough = (COMPLETE, FAILED) if lifecycle.start_when == "Ended" else (COMPLETE,)
    start_after = dict.fromkeys(lifecycle.start_after)
    return [n for n in start_after if phases.get(n, COMPLETE if n in known else "") in enough]


def awaited_predecessors(situation: Situation) -> list[str]:
    """Return the jobs of ``startAfter`` that the job still waits for."""
    completed = completed_predecessors(situation)
    start_after = dict.fromkeys(situation.job.spec.lifecycle.start_after)
    return [n for n in start_after if n not in completed]


def predecessor_state(name: str, phase: str | None) -> str:
    """Return a clause about the awaited job ``name``, whose ``phase`` is None if it does not exist."""
    if phase is None:
        return f"{name} does not exist; create {_REMEDY}"
    return f"{name} is {phase or 'new'}" + (f"; recreate {_REMEDY}" if phase == FAILED else "")
