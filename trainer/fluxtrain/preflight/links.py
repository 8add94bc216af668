"""How long this rank takes to exchange data with ranks of other nodes, one after the other.

Each pair has a process group of its own, so one that never ends disturbs no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from fluxtrain.distributed import START_TIMEOUT, World
from fluxtrain.preflight.rank_store import RankStore
from fluxtrain.preflight.timing import timed
from fluxtrain.preflight.tournament import num_rounds, partner
from fluxtrain.progress import Alive

_BYTES = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Sent in each direction at the same time."""
_REPEATS = 5


def measure_links(
    world: World, store: RankStore, limit: float, alive: Alive
) -> dict[int, float | None]:
    """Return the seconds of an exchange with each partner, by its rank.

    None with one to which no connection is made within ``limit`` seconds, or no exchange ends in as many
    more. Partners have the same local rank: on most fabrics the same rail. All ranks start a round together.
    """
    seconds = dict[int, float | None]()
    for turn in range(num_rounds(world.num_nodes)):
        store.barrier(f"round {turn}")
        alive()
        for pair in _pairs(world, turn):
            group = _group(pair, world.device, limit)
            if world.rank in pair:
                peer = sum(pair) - world.rank
                seconds[peer] = (
                    _Exchange(world, peer, group, limit).seconds() if group is not None else None
                )
    return seconds


def _pairs(world: World, turn: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks of a round, the same on all ranks."""
    size = world.local_size
    for node in range(world.num_nodes):
        other = partner(node, world.num_nodes, turn)
        if other is not None and node < other:
            yield from ((node * size + local, other * size + local) for local in range(size))


def _group(pair: tuple[int, int], device: torch.device, limit: float) -> dist.ProcessGroup | None:
    """Return the process group of ``pair``, None if its ranks cannot connect.

    All ranks must call it, as torch numbers groups by the calls; those of no pair return at once.
    """
    has_gpu = device.type == "cuda"
    timeout = START_TIMEOUT if has_gpu else timedelta(seconds=limit)  # NCCL's ends the process
    with suppress(RuntimeError):  # torch's errors of time-outs and connections
        group = dist.new_group(list(pair), timeout=timeout, backend="nccl" if has_gpu else "gloo")
        return cast(dist.ProcessGroup, group)
    return None


@dataclass
class _Exchange:
    """Exchanges of this rank and ``peer``."""

    world: World
    peer: int
    group: dist.ProcessGroup
    limit: float
    _measured: list[float] = field(default_factory=list)

    def seconds(self) -> float | None:
        """Return the shortest of some exchanges, None if they do not end in time.

        They run in a thread: the first call of NCCL with a peer has no time limit.
        """
        thread = threading.Thread(target=self._run, name="preflight", daemon=True)
        thread.start()
        thread.join(self.limit)
        if thread.is_alive() and self.world.device.type == "cuda":
            _abort_process_group(self.group)  # ends the kernel; gloo's waits end by themselves
        return self._measured[0] if self._measured else None

    def _run(self) -> None:
        device = self.world.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        with suppress(RuntimeError):
            work = exchange(device, self.peer, self.group)
            timed(work, device)  # connects
            fastest = min(timed(work, device) for _ in range(_REPEATS))
            self._measured.append(fastest)
            dist.destroy_process_group(self.group)


def exchange(device: torch.device, peer: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return what sends to ``peer`` and receives from it at the same time."""
    sent = torch.zeros(_BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def run() -> None:
        operations = [
            dist.P2POp(dist.irecv, received, peer, group),
            dist.P2POp(dist.isend, sent, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run
