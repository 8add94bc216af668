"""Compare all ranks before anything is loaded; end the start on those that are too slow."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import median, median_low
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store

from fluxtrain.contract.run.config import PreflightConfig
from fluxtrain.errors import UnfitNodeError
from fluxtrain.parallel.distributed import START_TIMEOUT, World
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress import Alive

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
            partial.write_text(f"{count}\n", encoding="utf-8")
    store.barrier("counted")  # before a rank exits
    return count


def _read(path: Path) -> int:
    try:
        return max(0, int(path.read_text(encoding="utf-8")))
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
        _print(f"an unfit node at {MAX_UNFIT} starts before; training continues with it")


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


# How long this rank takes to exchange data with ranks of other nodes, one after the other.
#
# Each pair has a process group of its own, so one that never ends disturbs no other.


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
                    None if group is None else _exchange_seconds(world, peer, group, limit)
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


def _exchange_seconds(
    world: World, peer: int, group: dist.ProcessGroup, limit: float
) -> float | None:
    """Return the shortest of some exchanges with ``peer``, None if they do not end in time.

    They run in a thread: the first call of NCCL with a peer has no time limit.
    """
    device, measured = world.device, list[float]()

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        with suppress(RuntimeError):
            work = exchange(device, peer, group)
            timed(work, device)  # connects
            measured.append(min(timed(work, device) for _ in range(_REPEATS)))
            dist.destroy_process_group(group)

    thread = threading.Thread(target=run, name="preflight", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive() and device.type == "cuda":
        _abort_process_group(group)  # ends the kernel; gloo's waits end by themselves
    return measured[0] if measured else None


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


def timed(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


_MIN_PARTNERS = 3
"""Nodes that each one meets, if there are as many: two of them may be at fault without accusing it."""


def num_rounds(num_nodes: int) -> int:
    """Return the number of rounds, which grows with the logarithm of the nodes."""
    if num_nodes < 2:
        return 0
    rests = num_nodes % 2  # of an odd number one node rests in each round
    wanted = max(_MIN_PARTNERS, math.ceil(math.log2(num_nodes))) + rests
    return min(wanted, num_nodes - 1 + rests)


def partner(node: int, num_nodes: int, turn: int) -> int | None:
    """Return the node that ``node`` meets in round ``turn``, another one in each; None if it rests.

    The circle method: in round r the nodes i and j meet if i + j = r, modulo the nodes but the last. The
    rounds are spread, so that partners are near and far in the order of the ranks.
    """
    last = num_nodes - 1 + num_nodes % 2  # of an odd number nobody: its partner rests
    r = turn * last // num_rounds(num_nodes)
    if node == last:
        return r * (last + 1) // 2 % last
    found = (r - node) % last
    if found == node:
        found = last
    return found if found < num_nodes else None


_VERDICT_MIN_PARTNERS = 2
"""With fewer a slow link cannot be told from its other end."""


@dataclass(frozen=True)
class Measured:
    """What one rank measured."""

    host: str
    product_seconds: float
    """Of a matrix product."""
    exchanges: Mapping[int, float | None] = field(default_factory=dict)
    """Seconds of an exchange with ranks of other nodes; None if it did not end in time."""
    num_unfit_before: int = 0
    """Starts in a row before this one that found an unfit node; of rank 0."""

    def to_json(self) -> str:
        """Return it as the other ranks read it."""
        exchanges = list(self.exchanges.items())
        return json.dumps([self.host, self.product_seconds, exchanges, self.num_unfit_before])

    @staticmethod
    def from_json(text: str) -> Measured:
        """Return what another rank of the same process group wrote."""
        host, product, exchanges, num_unfit = json.loads(text)
        return Measured(host, product, dict(exchanges), num_unfit)


@dataclass(frozen=True)
class Link:
    """The link between two ranks of different nodes."""

    first: int
    second: int
    seconds: float
    """Of an exchange, as the slower end measured it; infinite if it did not end in time."""


@dataclass(frozen=True)
class Verdict:
    """All ranks compared with their median."""

    ranks: Sequence[Measured]
    factor: float

    @cached_property
    def product_median(self) -> float:
        """Return the median of the matrix products, of an even number of ranks the lower one."""
        return median_low(rank.product_seconds for rank in self.ranks)

    @cached_property
    def links(self) -> list[Link]:
        return [
            Link(first, second, max(self._seconds(first, second), self._seconds(second, first)))
            for first, rank in enumerate(self.ranks)
            for second in rank.exchanges
            if first < second
        ]

    @cached_property
    def exchange_median(self) -> float:
        """Return the median over all ranks of the exchange with the fastest partner; infinite without."""
        fastest = [min(link.seconds for link in links) for links in self._links_of if links]
        return median_low(fastest) if fastest else math.inf

    @cached_property
    def can_blame_links(self) -> bool:
        """Return whether the slow end of a link can be told: most ranks can exchange with somebody."""
        is_enough = all(len(links) >= _VERDICT_MIN_PARTNERS for links in self._links_of)
        return is_enough and self.exchange_median < math.inf

    @cached_property
    def timed_out(self) -> bool:
        return any(link.seconds == math.inf for link in self.links)

    @cached_property
    def unfit(self) -> dict[int, str]:
        """Return the ranks that are unfit, with what is slow compared with the median."""
        found = ((rank, "; ".join(self._faults(rank))) for rank in range(len(self.ranks)))
        return {rank: text for rank, text in found if text}

    @cached_property
    def slow_links(self) -> list[Link]:
        """Return the slow links of which neither end is unfit."""
        return [
            link
            for link in self.links
            if self._is_slow(link) and not {link.first, link.second} & self.unfit.keys()
        ]

    def describe(self, rank: int) -> str:
        limit = f"spec.run.preflight.factor is {self.factor:g}"
        return f"rank {rank} on {self.ranks[rank].host} is unfit: {self.unfit[rank]}; {limit}"

    def describe_link(self, link: Link) -> str:
        first, second = (
            f"rank {rank} on {self.ranks[rank].host}" for rank in (link.first, link.second)
        )
        if link.seconds == math.inf:
            return f"an exchange between {first} and {second} did not end in time"
        times = _compared(link.seconds, self.exchange_median)
        return f"an exchange between {first} and {second} takes {times}"

    @cached_property
    def _links_of(self) -> list[list[Link]]:
        found: list[list[Link]] = [[] for _ in self.ranks]
        for link in self.links:
            found[link.first].append(link)
            found[link.second].append(link)
        return found

    def _seconds(self, rank: int, partner: int) -> float:
        seconds = self.ranks[rank].exchanges.get(partner)
        return math.inf if seconds is None else seconds

    def _is_slow(self, link: Link) -> bool:
        return link.seconds == math.inf or link.seconds > self.factor * self.exchange_median

    def _faults(self, rank: int) -> Iterator[str]:
        product = self.ranks[rank].product_seconds
        if product > self.factor * self.product_median:
            yield f"a matrix product takes {_compared(product, self.product_median)}"
        links = self._links_of[rank]
        if not (self.can_blame_links and all(map(self._is_slow, links))):
            return
        fastest = min(link.seconds for link in links)
        if fastest == math.inf:
            yield f"no exchange with ranks of {len(links)} other nodes ended in time"
        else:
            times = _compared(fastest, self.exchange_median)
            yield f"an exchange with each of {len(links)} other nodes takes at least {times}"


def _compared(seconds: float, median: float) -> str:
    ratio = seconds / max(median, 1e-9)
    return f"{seconds:.3g} s, {ratio:.1f} times the median of all ranks ({median:.3g} s)"
