"""Which pods of a job are heard of: the rendezvous service's answer at /members; validated, as untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxtrain.contract.members import pod_of


@dataclass(frozen=True)
class Heard:
    """Which pods of a job are heard of, by uid; others may be starting, or the service is being replaced."""

    alive: frozenset[str] = frozenset()
    """Pods whose agents send heartbeats, or whose world makes steps."""
    silent: frozenset[str] = frozenset()
    """Pods all of whose agents are lost; the rendezvous pod if it does not answer any more."""

    @staticmethod
    def from_json(answer: object) -> Heard | None:
        """Return the pods in a decoded answer, None if it is not one; invalid values are left out."""
        if not isinstance(answer, Mapping) or type(answer.get("attempt")) is not int:
            return None
        alive, lost = answer.get("alive"), answer.get("lostSeconds")
        living = _pods(alive if isinstance(alive, list) else [])
        return Heard(living, _pods(lost if isinstance(lost, Mapping) else []) - living)


NOT_HEARD = Heard()


def _pods(agents: Mapping[object, object] | list[object]) -> frozenset[str]:
    return frozenset(pod_of(agent) for agent in agents if isinstance(agent, str))
