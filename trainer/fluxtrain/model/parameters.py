"""How many parameters the transformer has, block by block, without building it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.embed import TIMESTEP_DIM


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of one block of each kind and of all the rest, and how many blocks there are."""

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
        """Return the parameters of the first two blocks of each kind, enough to find the largest pair."""
        double, single = min(self.depth, 2), min(self.depth_single_blocks, 2)
        return [self.double_block] * double + [self.single_block] * single

    @property
    def largest_pair(self) -> int:
        """Return the most parameters that two blocks in a row have: one at work, one on its way."""
        blocks = self.blocks_in_order
        pairs = [a + b for a, b in pairwise(blocks)]
        return max(pairs, default=sum(blocks))

    @property
    def largest_block(self) -> int:
        """Return the parameters of the largest block."""
        return max(self.blocks_in_order, default=0)


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Return the parameter counts of ``config``'s model."""
    hidden, mlp = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
    norms = 2 * (hidden // config.num_heads)  # one scale each for queries and keys
    stream = (
        _linear(hidden, 6 * hidden)  # two modulations
        + _linear(hidden, 3 * hidden)
        + norms
        + _linear(hidden, hidden)
        + _linear(hidden, mlp)
        + _linear(mlp, hidden)
    )
    single = (
        _linear(hidden, 3 * hidden)  # one modulation
        + _linear(hidden, 3 * hidden + mlp)
        + norms
        + _linear(hidden + mlp, hidden)
    )
    return ParameterCounts(
        2 * stream, single, _rest(config), config.depth, config.depth_single_blocks
    )


def _rest(config: ModelConfig) -> int:
    hidden = config.hidden_size
    times = 2 if config.guidance_embed else 1
    return (
        _linear(config.in_channels, hidden)
        + _linear(config.context_in_dim, hidden)
        + times * _embedder(TIMESTEP_DIM, hidden)
        + _embedder(config.vec_in_dim, hidden)
        + _linear(hidden, 2 * hidden)
        + _linear(hidden, config.in_channels)
    )


def _embedder(in_dim: int, hidden: int) -> int:
    return _linear(in_dim, hidden) + _linear(hidden, hidden)


def _linear(in_dim: int, out_dim: int) -> int:
    return in_dim * out_dim + out_dim
