"""What a cluster left on this machine when it was killed, or its clone deleted, instead of stopped.

The kernel is asked, not a record: whoever has the record may be gone, and a dead cluster of the other address
family overlaps with no address of ours.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from cluster import processes
from cluster.errors import MachineError
from cluster.host import cgroups, host_state, network
from cluster.layout import CACHE, MAX_NODES, STATE, Node

PROGRAM = re.compile(rf"{re.escape(str(CACHE))}/|/\S*/containerd")
"""How the command of a cluster's program begins: what clones share, or Debian's containerd and its shims."""
FILE = re.compile(rf"[\s=](/[^\s=]*)/{re.escape(STATE.name)}/")
"""A file below `STATE` of the clone in the group, in a command's arguments."""


def clear() -> None:
    """Remove programs, network and cgroups that no clone has a record of.

    Raises MachineError if the cluster of another clone is running.
    """
    running = _programs()
    for clone in set(running.values()):
        if (clone / host_state.RECORD.relative_to(STATE.parent)).exists():
            raise MachineError(f"the cluster of {clone} is running; make cluster-down there first")
    nodes = [Node(index).namespace for index in range(MAX_NODES)]
    processes.kill(running.keys() | {pid for name in nodes for pid in cgroups.processes(name)})
    network.remove()
    for name in nodes:
        cgroups.remove(name)


def _programs() -> dict[int, Path]:
    """Return the clone of every running program of a cluster, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if PROGRAM.match(command) and (match := FILE.search(command)):
                found[int(path.parent.name)] = Path(match[1])
    return found
