"""Which ranks are unfit: slower than the median of all ranks, in matrix products or with all partners."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low

_MIN_PARTNERS = 2
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
        """Return all links that were measured."""
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
        is_enough = all(len(links) >= _MIN_PARTNERS for links in self._links_of)
        return is_enough and self.exchange_median < math.inf

    @cached_property
    def timed_out(self) -> bool:
        """Return whether an exchange did not end in time."""
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
        """Return a sentence about an unfit rank."""
        limit = f"spec.run.preflight.factor is {self.factor:g}"
        return f"rank {rank} on {self.ranks[rank].host} is unfit: {self.unfit[rank]}; {limit}"

    def describe_link(self, link: Link) -> str:
        """Return a sentence about a slow link."""
        first, second = (
            f"rank {rank} on {self.ranks[rank].host}" for rank in (link.first, link.second)
        )
        if link.seconds == math.inf:
            return f"an exchange between {first} and {second} did not end in time"
        times = _compared(link.seconds, self.exchange_median)
        return f"an exchange between {first} and {second} takes {times}"

    @cached_property
    def _links_of(self) -> list[list[Link]]:
        """Return the links of each rank."""
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
