"""Parameter counts of the transformer, also without creating it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from torch import nn

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.adapted_layers import adapters_of_blocks, count_adapter_parameters
from fluxtrain.model.offloaded_blocks import offloaded_blocks
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
    def blocks(self) -> tuple[int, ...]:
        """Return the parameters of each block, double blocks first."""
        return (self.double_block,) * self.depth + (self.single_block,) * self.depth_single_blocks

    @property
    def total(self) -> int:
        """Return the parameters of the whole model."""
        return sum(self.blocks) + self.rest


@dataclass(frozen=True)
class TrainedCounts:
    """Trained parameters of each block, double blocks first, and of the rest: CLIP's adapters, or all."""

    blocks: tuple[int, ...]
    rest: int
    final_layer: int
    """Those of the rest that come after the blocks."""

    @property
    def total(self) -> int:
        """Return all of them."""
        return sum(self.blocks) + self.rest

    @property
    def groups(self) -> int:
        """Return the number of blocks, and the rest, that train something: FSDP2 reduces each by itself."""
        return sum(count > 0 for count in (*self.blocks, self.rest))


def count_trained(
    model: ModelConfig, adapter: AdapterConfig | None, num_shards: int = 1
) -> TrainedCounts:
    """Return the trained parameters: those of ``adapter`` only, if there is one; padded as below."""
    if adapter is not None:
        blocks = adapters_of_blocks(model, adapter, num_shards)
        clip = count_adapter_parameters(model, adapter, num_shards) - sum(blocks)
        return TrainedCounts(blocks, clip, 0)
    counts = count_parameters(model, num_shards)
    return TrainedCounts(counts.blocks, counts.rest, counts.final_layer)


def frozen_blocks(config: RunConfig, counts: ParameterCounts) -> list[int]:
    """Return the frozen parameters on the device of each block of ``counts``: none if all are trained."""
    if config.adapter is None:
        return [0] * len(counts.blocks)
    offloaded = set(offloaded_blocks(config))
    return [0 if index in offloaded else size for index, size in enumerate(counts.blocks)]


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


def described_parameters(model: nn.Module) -> str:
    """Return how many parameters ``model`` has and, of adapters, how many of them are trained."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters" if trained == total else f"{trained:,} of {total:,} parameters"
