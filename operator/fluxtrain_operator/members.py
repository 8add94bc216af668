"""The agents of a job as its rendezvous service reports them at /members; validated, as untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxtrain.contract.members import pod_of


@dataclass(frozen=True)
class Members:
    """The pods of an attempt whose agents send heartbeats, and those whose agents are lost, by uid."""

    attempt: int
    alive: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    """Without those that have another agent that is alive."""

    @staticmethod
    def from_json(answer: object) -> Members | None:
        """Return the members in a decoded answer, None if it is not one; invalid values are left out."""
        if not isinstance(answer, Mapping) or type(attempt := answer.get("attempt")) is not int:
            return None
        alive, lost = answer.get("alive"), answer.get("lostSeconds")
        living = _pods(alive if isinstance(alive, list) else [])
        return Members(attempt, living, _pods(lost if isinstance(lost, Mapping) else []) - living)


@dataclass(frozen=True)
class Heard:
    """Which pods of a job are heard of, by uid; others may be starting, or the service is being replaced."""

    alive: frozenset[str] = frozenset()
    """Pods whose agents send heartbeats, or whose world makes steps."""
    silent: frozenset[str] = frozenset()
    """Pods whose agents are lost; the rendezvous pod if it does not answer any more."""


NOT_HEARD = Heard()


def _pods(agents: Mapping[object, object] | list[object]) -> frozenset[str]:
    return frozenset(pod_of(agent) for agent in agents if isinstance(agent, str))
