"""Each node's images are copied to the memory of the next node in rank order."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from torch import Tensor

from fluxtrain.distributed import Channel, World
from fluxtrain.snapshots.copies import MAX_RECORD_BYTES, Copy
from fluxtrain.snapshots.image import Shard
from fluxtrain.snapshots.slot import Slot


def source_of(world: World, shard: Shard) -> int | None:
    """Return the rank, of the node before, whose image this rank keeps a copy of; None if there is no need.

    With one node there is no partner. With replicas (HSDP), ranks of another node have the same image.
    """
    if world.num_nodes == 1 or shard.count < world.size:
        return None
    return (world.rank - world.local_size) % world.size


def exchange(channel: Channel, world: World, own: Slot, copy: Copy | None, received: Slot) -> None:
    """Send the image in ``own`` and its record ``copy`` to the next node; store the other in ``received``.

    ``copy`` is None if the image is not valid; then the other node's copy is not either.
    """
    received.invalidate()
    record = torch.empty(MAX_RECORD_BYTES, dtype=torch.uint8)
    channel.shift(_encode(copy), record, world.local_size)
    channel.shift(own.bytes, received.bytes, world.local_size)
    if (text := bytes(record.tolist()).rstrip(b"\0")) != b"":
        received.commit(Copy(**json.loads(text)))


def _encode(copy: Copy | None) -> Tensor:
    text = b"" if copy is None else json.dumps(asdict(copy)).encode()
    return torch.frombuffer(bytearray(text.ljust(MAX_RECORD_BYTES, b"\0")), dtype=torch.uint8)
