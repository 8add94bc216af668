"""What the launcher prepares for trainers: environment, memory that RDMA may lock, the time of its start."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fluxtrain.contract.process import gpu_environment
from fluxtrain.state.free_memory import IMAGE, RECORD, SHARED_MEMORY, Bound, MemoryWatch

SHOWN = ("CUDA_", "GLOO_", "GPU_", "HIP_", "HSA_", "NCCL_", "RCCL_", "ROCR_", "TORCH_")
"""Prefixes of the variables that GPUs, collectives and torch read."""
_RDMA_DEVICES = Path("/dev/infiniband")
_PROCESS_STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14
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
        lines.append(memlock_warning(limit))
    for line in lines:
        print(f"fluxtrain: {line}", file=sys.stderr, flush=True)


def describe_environment(environment: Mapping[str, str]) -> str:
    """Return the variables that GPUs, collectives and torch read, on one line."""
    names = sorted(name for name in environment if name.startswith(SHOWN))
    values = ((name, environment[name]) for name in names)
    texts = (f"{n}={shlex.quote(v) if v.isprintable() else ascii(v)}" for n, v in values)
    return f"environment for GPUs: {' '.join(texts)}"


def raise_memlock_limit() -> int | None:
    """Raise the limit of locked memory as far as allowed; return it in bytes, None if there is none.

    The trainers inherit it. Root with the capability IPC_LOCK has no limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    may_exceed = has_capability(_PROCESS_STATUS.read_text(encoding="utf-8"), CAP_IPC_LOCK)
    return None if hard == resource.RLIM_INFINITY or may_exceed else hard


def has_capability(status: str, number: int) -> bool:
    """Return whether a process with this ``/proc/PID/status`` has the capability ``number`` in effect."""
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return any(int(mask, 16) >> number & 1 for mask in masks)


def memlock_warning(limit: int) -> str:
    """Return what RDMA lacks if it may lock ``limit`` bytes, and the next step."""
    return (
        f"RDMA may lock only {limit // _MIB} MiB of memory, and NCCL's buffers need more: set "
        "LimitMEMLOCK=infinity for the nodes' container runtime or slurmd, or `ulimit -l unlimited` before "
        "`fluxtrain run` (docs/operator.md, RDMA)"
    )


_ATTEMPTS = 10
_RESERVE_PART = 0.5
"""Trainers drop their snapshots earlier; this is for those that no trainer has mapped."""


@contextmanager
def local_volume(
    output: Path, parent: Path = SHARED_MEMORY, node: str = ""
) -> Iterator[Path | None]:
    """Create the folder in ``parent`` for the run in ``output``, which is locked; remove it at the end.

    ``node`` tells nodes of a run on the same machine apart.
    What killed launchers left, of any run of this user, is removed first. Yields None, after one line of
    text, if the folder cannot be created.
    """
    prefix = f"fluxtrain-{os.getuid()}-"
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # another launcher has removed it, or it is no folder of this user
            # one that a launcher uses is locked; the kernel unlocks it when that one is killed
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _is_locked_by(descriptor, left):
                    shutil.rmtree(left)
            finally:
                os.close(descriptor)
    name = f"{output.resolve()}\0{node}" if node else str(output.resolve())
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    folder = parent / f"{prefix}{digest}"
    try:
        lock = _create_locked(folder)
    except OSError as error:
        text = f"no snapshots in memory: {folder} cannot be created ({error.strerror})"
        print(f"fluxtrain: {text}", file=sys.stderr)
        yield None
        return
    try:
        with _watched(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _create_locked(folder: Path) -> int:
    """Create ``folder``, or empty what is left of it, and return a descriptor that locks it."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)  # fails if another user has created it
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if _is_locked_by(descriptor, folder):
            return descriptor
        os.close(descriptor)  # another launcher removes what looked unused
    raise FileExistsError(errno.EEXIST, "other launchers remove it", str(folder))


def _is_locked_by(descriptor: int, folder: Path) -> bool:
    """Lock ``folder`` through ``descriptor``; return whether that succeeded and it still exists."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except OSError:
        return False


@contextmanager
def emptied(volume: Path | None) -> Iterator[None]:
    """Remove the contents of ``volume``, the mount of a pod, at the end."""
    if volume is None or not volume.is_dir():
        yield
        return
    try:
        with _watched(volume):
            yield
    finally:
        for path in volume.iterdir():
            shutil.rmtree(path, ignore_errors=True)


def _watched(volume: Path) -> MemoryWatch:
    """Return a watch that removes the snapshots in ``volume`` when memory is short, also between trainers."""

    def remove(bound: Bound) -> bool:
        snapshots = sorted(volume.glob(f"start_*/*{RECORD}")) + sorted(
            volume.glob(f"start_*/*{IMAGE}")
        )
        for path in snapshots:
            path.unlink(missing_ok=True)
        if snapshots:
            text = f"the snapshots in memory were removed: {bound}"
            print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
        return bool(snapshots)

    return MemoryWatch(volume, remove, _RESERVE_PART)


_START_FIELD = 19
"""Index of the start, in clock ticks since boot, in /proc/PID/stat after the name of the process."""


def process_start(root: Path = Path("/proc")) -> float:
    """Return the Unix time at which this process began, by its kernel; the present time without /proc."""
    now = time.time()
    try:
        ticks = int((root / "self/stat").read_bytes().rpartition(b")")[2].split()[_START_FIELD])
        uptime = float((root / "uptime").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return now
    age = uptime - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)
