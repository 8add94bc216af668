"""Whether all nodes of a run emptied their page caches before it: their init containers leave the time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fluxtrain.contract.launch import ENV_FLUSHED
from fluxtrain.distributed import World


def all_flushed(world: World, environment: Mapping[str, str]) -> float | None:
    """Return the Unix time when the last node had flushed, None unless all have; every rank must call it."""
    own = [repr(flushed(environment))] if world.local_rank == 0 else []
    times = world.all_gather(own)
    return None if "None" in times else max(map(float, times))


def flushed(environment: Mapping[str, str]) -> float | None:
    """Return the Unix time when this node's caches were flushed, None if they were not."""
    name = environment.get(ENV_FLUSHED)
    try:
        text = Path(name).read_text().strip() if name else ""
    except OSError:
        return None
    return float(text) if text.isascii() and text.isdecimal() else None
