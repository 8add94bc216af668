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

PROGRAM = re.compile(rf"{re.escape(str(CACHE))}/|/.*/containerd")
"""How the command of a cluster's program begins: what clones share, or Debian's containerd and its shims."""
FILE = re.compile(rf"[^/]*(/.+)/{re.escape(STATE.name)}/")
"""An argument with a file below `STATE` of the clone in the group, as --option=/clone/.cluster/file."""

NODES = [Node(index).namespace for index in range(MAX_NODES)]


def clear() -> None:
    """Remove programs, network and cgroups that no clone has a record of.

    Raises MachineError if the cluster of another clone is running.
    """
    running = _programs()
    for clone in set(running.values()):
        if (clone / host_state.RECORD.relative_to(STATE.parent)).exists():
            raise MachineError(f"the cluster of {clone} is running; make cluster-down there first")
    processes.kill(running.keys() | {pid for name in NODES for pid in cgroups.processes(name)})
    remove_nodes()


def remove_nodes() -> None:
    """Remove the network and the cgroups of all nodes; their processes must have ended."""
    network.remove()
    for name in NODES:
        cgroups.remove(name)


def _programs() -> dict[int, Path]:
    """Return the clone of every running program of a cluster, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            command, *arguments = path.read_text(errors="replace").split("\0")
            files = [match[1] for each in arguments if (match := FILE.match(each))]
            if PROGRAM.match(command) and files:
                found[int(path.parent.name)] = Path(files[0])
    return found
