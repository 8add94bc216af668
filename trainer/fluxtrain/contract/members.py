"""What the rendezvous service of a job reports at /members, read by the operator.

| key | value |
|---|---|
| ``attempt`` | the attempt that the agents belong to, 0 before the first heartbeat |
| ``generation`` | number of the newest world |
| ``world`` | agents of that world in the order of their ranks |
| ``alive`` | agents that send heartbeats, or whose world makes steps |
| ``lostSeconds`` | seconds since the last heartbeat of each agent that is lost |

The name of an agent begins with the uid of its pod.
"""

from __future__ import annotations

MEMBERS_PATH = "/members"
_SEPARATOR = "."


def agent_name(pod: str, process: str) -> str:
    """Return the name of the agent that is ``process`` of the pod with uid ``pod``."""
    return f"{pod}{_SEPARATOR}{process}"


def pod_of(agent: str) -> str:
    """Return the uid of the pod of ``agent``."""
    return agent.partition(_SEPARATOR)[0]
