"""A process group of any size whose collectives do nothing: this process is rank 0 of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fluxtrain.distributed import World


@contextmanager
def fake_world(num_nodes: int, ranks_per_node: int) -> Iterator[World]:
    """Join a group of ``num_nodes`` x ``ranks_per_node`` ranks, of which no other exists; then leave it.

    Raises RuntimeError in a process that is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already")
    size = num_nodes * ranks_per_node
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(0, 0, size, torch.device("cpu"), ranks_per_node, num_nodes)
    finally:
        dist.destroy_process_group()
