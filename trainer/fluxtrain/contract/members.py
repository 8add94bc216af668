"""What the rendezvous service of a job reports at /members, read by the operator.

| key | value |
|---|---|
| ``attempt`` | the attempt that the agents belong to, 0 before the first heartbeat |
| ``generation`` | number of the newest world |
| ``world`` | agents of that world in the order of their ranks |
| ``alive`` | agents that send heartbeats, or whose world makes steps; not those that are not heard yet |
| ``lostSeconds`` | seconds since the last heartbeat of each agent that is lost |
| ``restarts`` | ``generation``, ``cause`` and ``agent`` of the newest restarts |
| ``closed`` | whether an agent that failed has ended the attempt for all, as those of older versions do |

The name of an agent begins with the uid of its pod. A restart is a generation that ended because trainers
failed: those of their peers fail too, so it is one, however many agents tell it. It is none if a node was
lost, or if the trainers were asked to stop.
"""

from __future__ import annotations

from collections.abc import Iterable

MEMBERS_PATH = "/members"
PROCESS_FAILED = "ProcessFailed"
"""Cause of a restart: a trainer exited with an error. That may be the consequence of another's end."""
PROCESS_KILLED = "ProcessKilled"
"""A trainer was killed by a signal."""
PROCESS_OUT_OF_MEMORY = "ProcessOutOfMemory"
"""The kernel killed a trainer because its container was out of memory."""
_CAUSES = (PROCESS_FAILED, PROCESS_KILLED, PROCESS_OUT_OF_MEMORY)
MAX_RESTARTS = 64
"""Restarts that are told at once."""
_SEPARATOR = "."


def agent_name(pod: str, process: str) -> str:
    """Return the name of the agent that is ``process`` of the pod with uid ``pod``."""
    return f"{pod}{_SEPARATOR}{process}"


def pod_of(agent: str) -> str:
    """Return the uid of the pod of ``agent``."""
    return agent.partition(_SEPARATOR)[0]


def root_cause(causes: Iterable[str]) -> str:
    """Return the cause of a restart of which agents tell ``causes``; unknown ones count as `PROCESS_FAILED`.

    A trainer that lost its peer exits with an error, so a kill is the cause, and not the consequence.
    """
    known = (_CAUSES.index(cause) for cause in causes if cause in _CAUSES)
    return _CAUSES[max(known, default=0)]
