"""``parallel.micro_batch_size: auto``: the most samples of a pass that fit, the same on all ranks.

    OUTPUT/micro_batch_size    the number, in decimal

The first start finds it from the smallest GPU's memory. Later ones, with other GPUs or a changed file, take
the number that is kept there, as passes of another size round differently, unless it does not fit any more.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

from fluxtrain.contract.run.config import AUTO, RunConfig, Sharding
from fluxtrain.data.order import BatchShares
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.parallel.compile import compiles
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.devices import memory_of
from fluxtrain.runtime.progress import binary
from fluxtrain.state.free_memory import memory_limit
from fluxtrain.state.random_seed import keep_number, kept_number
from fluxtrain.train.memory import Memory, memory, memory_at, with_parallel

FILE = "micro_batch_size"
USABLE = 0.9
"""Usable fraction of a GPU's memory: contexts, collectives and fragmentation need the rest."""
_OF_MACHINE = 0.5
"""Usable fraction of a machine's memory for all its ranks; other programs need the rest."""
_MOST_SAMPLES = 1 << 16
"""Larger micro batches are not looked for."""


@dataclass(frozen=True)
class Room:
    """The memory that a rank may use."""

    usable: float
    is_gpu: bool

    @staticmethod
    def of(gpu_memory: int | None, ranks_per_node: int, machine: int | None = None) -> Room:
        """Return the room in ``gpu_memory`` bytes, or, if None, for one of the ranks of a ``machine``.

        Its bytes are those of this one if they are None too.
        """
        if gpu_memory is not None:
            return Room(USABLE * gpu_memory, is_gpu=True)
        return Room(_OF_MACHINE * (machine or memory_limit()) / ranks_per_node, is_gpu=False)

    def has(self, config: RunConfig, sharding: Sharding, micro_batch: int) -> bool:
        """Return whether a step with ``micro_batch`` samples at a time fits."""
        used = step_memory(config, sharding, micro_batch, copies_ahead=self.is_gpu)
        return used.total <= self.usable


def step_memory(
    config: RunConfig, sharding: Sharding, micro_batch: int, copies_ahead: bool = True
) -> Memory:
    """Return the peak memory at micro batches of ``micro_batch`` samples; fewer than the share accumulate."""
    accumulates = micro_batch < _share(config, sharding)
    return memory(config, sharding, micro_batch, accumulates, copies_ahead=copies_ahead)


def largest_micro_batch(config: RunConfig, sharding: Sharding, room: Room) -> int:
    """Return the largest micro batch that fits, 0 if none does; of any global batch that is large enough."""
    share = _share(config, sharding)
    # memory grows with the micro batch on both sides of the share, where gradients stop to accumulate
    for smallest, end in ((share, _MOST_SAMPLES), (1, share)):
        sizes = range(smallest, end)
        used = memory_at(config, sharding, smallest < share, copies_ahead=room.is_gpu)
        if fitting := bisect_right(sizes, room.usable, key=lambda size: used(size).total):
            return sizes[fitting - 1]
    return 0


def settle_micro_batch(
    config: RunConfig, num_ranks: int, ranks_per_node: int, room: Room, kept: int | None = None
) -> RunConfig:
    """Return ``config`` with a number instead of ``auto``: the one that is ``kept`` if it fits.

    It is 1 if not even a single sample fits.
    """
    if config.parallel.micro_batch_size != AUTO:
        return config
    sharding = Sharding.of(config, num_ranks, ranks_per_node)
    sized = with_parallel(config, compile=config.parallel.compiles(room.is_gpu))
    largest = largest_micro_batch(sized, sharding, room)
    if kept and kept <= largest:
        return with_parallel(config, micro_batch_size=kept)
    limited = with_parallel(config, micro_batch_size=max(1, largest))
    size = BatchShares.of(limited, num_ranks).micro_batch_size
    return with_parallel(config, micro_batch_size=size)


def require_memory_of(world: World, config: RunConfig) -> None:
    """Raise ConfigError if this machine, without GPUs, cannot hold the weights and the optimizer's state.

    The kernel would kill its ranks, or other programs, without a reason in any log.
    """
    if memory_of(world.device) is not None:
        return
    sharding = Sharding.of(config, world.size, world.local_size)
    used = step_memory(config, sharding, 1, copies_ahead=False)
    needed, limit = world.local_size * (used.weights + used.optimizer), memory_limit()
    if needed > limit:
        text = (
            f"weights and optimizer alone need {binary(needed)}, this machine has {binary(limit)} "
            "and no GPU; use GPUs or a smaller model (fluxtrain plan FILE)"
        )
        raise ConfigError("spec.run.model", UNSET, text)


def settle_micro_batch_of(world: World, config: RunConfig, output: Path) -> RunConfig:
    """Return ``config`` as `settle_micro_batch` does, for the smallest GPU; every rank must call it.

    Raises StorageError on all ranks if ``output`` cannot be read or written.
    """
    if config.parallel.micro_batch_size != AUTO:
        return config
    own = Room.of(memory_of(world.device), world.local_size)
    room = replace(own, usable=min(n for (n,) in world.gather_numbers([own.usable])))
    sized = with_parallel(config, compile=compiles(config.parallel, world.device))

    def settled() -> int:
        path = output / FILE
        kept = kept_number(path, _MOST_SAMPLES, "remove it, and the GPUs' memory decides anew")
        found = settle_micro_batch(sized, world.size, world.local_size, room, kept)
        number = found.parallel.most_samples
        if number != kept:
            keep_number(path, number)
        _tell(found, Sharding.of(config, world.size, world.local_size), room, path, kept)
        return number

    return with_parallel(config, micro_batch_size=world.from_main(settled))


def _tell(config: RunConfig, sharding: Sharding, room: Room, path: Path, kept: int | None) -> None:
    number = config.parallel.most_samples
    used = step_memory(config, sharding, number, copies_ahead=room.is_gpu).total
    of = f"{binary(used)} of the {binary(int(room.usable))} that a rank may use"
    if number == kept:
        source = f"of {path}"
    elif kept is None:
        source = f"found, {of}; kept in {path}"
    else:
        source = f"{kept} of {path} does not fit, now {of}"
    if used > room.usable:
        source += "; IT DOES NOT FIT by this estimate: see fluxtrain plan"
    print(f"fluxtrain: micro batch {number} ({source})", file=sys.stderr, flush=True)


def _share(config: RunConfig, sharding: Sharding) -> int:
    """Return the samples of a rank in one step."""
    return -(-config.schedule.global_batch_size // sharding.num_ranks)
