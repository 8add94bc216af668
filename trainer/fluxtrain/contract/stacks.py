"""What ``fluxtrain stacks`` prints for each rank of a pod, read by ``kubectl fluxtrain stacks``.

The stacks themselves are in the pod's log: those of one rank between its ``time`` and that of the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

STACKS_COMMAND = ("fluxtrain", "stacks")
"""Command that makes all ranks of a pod print their stacks. Run in the pod by the plugin of kubectl."""
STACKS_SECONDS = 0.3
"""How long a rank has for printing its stacks, before the next one is asked; it takes milliseconds."""


@dataclass(frozen=True)
class RankProcess:
    """A rank's process, and whether it was asked for its stacks."""

    rank: int
    pid: int
    state: str
    """One letter, as in /proc/PID/stat: R, S, D (waits for a device or storage), T (stopped), Z (ended)."""
    time: float
    """Unix time of the node at which it was asked."""
    asked: bool = True
    """False before it has a handler of the signal, which would end it."""

    def to_json(self) -> str:
        """Return the line of this rank."""
        return json.dumps(asdict(self))


def read_ranks(text: str) -> list[RankProcess]:
    """Return the ranks in the output ``text`` of the command; lines that are none are skipped."""
    ranks = (_rank(line) for line in text.splitlines())
    return [rank for rank in ranks if rank is not None]


def _rank(line: str) -> RankProcess | None:
    try:
        values = json.loads(line)
        if not isinstance(values, Mapping):
            return None
        return RankProcess(
            rank=int(values["rank"]),
            pid=int(values["pid"]),
            state=str(values["state"]),
            time=float(values["time"]),
            asked=bool(values["asked"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
