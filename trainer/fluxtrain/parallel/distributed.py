"""The process group: this process's rank, collectives over all ranks, and the agreement to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from types import FrameType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import FluxtrainError
from fluxtrain.runtime.progress import Progress

T = TypeVar("T")
START_TIMEOUT = timedelta(minutes=10)
"""Timeout of collectives: ranks compile and load at different speeds."""
_NO_TIMEOUT = timedelta(days=3650)
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 26
"""Most bytes that one message of `Channel.shift` has."""


@dataclass(frozen=True)
class World:
    """The rank of this process, and collectives over all ranks of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    local_size: int = 1  # ranks of this node
    num_nodes: int = 1
    exit_stack: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)
    """Closed when all ranks are done, or this one has failed."""
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)
    """What this rank reports at /progress."""

    @staticmethod
    def alone() -> World:
        """Return the world of a process without peers, on the CPU."""
        return World(0, 0, 1, torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which logs."""
        return self.rank == 0

    @property
    def node(self) -> int:
        """Return the position of this rank's node in the order of the ranks."""
        return self.rank // self.local_size

    def all_sum(self, values: Tensor) -> Tensor:
        """Return ``values`` summed over all ranks, in place; every rank must call it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_gather(self, own: list[T]) -> list[T]:
        """Return the values of all ranks, ordered by rank; every rank must call it."""
        if self.size == 1:
            return own
        gathered: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(gathered, own)
        return list(chain.from_iterable(gathered))

    def from_main(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns on rank 0, where alone it is called; every rank must call this.

        Its FluxtrainError is raised on every rank.
        """
        if self.size == 1:
            return make()
        outcome: list[T | FluxtrainError | None] = [None]
        if self.is_main:
            try:
                outcome = [make()]
            except FluxtrainError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0)
        (made,) = outcome
        if isinstance(made, FluxtrainError):
            raise made
        return cast(T, made)

    def gather_numbers(self, own: list[float]) -> list[list[float]]:
        """Return the numbers of each rank, by rank; every rank must call it with equally many.

        They are exchanged on the host, without waiting for the device.
        """
        if self.size == 1:
            return [own]
        sent = torch.tensor(own, dtype=torch.float64)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return [list(map(float, numbers)) for numbers in received]

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        if self.size > 1:
            _wait_for_all()

    def mesh(self, dp_replicate: int) -> DeviceMesh:
        """Return the mesh (dp_replicate, dp_shard) over all ranks; one axis if nothing is replicated."""
        kind = self.device.type
        if dp_replicate == 1:
            return init_device_mesh(kind, (self.size,), mesh_dim_names=("dp_shard",))
        shape = (dp_replicate, self.size // dp_replicate)
        return init_device_mesh(kind, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


class Channel:
    """Messages between all ranks beside training's collectives, such as those of a thread; on the host."""

    def __init__(self, world: World, has_timeout: bool = True) -> None:
        """Open it; every rank must do so at the same time."""
        self._rank, self._size = world.rank, world.size
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            timeout = None if has_timeout else _NO_TIMEOUT
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def maximum(self, values: list[float]) -> list[float]:
        """Return the maximum of each value over all ranks; every rank must call it."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group)
        return [float(value) for value in tensor]

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        self.maximum([0.0])

    def wait_for_all(self, meanwhile: Callable[[], object]) -> None:
        """Wait until every rank calls this; ``meanwhile`` is called all the time, and may raise."""
        if self._group is None:
            return
        work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        assert work is not None
        while not work.is_completed():
            meanwhile()
            time.sleep(_POLL_SECONDS)
        work.wait()

    def send(self, content: Tensor, target: int) -> None:
        """Send ``content`` to rank ``target``, which must call `receive`; returns when it has arrived."""
        dist.send(content, target, self._group)

    def receive(self, content: Tensor, source: int) -> None:
        """Fill ``content`` with what rank ``source`` sends."""
        dist.recv(content, source, self._group)

    def shift(self, sent: Tensor, received: Tensor, distance: int) -> None:
        """Send to the rank at ``distance`` after this one, receive from the one before; all ranks call it.

        The bytes go in messages of bounded size. A rank must know the size of what it receives.
        """
        target, source = ((self._rank + step) % self._size for step in (distance, -distance))
        for offset in range(0, max(len(sent), len(received)), _MESSAGE_BYTES):
            into, out = (part[offset : offset + _MESSAGE_BYTES] for part in (received, sent))
            works = [dist.irecv(into, source, self._group)] if len(into) else []
            works += [dist.isend(out, target, self._group)] if len(out) else []
            for work in works:
                cast(dist.Work, work).wait()


def _wait_for_all(group: dist.ProcessGroup | None = None) -> None:
    """Wait on the host until all ranks call this; torch's barrier waits for the device if one is bound."""
    dist.all_reduce(torch.zeros(1), group=group)


def connects_at_start(config: RunConfig) -> bool:
    """Return whether the GPUs of all ranks are connected when the process group is joined.

    Not before a preflight, which finds the pairs of ranks that cannot be connected, and not with replicas:
    their groups would be split off the connected one, which not every torch can do with gloo beside NCCL.
    """
    is_plain = config.preflight is None and config.parallel.dp_replicate == 1
    return config.task == "train" and is_plain


@contextmanager
def process_group(
    progress: Progress | None = None, with_gpus: bool = True, connects: bool = False
) -> Iterator[World]:
    """Join the process group of torchrun's environment; leave it after a barrier of all ranks.

    ``progress`` is this rank's if it began before. Without ``with_gpus`` the ranks use none, even if there
    are some. If it ``connects``, NCCL or RCCL connects the GPUs here, not in their first collective.

    So if one rank succeeds, the whole task is done.
    """
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    has_gpu = with_gpus and torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    # gloo besides nccl: checkpoints and StopRequest must not wait for the device
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    bound = device if has_gpu and connects and size > 1 else None
    dist.init_process_group(
        backend, rank=rank, world_size=size, timeout=START_TIMEOUT, device_id=bound
    )
    exit_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_NO_TIMEOUT))
    nodes, local_size = (
        int(os.environ.get(name, 1)) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    with ExitStack() as exit_stack:
        try:
            yield World(
                rank,
                local_rank,
                size,
                device,
                local_size,
                nodes,
                exit_stack,
                progress or Progress(),
            )
            _wait_for_all(exit_group)
        finally:
            dist.destroy_process_group()


def end_with_parent() -> None:
    """Let the kernel kill this process if its parent, the agent, is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class StopRequest:
    """Handles SIGTERM and SIGINT; :meth:`agree` makes all ranks stop after the same step."""

    world: World
    requested: bool = False
    _pending: tuple[dist.Work, Tensor] | None = field(default=None, repr=False)

    def install(self) -> None:
        """Set ``requested`` on SIGTERM and SIGINT; the training loop checks it once per step."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def agree(self) -> bool:
        """Return whether a stop was requested of any rank by the previous call; every rank must call it.

        The all-reduce runs on the host during a step and is read after it, so that it costs no wait and no
        device synchronisation.
        """
        if self.world.size == 1:
            return self.requested
        if self._pending is None:
            self._pending = self._start_all_reduce()
            return False
        work, flag = self._pending
        work.wait()
        self._pending = self._start_all_reduce()
        return bool(flag.item())

    def finish(self) -> None:
        """Wait for the pending all-reduce, so that the process group can be destroyed."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def _start_all_reduce(self) -> tuple[dist.Work, Tensor]:
        flag = torch.tensor([int(self.requested)])
        work = dist.all_reduce(flag, async_op=True)
        assert work is not None
        return work, flag
