"""Compare all ranks before anything is loaded; end the start on those that are too slow."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from fluxtrain.contract.run.preflight import PreflightConfig
from fluxtrain.distributed import World
from fluxtrain.errors import UnfitNodeError
from fluxtrain.files import atomic_write
from fluxtrain.preflight.links import measure_links
from fluxtrain.preflight.rank_store import RankStore
from fluxtrain.preflight.timing import timed
from fluxtrain.preflight.verdict import Measured, Verdict
from fluxtrain.progress import Alive

MAX_UNFIT = 3
"""Starts in a row that end because of an unfit node; after them the run goes on."""
_FILE = ".preflight"
_SIDE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices."""
_REDUCED_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
_MAX_REPEATS = 20
_MAX_LINKS = 10
"""Slow links that are printed."""


def run_preflight(config: PreflightConfig | None, world: World, output: Path, alive: Alive) -> None:
    """Compare all ranks; raise UnfitNodeError on a rank that is too slow. Every rank must call it.

    ``output`` keeps the number of starts in a row that found an unfit node. ``alive`` is called meanwhile.
    """
    if config is None:
        return
    store, limit = RankStore(world), config.seconds / 2
    own = Measured(
        socket.gethostname(),
        _typical_seconds(_matrix_product(world.device), world.device, limit, alive),
        measure_links(world, store, limit, alive),
        _read(output / _FILE) if world.is_main else 0,
    )
    ranks = [Measured.from_json(text) for text in store.gather("measured", own.to_json())]
    verdict = Verdict(ranks, config.factor)
    goes_on = _count_starts(world, store, output, verdict) > MAX_UNFIT
    # an all-reduce over a link that does not work would never end
    reduce_seconds = None if verdict.timed_out else _all_reduce_seconds(world, limit, alive)
    if world.is_main:
        _print_report(verdict, world, reduce_seconds, goes_on)
    if world.rank in verdict.unfit and not goes_on:
        raise UnfitNodeError(verdict.describe(world.rank))
    if verdict.unfit and not goes_on:
        world.barrier()  # until the agent of this rank learns that the node has left


def _matrix_product(device: torch.device) -> Callable[[], Tensor]:
    side = _SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.rand(side, side, generator=generator, device=device, dtype=dtype)
    return lambda: matrix @ matrix


def _typical_seconds(
    work: Callable[[], object], device: torch.device, limit: float, alive: Alive
) -> float:
    """Return the median duration of ``work``, repeated for at most ``limit`` seconds but at least once."""
    timed(work, device)  # loads kernels
    deadline, durations = time.monotonic() + limit, list[float]()
    while not durations or (len(durations) < _MAX_REPEATS and time.monotonic() < deadline):
        durations.append(timed(work, device))
        alive()
    return median(durations)


def _all_reduce_seconds(world: World, limit: float, alive: Alive) -> float:
    """Return the median duration of an all-reduce over all ranks, all of which repeat it equally often."""
    numbers = torch.ones(_REDUCED_BYTES[world.device.type] // 4, device=world.device)

    def reduce() -> Tensor:
        return world.all_sum(numbers)

    timed(reduce, world.device)  # connects the ranks
    durations = [timed(reduce, world.device)]
    slowest = max(row[0] for row in world.gather_numbers(durations))
    for _ in range(min(_MAX_REPEATS - 1, int(limit / max(slowest, 1e-6)) - 1)):
        durations.append(timed(reduce, world.device))
        alive()
    return median(durations)


def _count_starts(world: World, store: RankStore, output: Path, verdict: Verdict) -> int:
    """Return how many starts in a row, this one included, found an unfit node; known to all ranks."""
    before = verdict.ranks[0].num_unfit_before
    count = min(before, MAX_UNFIT) + 1 if verdict.unfit else 0
    if world.is_main and count != before:
        with atomic_write(output / _FILE) as partial:
            partial.write_text(f"{count}\n")
    store.barrier("counted")  # before a rank exits
    return count


def _read(path: Path) -> int:
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0


def _print_report(
    verdict: Verdict, world: World, reduce_seconds: float | None, goes_on: bool
) -> None:
    size, links = len(verdict.ranks), verdict.slow_links
    ranks = "1 rank, nothing to compare with" if size == 1 else f"{size} ranks"
    reduced = "not run" if reduce_seconds is None else f"{reduce_seconds:.3g} s"
    times = f"matrix product {verdict.product_median:.3g} s (median), all-reduce {reduced}"
    _print(f"{ranks}: {times}")
    _print(_about_links(verdict, world))
    for rank in verdict.unfit:
        _print(verdict.describe(rank))
    for link in links[:_MAX_LINKS]:
        _print(f"{verdict.describe_link(link)}; no node is at fault for certain")
    if len(links) > _MAX_LINKS:
        _print(f"... and {len(links) - _MAX_LINKS} more")
    if goes_on:
        _print(f"an unfit node at {MAX_UNFIT} starts before; training goes on with it")


def _about_links(verdict: Verdict, world: World) -> str:
    nodes = world.num_nodes
    if not verdict.links:
        return "1 node: no links to other nodes"
    if verdict.exchange_median == math.inf:
        return f"{nodes} nodes: most ranks cannot exchange with any other node, so no node is named for it"
    text = f"{nodes} nodes: exchange with another node {verdict.exchange_median:.3g} s (median)"
    if not verdict.can_blame_links:
        return f"{text}; with fewer than 3 nodes the slow end of a link cannot be told"
    return text


def _print(text: str) -> None:
    print(f"preflight: {text}", file=sys.stderr, flush=True)
