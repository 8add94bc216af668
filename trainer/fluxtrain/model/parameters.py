"""Parameter counts of the transformer, without creating it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.tensor_names import entries


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of one block of each kind and of the rest, and the number of blocks."""

    double_block: int
    single_block: int
    rest: int
    depth: int
    depth_single_blocks: int

    @property
    def total(self) -> int:
        """Return the parameters of the whole model."""
        blocks = self.depth * self.double_block + self.depth_single_blocks * self.single_block
        return blocks + self.rest

    @property
    def blocks_in_order(self) -> list[int]:
        """Return the parameters of the first two blocks of each kind, enough for the largest pair."""
        double, single = min(self.depth, 2), min(self.depth_single_blocks, 2)
        return [self.double_block] * double + [self.single_block] * single

    @property
    def largest_pair(self) -> int:
        """Return the most parameters that two consecutive blocks have: one in use, one being gathered."""
        blocks = self.blocks_in_order
        pairs = [a + b for a, b in pairwise(blocks)]
        return max(pairs, default=sum(blocks))

    @property
    def largest_block(self) -> int:
        """Return the parameters of the largest block."""
        return max(self.blocks_in_order, default=0)


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Return the parameter counts of ``config``'s model."""
    one_of_each = config.model_copy(update={"depth": 1, "depth_single_blocks": 1})
    counts = Counter[str]()
    for entry in entries(one_of_each):
        counts[entry.name.partition(".")[0]] += prod(entry.shape)
    double, single = counts.pop("double_blocks"), counts.pop("single_blocks")
    return ParameterCounts(double, single, counts.total(), config.depth, config.depth_single_blocks)
