"""Parameter counts of the transformer, without creating it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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
    final_layer: int
    """Those of the rest that come after the blocks."""

    @property
    def total(self) -> int:
        """Return the parameters of the whole model."""
        blocks = self.depth * self.double_block + self.depth_single_blocks * self.single_block
        return blocks + self.rest


def count_parameters(config: ModelConfig, num_shards: int = 1) -> ParameterCounts:
    """Return the parameter counts of ``config``'s model.

    With ``num_shards`` the rows of each tensor are rounded up to a multiple of it, as FSDP2 pads them.
    """
    one_of_each = config.model_copy(update={"depth": 1, "depth_single_blocks": 1})
    counts = Counter[str]()
    for entry in entries(one_of_each):
        rows, *columns = entry.shape
        padded = -(-rows // num_shards) * num_shards
        counts[entry.name.partition(".")[0]] += padded * prod(columns)
    double, single = counts.pop("double_blocks"), counts.pop("single_blocks")
    depths = config.depth, config.depth_single_blocks
    return ParameterCounts(double, single, counts.total(), *depths, counts["final_layer"])
