"""Restarts in place: agents end a generation whose trainers hang, and start them again in the next one.

The order is an argument of the rendezvous pod, which is replaced for it: no training pod is deleted, so the
nodes, the snapshots in their memory and the place in a queue are kept.
"""

from __future__ import annotations

from fluxtrain.contract.resource.status import InPlaceRestart
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.resources import can_restart_in_place
from fluxtrain_operator.timestamps import stamp


def is_unanswered(situation: Situation) -> bool:
    """Return whether the generation that hangs was ended before, but its trainers were not restarted."""
    last = situation.in_place_restart
    return last is not None and 0 < _generation(situation) <= last.generation


def next_in_place_restart(situation: Situation) -> InPlaceRestart | None:
    """Return the restart in place of the trainers that hang; None if all pods must be restarted.

    They must if trainers or service are too old to restart in place, or if the last restart in place did not
    help: no step was made that had not been made before.
    """
    generation, step = _generation(situation), _step(situation)
    last, progress = situation.in_place_restart, situation.progress
    has_helped = last is None or step > last.step
    if generation == 0 or not has_helped or not _is_supported(situation):
        return None
    return InPlaceRestart(
        attempt=situation.attempt,
        generation=generation,
        step=step,
        time=stamp(situation.now),
        lastStepTime=progress.last_step_time if progress is not None else None,
    )


def _is_supported(situation: Situation) -> bool:
    """Return whether the rendezvous pod can be replaced by one of a service that knows the order."""
    is_replaceable = not any(map(situation.has_other_revision, situation.active))
    return is_replaceable and can_restart_in_place(situation.revision)


def _generation(situation: Situation) -> int:
    """Return the newest generation of the ranks that answer; 0 from trainers that do not report it."""
    answer = situation.observed.any_progress
    return max((rank.generation for rank in answer.ranks), default=0) if answer else 0


def _step(situation: Situation) -> int:
    answer = situation.observed.any_progress
    return max((rank.step for rank in answer.ranks), default=0) if answer else 0
