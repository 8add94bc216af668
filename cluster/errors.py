"""What can go wrong, in sentences for the person at the terminal.

ClusterError          something did not start, stop or answer; exit code 1
└── MachineError      this machine cannot carry the cluster; says what is needed; exit code 2
"""

from __future__ import annotations


class ClusterError(Exception):
    """Tells what failed and where to look."""

    exit_code = 1


class MachineError(ClusterError):
    """Tells what this machine lacks."""

    exit_code = 2
