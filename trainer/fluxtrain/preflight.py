"""The preflight: before anything is loaded, each rank's device is compared with the median of all ranks.

A rank whose matrix products take too long ends the start, so that its node can be replaced. An all-reduce
ends on all ranks together: its time is printed, but names no rank.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low

import torch
from torch import Tensor

from fluxtrain.contract.run.preflight import PreflightConfig
from fluxtrain.distributed import World
from fluxtrain.errors import UnfitNodeError
from fluxtrain.files import atomic_write
from fluxtrain.progress import Alive

MAX_UNFIT = 3
"""Starts in a row that end because of an unfit node; after them the run goes on."""
_FILE = ".preflight"
_SIDE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices."""
_REDUCED_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
_MAX_REPEATS = 20


@dataclass(frozen=True)
class Verdict:
    """The seconds of a matrix product on each rank, and which ranks are unfit."""

    seconds: list[float]
    factor: float

    @property
    def median(self) -> float:
        """Return the median, of an even number of ranks the lower one."""
        return median_low(self.seconds)

    @property
    def unfit(self) -> list[int]:
        """Return the ranks that are slower than the median by more than the factor."""
        return [r for r, own in enumerate(self.seconds) if own > self.factor * self.median]


def run_preflight(config: PreflightConfig | None, world: World, output: Path, alive: Alive) -> None:
    """Compare all ranks; raise UnfitNodeError on a rank that is too slow. Every rank must call it.

    ``output`` keeps the number of starts in a row that found an unfit node. ``alive`` is called meanwhile.
    """
    if config is None:
        return
    matrix_product = _matrix_product(world.device)
    own = _typical_seconds(matrix_product, world.device, config.seconds / 2, alive)
    verdict = Verdict([row[0] for row in world.gather_numbers([own])], config.factor)
    reduce_seconds = _all_reduce_seconds(world, config.seconds / 2, alive)
    hosts = world.all_gather([socket.gethostname()])
    num_unfit = _count_starts(world, output, verdict)
    goes_on = num_unfit > MAX_UNFIT
    if world.is_main:
        _print_report(verdict, hosts, reduce_seconds, goes_on)
    if world.rank in verdict.unfit and not goes_on:
        raise UnfitNodeError(_describe(verdict, world.rank, hosts[world.rank]))
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
    _timed(work, device)  # loads kernels
    deadline, durations = time.monotonic() + limit, list[float]()
    while not durations or (len(durations) < _MAX_REPEATS and time.monotonic() < deadline):
        durations.append(_timed(work, device))
        alive()
    return median(durations)


def _all_reduce_seconds(world: World, limit: float, alive: Alive) -> float:
    """Return the median duration of an all-reduce over all ranks, all of which repeat it equally often."""
    numbers = torch.ones(_REDUCED_BYTES[world.device.type] // 4, device=world.device)

    def reduce() -> Tensor:
        return world.all_sum(numbers)

    _timed(reduce, world.device)  # connects the ranks
    durations = [_timed(reduce, world.device)]
    slowest = max(row[0] for row in world.gather_numbers(durations))
    for _ in range(min(_MAX_REPEATS - 1, int(limit / max(slowest, 1e-6)) - 1)):
        durations.append(_timed(reduce, world.device))
        alive()
    return median(durations)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _count_starts(world: World, output: Path, verdict: Verdict) -> int:
    """Return how many starts in a row, this one included, found an unfit node; known to all ranks."""
    before = _read(output / _FILE) if world.is_main else 0
    before = int(world.gather_numbers([before])[0][0])
    count = min(before, MAX_UNFIT) + 1 if verdict.unfit else 0
    if world.is_main and count != before:
        with atomic_write(output / _FILE) as partial:
            partial.write_text(f"{count}\n")
    world.barrier()  # it is counted before a rank exits
    return count


def _read(path: Path) -> int:
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0


def _print_report(verdict: Verdict, hosts: list[str], reduce_seconds: float, goes_on: bool) -> None:
    ranks = "1 rank, nothing to compare with" if len(hosts) == 1 else f"{len(hosts)} ranks"
    times = f"matrix product {verdict.median:.3g} s (median), all-reduce {reduce_seconds:.3g} s"
    print(f"preflight: {ranks}: {times}", file=sys.stderr, flush=True)
    for rank in verdict.unfit:
        print(f"preflight: {_describe(verdict, rank, hosts[rank])}", file=sys.stderr, flush=True)
    if goes_on:
        text = f"preflight: an unfit node at {MAX_UNFIT} starts before; training goes on with it"
        print(text, file=sys.stderr, flush=True)


def _describe(verdict: Verdict, rank: int, host: str) -> str:
    own, typical = verdict.seconds[rank], verdict.median
    ratio = own / max(typical, 1e-9)
    return (
        f"rank {rank} on {host} is unfit: a matrix product takes {own:.3g} s, {ratio:.1f} times the median "
        f"of all ranks ({typical:.3g} s); spec.run.preflight.factor is {verdict.factor:g}"
    )
