"""What the launcher prepares for trainers on GPUs: their environment, and the memory that RDMA may lock."""

from __future__ import annotations

import resource
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

from fluxtrain.contract.gpu_environment import gpu_environment

_SHOWN = ("CUDA_", "GLOO_", "GPU_", "HIP_", "HSA_", "NCCL_", "RCCL_", "ROCR_", "TORCH_")
"""Prefixes of the variables that GPUs, collectives and torch read."""
_RDMA_DEVICES = Path("/dev/infiniband")
_PROCESS_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14
"""Number of the Linux capability to lock memory beyond the limit."""
_MIB = 1 << 20


def prepare_for_gpus(environment: MutableMapping[str, str]) -> None:
    """Set what trainers on GPUs need and ``environment`` lacks, and print what applies.

    Does nothing if torch sees no GPU.
    """
    if not torch.cuda.is_available():
        return
    defaults = gpu_environment(is_amd=torch.version.hip is not None)
    environment.update({**defaults, **environment})
    lines = [describe_environment(environment)]
    if _RDMA_DEVICES.exists() and (limit := raise_memlock_limit()) is not None:
        lines.append(_memlock_warning(limit))
    for line in lines:
        print(f"fluxtrain: {line}", file=sys.stderr, flush=True)


def describe_environment(environment: Mapping[str, str]) -> str:
    """Return the variables that GPUs, collectives and torch read, on one line."""
    names = sorted(name for name in environment if name.startswith(_SHOWN))
    values = (f"{name}={_on_one_line(environment[name])}" for name in names)
    return f"environment for GPUs: {' '.join(values)}"


def _on_one_line(value: str) -> str:
    return shlex.quote(value) if value.isprintable() else ascii(value)


def raise_memlock_limit() -> int | None:
    """Raise the limit of locked memory as far as allowed; return it in bytes, None if there is none.

    The trainers inherit it. Root with the capability IPC_LOCK has no limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    may_exceed = has_capability(_PROCESS_STATUS.read_text(), _CAP_IPC_LOCK)
    return None if hard == resource.RLIM_INFINITY or may_exceed else hard


def has_capability(status: str, number: int) -> bool:
    """Return whether a process with this ``/proc/PID/status`` has the capability ``number`` in effect."""
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return any(int(mask, 16) >> number & 1 for mask in masks)


def _memlock_warning(limit: int) -> str:
    return (
        f"RDMA may lock only {limit // _MIB} MiB of memory, and NCCL's buffers need more: set "
        "LimitMEMLOCK=infinity for the nodes' container runtime or slurmd, or `ulimit -l unlimited` before "
        "`fluxtrain run` (docs/operator.md, RDMA)"
    )
