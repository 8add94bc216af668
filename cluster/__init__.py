"""A real Kubernetes on one Linux machine, for development and tests: no Docker, two nodes or more."""

from cluster.errors import ClusterError, MachineError
from cluster.lifecycle import down, prepare, status, up

__all__ = ["ClusterError", "MachineError", "down", "prepare", "status", "up"]
