"""What the rendezvous service of a job answers at /members: pods and restarts; validated, as untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxtrain.contract.members import MAX_RESTARTS, pod_of, root_cause

_MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True)
class ProcessRestart:
    """A generation that ended because trainers failed; they started again inside their pods."""

    generation: int
    cause: str
    pod: str = ""
    """Uid of the pod whose agent tells it."""

    @staticmethod
    def from_json(values: object) -> ProcessRestart | None:
        """Return the restart in ``values``; None without a number of a generation."""
        if not isinstance(values, Mapping):
            return None
        generation, agent = values.get("generation"), values.get("agent")
        if type(generation) is not int or not 0 < generation <= _MAX_NUMBER:
            return None
        pod = pod_of(agent) if isinstance(agent, str) else ""
        return ProcessRestart(generation, root_cause([str(values.get("cause"))]), pod)


@dataclass(frozen=True)
class Heard:
    """Which pods of a job are heard of, by uid; others may be starting, or the service is being replaced."""

    alive: frozenset[str] = frozenset()
    """Pods whose agents send heartbeats, or whose world makes steps."""
    silent: frozenset[str] = frozenset()
    """Pods all of whose agents are lost; the rendezvous pod if it does not answer any more."""
    attempt: int | None = None
    """The attempt of its agents; None without an answer."""
    restarts: tuple[ProcessRestart, ...] = ()
    """The newest restarts in that attempt, by generation."""
    closed: bool | None = None
    """Whether an agent has ended that attempt without success; None from a service that does not tell it."""
    generation: int | None = None
    """The newest generation of that attempt, 0 until its agents have met; None without an answer."""

    @staticmethod
    def from_json(answer: object) -> Heard | None:
        """Return what a decoded answer tells, None if it is not one; invalid values are left out."""
        if not isinstance(answer, Mapping) or type(attempt := answer.get("attempt")) is not int:
            return None
        alive, lost = answer.get("alive"), answer.get("lostSeconds")
        living = _pods(alive if isinstance(alive, list) else [])
        silent = _pods(lost if isinstance(lost, Mapping) else []) - living
        closed = answer.get("closed")
        return Heard(
            living,
            silent,
            attempt,
            _restarts(answer.get("restarts")),
            closed if isinstance(closed, bool) else None,
            _generation(answer.get("generation")),
        )


NOT_HEARD = Heard()


def _generation(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def _pods(agents: Mapping[object, object] | list[object]) -> frozenset[str]:
    return frozenset(pod_of(agent) for agent in agents if isinstance(agent, str))


def _restarts(listed: object) -> tuple[ProcessRestart, ...]:
    """Return the newest valid restarts, one of each generation."""
    entries = listed[-MAX_RESTARTS:] if isinstance(listed, list) else []
    restarts = [
        restart for restart in map(ProcessRestart.from_json, entries) if restart is not None
    ]
    by_generation = {restart.generation: restart for restart in restarts}
    return tuple(by_generation[generation] for generation in sorted(by_generation))
