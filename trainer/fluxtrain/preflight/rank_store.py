"""Texts of all ranks in the store of the process group, which works if a link between two ranks does not."""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from fluxtrain.distributed import START_TIMEOUT, World


class RankStore:
    """Waits and exchanges through the store; every rank must make the same calls, each name once."""

    def __init__(self, world: World) -> None:
        """Use the store of the process group of ``world``."""
        self._rank, self._size = world.rank, world.size
        self._store: Store = HashStore()
        if world.size > 1:
            self._store = PrefixStore("preflight", _get_default_store())

    def barrier(self, name: str) -> None:
        """Wait until every rank calls this with ``name``."""
        if self._store.add(f"{name}/count", 1) == self._size:
            self._store.set(f"{name}/all", "")
        self._store.wait([f"{name}/all"], START_TIMEOUT)

    def gather(self, name: str, own: str) -> list[str]:
        """Return the texts of all ranks, by rank."""
        self._store.set(f"{name}/{self._rank}", own)
        self.barrier(name)
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        return [value.decode() for value in self._store.multi_get(keys)]
