"""The process group: who this process is, sums over all ranks, and the agreement to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

START_TIMEOUT = timedelta(minutes=10)
"""How long the first collectives may take: ranks compile and load at their own pace."""
_AS_LONG_AS_IT_TAKES = timedelta(days=3650)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    local_size: int = 1  # ranks of this node
    num_nodes: int = 1
    leaving: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)
    """Closed when all ranks are done, or this one failed."""

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the one that logs."""
        return self.rank == 0

    def all_sum(self, values: Tensor) -> Tensor:
        """Return ``values`` summed over all ranks, in place; every rank must call it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_of(self, own: list[str]) -> list[str]:
        """Return the words of all ranks, in the ranks' order; every rank must call it."""
        if self.size == 1:
            return own
        said: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(said, own)
        return [word for words in said for word in words]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def mesh(self, dp_replicate: int) -> DeviceMesh:
        """Return the mesh (dp_replicate, dp_shard) over all ranks; one axis where nothing is replicated."""
        kind = self.device.type
        if dp_replicate == 1:
            return init_device_mesh(kind, (self.size,), mesh_dim_names=("dp_shard",))
        shape = (dp_replicate, self.size // dp_replicate)
        return init_device_mesh(kind, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


@contextmanager
def process_group() -> Iterator[World]:
    """Join the process group that torchrun's environment describes, and leave it together with all ranks.

    A rank that ends well says by it that the whole task is done, whatever becomes of the others.
    """
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    # gloo beside nccl: checkpoints and the agreement to stop must not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=START_TIMEOUT)
    everyone = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES))
    nodes, local_size = (
        int(os.environ.get(name, 1)) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    with ExitStack() as leaving:
        try:
            yield World(rank, local_rank, size, device, local_size, nodes, leaving)
            dist.barrier(everyone)
        finally:
            dist.destroy_process_group()


def end_with_parent() -> None:
    """Ask the kernel to end this process when the agent that started it is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class StopRequest:
    """SIGTERM and SIGINT ask for a stop; :meth:`agreed` makes all ranks stop after the same step."""

    world: World
    requested: bool = False
    _pending: tuple[dist.Work, Tensor] | None = field(default=None, repr=False)

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT; the training loop looks at the flag once per step."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def agreed(self) -> bool:
        """Return whether any rank had been asked to stop a step ago; every rank must call it.

        The sum over ranks runs in the background during a step and is read after it, on the host, so
        that it costs no waiting and no device synchronisation.
        """
        if self.world.size == 1:
            return self.requested
        if self._pending is None:
            self._pending = self._ask()
            return False
        work, flag = self._pending
        work.wait()
        self._pending = self._ask()
        return bool(flag.item())

    def settle(self) -> None:
        """Wait for the question still under way, so that the group can be left."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def _ask(self) -> tuple[dist.Work, Tensor]:
        flag = torch.tensor([int(self.requested)])
        work = dist.all_reduce(flag, async_op=True)
        assert work is not None
        return work, flag
