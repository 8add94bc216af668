"""The restarts of a job's trainers that agents tell the rendezvous service."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.members import MAX_RESTARTS, root_cause
from fluxtrain.rendezvous.messages import Heartbeat


@dataclass(frozen=True)
class RecordedRestart:
    """The end of a generation because trainers failed, as one or more agents told it."""

    agent: str
    """The agent that tells the cause; of several with the same one the first."""
    cause: str


class Restarts(dict[int, RecordedRestart]):
    """The newest restarts by the generation that ended: one, however many agents tell it."""

    def record(self, beat: Heartbeat) -> None:
        """Record the restarts of ``beat``; none of a generation that its agent does not know yet."""
        for told in beat.restarts:
            if told.generation <= beat.generation:
                known = self.get(told.generation)
                cause = root_cause([told.cause, *([known.cause] if known else [])])
                if known is None or cause != known.cause:
                    self[told.generation] = RecordedRestart(beat.agent, cause)
        while len(self) > MAX_RESTARTS:
            del self[min(self)]
