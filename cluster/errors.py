"""Errors of the cluster.

ClusterError          a program failed to start, stop or respond; exit code 1
└── MachineError      this machine cannot run the cluster; exit code 2
"""

from __future__ import annotations


class ClusterError(Exception):
    """A program failed; the message says where to look."""

    exit_code = 1


class MachineError(ClusterError):
    """This machine lacks something; the message says what."""

    exit_code = 2
