"""Binds a trainer to the CPUs near its GPU.

Not by torchrun's ``--numa-binding``: it starts each trainer through the program numactl, which few images
have and which needs more than a pod's seccomp profile allows, and it makes the agent use the GPUs too.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_SYS = Path("/sys")


def bind_near_gpu(index: int) -> None:
    """Let this process, and those that it starts, run only on the CPUs of the GPU's NUMA node.

    Changes nothing without a GPU, if /sys does not name the node, or if none of its CPUs is allowed.
    """
    if torch.cuda.is_available():
        near = cpus_near(_pci_address(index)) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)


def cpus_near(address: str, sys: Path = _SYS) -> set[int]:
    """Return the CPUs of the NUMA node of the PCI device ``address``; empty if it is unknown."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        return parse_cpus((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return set()


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs in a list of Linux, such as "0-3,8"; ValueError for anything else."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _pci_address(index: int) -> str:
    """Return the address of a GPU as in /sys, "" if this build of torch does not tell."""
    gpu = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(gpu, name) for name in names):
        return ""
    domain, bus, device = (getattr(gpu, name) for name in names)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
