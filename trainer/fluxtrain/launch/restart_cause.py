"""Why trainers failed and are started again, as their agent tells it to the rendezvous service."""

from __future__ import annotations

import signal
from collections.abc import Collection
from pathlib import Path

from fluxtrain.contract.members import PROCESS_FAILED, PROCESS_KILLED, PROCESS_OUT_OF_MEMORY
from fluxtrain.snapshots.free_memory import out_of_memory_kills


def restart_cause(exit_codes: Collection[int], out_of_memory: bool) -> str:
    """Return the cause of a restart after trainers ended with ``exit_codes``, negative for signals.

    ``out_of_memory`` is whether the kernel has killed a process of the container for its memory meanwhile.
    """
    if out_of_memory and -signal.SIGKILL in exit_codes:
        return PROCESS_OUT_OF_MEMORY
    return PROCESS_KILLED if any(code < 0 for code in exit_codes) else PROCESS_FAILED


def num_out_of_memory_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this container the kernel has killed for its memory; 0 if unknown."""
    return max(out_of_memory_kills(root), default=0)
