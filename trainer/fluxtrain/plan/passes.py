"""The memory of one rank along a forward and a backward pass: activations shrink while gradients grow.

FSDP2 gathers a block's weights before its pass, and the next one's ahead. In the backward pass a block's
gradients are copied for their reduction, and the copy is kept until those of the next block exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.model.activations import BYTES, first_layers_bytes, last_layers_bytes
from fluxtrain.model.adapted_layers import (
    block_number,
    dora_rows,
    has_small_base,
    linear_layers,
)
from fluxtrain.model.adapter_moments import with_adapters
from fluxtrain.model.block_moments import (
    BlockMoments,
    Moment,
    double_block_moments,
    single_block_moments,
)
from fluxtrain.model.clip_cost import frozen_clip_parameters, saved_by_clip
from fluxtrain.model.offloaded_blocks import offloaded_blocks
from fluxtrain.model.parameters import count_parameters, count_trained, frozen_blocks
from fluxtrain.model.recomputation import is_recomputed
from fluxtrain.plan.batch import held_bytes
from fluxtrain.plan.update import update_bytes

_FLOAT32 = 4


@dataclass(frozen=True)
class InUse:
    """Bytes in use at one moment, beside weights and optimizer state."""

    gradients: int
    """Reduced gradients, in the data type of the weights."""
    gathered: int
    """Gathered weights, and gradients that are being reduced."""
    activations: int
    """Saved activations, and what the current block computes, its weights' gradients included."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.gradients + self.gathered + self.activations


@dataclass(frozen=True)
class _Block:
    """One block: its kind and its parameters."""

    moments: BlockMoments
    frozen: int
    """Frozen parameters on the device, with FSDP2's padding."""
    gathered: int
    """Parameters that are gathered, padded too."""
    trained: int
    padded: int
    """Trained ones with padding, whose gradients are reduced."""
    recomputed: bool


class Passes:
    """A forward and a backward pass of one micro batch."""

    def __init__(
        self, config: RunConfig, sharding: Sharding, micro_batch: int, accumulates: bool
    ) -> None:
        """Plan the passes of ``micro_batch`` samples; with ``accumulates`` all gradients exist before."""
        self._micro_batch, self._accumulates = micro_batch, accumulates
        self._shards = sharding.dp_shard
        self._width, self._reduce = (
            BYTES[dtype] for dtype in (config.precision.compute, config.precision.reduce)
        )
        self._is_sharded = sharding.num_ranks > 1
        self._weight = config.precision.weight_bytes
        self._gradient = self._weight
        if self._is_sharded:  # FSDP2 casts down at once, and up late
            self._gradient = min(self._width, self._reduce)
        self._reshards = config.parallel.reshards
        # with replicas the gradients of another dtype are kept until backward ends, as they are all-reduced
        self._keeps_reduced = sharding.dp_replicate > 1 and self._reduce != self._weight
        self._plain = count_parameters(config.model)
        self._trained = count_trained(config.model, config.adapter)
        self._trained_padded = count_trained(config.model, config.adapter, self._shards)
        self._is_frozen = config.adapter is not None
        self._padded = count_parameters(config.model, self._shards)
        self._offloaded = frozenset(offloaded_blocks(config))
        layers = linear_layers(config.model) if has_small_base(config) else {}
        sizes = [(sum(rows for _, rows in parts), width) for width, parts in layers.values()]
        self._in_8_bits = sum(
            -(-rows // self._shards) * self._shards * width
            for name, (rows, width) in zip(layers, sizes, strict=True)
            if block_number(name, config.model) not in self._offloaded
        )
        converted = max((rows * width for rows, width in sizes), default=0)
        converts = not self._is_sharded or self._offloaded
        self._converted = self._width * converted if converts else 0
        """Weights of the layer that computes, in the compute dtype; those that are gathered are in it."""
        self._row_bytes = _FLOAT32 * (sum(rows for rows, _ in sizes) + dora_rows(config))
        """A number for each row of a layer, of fp8 and of DoRA, on each rank."""
        self._blocks = list(self._in_order(config))
        of_sample = first_layers_bytes(config) + held_bytes(config) + saved_by_clip(config)
        self._first = micro_batch * of_sample
        clip = config.model, config.adapter
        self._clip = frozen_clip_parameters(*clip, self._shards)
        self._clip_gathered = 0 if self._reshards else self._clip + self._trained_padded.rest
        self._update = update_bytes(config, self._shards)
        self._last = micro_batch * last_layers_bytes(config)

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of this rank's shard of the trained weights, and of their gradients."""
        return self._shard(self._trained_padded.total)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of this rank's shard of one float32 value per parameter."""
        return _FLOAT32 * self._trained_padded.total // self._shards

    @property
    def is_rounded(self) -> bool:
        """Return whether trained weights exist in the compute dtype too: on a single rank."""
        return not self._is_sharded and self._width != self._weight

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of this rank's weights: as they are trained, and frozen ones as computed with.

        A single rank keeps the trained ones in the compute dtype too.
        """
        rounded = self._width * self._trained.total if self.is_rounded else 0
        frozen = sum(block.frozen for block in self._blocks) + self._padded.rest + self._clip
        frozen *= self._width if self._is_frozen else 0
        frozen -= (self._width - 1) * self._in_8_bits
        return self.shard_bytes + rounded + frozen // self._shards + self._row_bytes

    def moments(self) -> Iterator[InUse]:
        """Yield the moments of which one is the peak."""
        kept = [self._kept(block) for block in self._blocks]
        yield from self._forward(sum(kept))
        reduced = self.shard_bytes if self._accumulates else 0
        for number in reversed(range(len(self._blocks))):
            saved = self._first + sum(kept[: number + 1])
            yield from self._backward(number, saved, reduced)
            if not self._accumulates:
                reduced += self._shard(self._blocks[number].padded)
        yield from self._end(reduced)

    def _in_order(self, config: RunConfig) -> Iterator[_Block]:
        fraction = config.parallel.activation_checkpointing
        kinds = [double_block_moments(config)] * self._padded.depth
        kinds += [single_block_moments(config)] * self._padded.depth_single_blocks
        frozen = frozen_blocks(config, self._padded)
        for index, moments in enumerate(kinds):
            trained = self._trained_padded.blocks[index]
            yield _Block(
                with_adapters(moments, config, index),
                frozen[index],
                frozen[index] + trained,
                self._trained.blocks[index],
                trained,
                is_recomputed(index, fraction),
            )

    def _gradients(self, block: _Block, moment: Moment) -> int:
        """Return the parameters of ``block`` whose gradients exist at ``moment``."""
        return min(moment.gradients, block.trained)

    def _kept(self, block: _Block) -> int:
        """Return the bytes that ``block`` keeps for its backward pass."""
        moments = block.moments
        return self._micro_batch * (moments.inputs if block.recomputed else moments.saved)

    def _forward(self, kept: int) -> Iterator[InUse]:
        """Yield the end of the last block's forward pass, and that of the whole."""
        gradients = self.shard_bytes if self._accumulates else 0
        saved = self._first + kept
        if self._blocks:
            last = self._blocks[-1]
            live = last.moments.saved - last.moments.inputs if last.recomputed else 0
            live += last.moments.forward.activations
            gathered = (
                self._rest() + self._weights(last) + self._all_gathered(len(self._blocks) - 1)
            )
            gathered += self._buffer(last)  # kept until the next one is gathered
            yield InUse(gradients, gathered, saved + self._micro_batch * live)
        yield InUse(gradients, self._rest(), saved + self._last)

    def _backward(self, number: int, saved: int, reduced: int) -> Iterator[InUse]:
        """Yield the moments of the backward pass of block ``number``; ``saved`` includes what it saved."""
        block = self._blocks[number]
        moments = block.moments
        gathered = self._rest() + self._weights(block) + self._all_gathered(number)
        gathered += self._in_reduction(number)
        saved += (
            self._gradient * self._trained.final_layer
        )  # its gradients, reduced with the rest's
        incoming = saved + self._micro_batch * moments.inputs  # the gradient of its output
        copied = self._buffer(block) if self._reshards else 0
        yield InUse(reduced, gathered + copied, incoming)
        if number > 0 and self._reshards:  # gathered ahead
            gathered += self._buffer(self._blocks[number - 1])
        live = 0
        if block.recomputed:
            live = moments.saved - moments.inputs
            again = live + moments.forward.activations
            yield InUse(reduced, gathered, incoming + self._micro_batch * again)
        for moment in moments.backward:
            used = self._micro_batch * (live + moment.activations)
            yield InUse(
                reduced, gathered, saved + used + self._gradient * self._gradients(block, moment)
            )
        left = incoming - self._kept(block)
        yield InUse(reduced, gathered, left + self._gradient * block.trained)

    def _in_reduction(self, number: int) -> int:
        """Return the gradients of the block after block ``number`` as they are reduced, and what is kept."""
        later = [block.padded for block in self._blocks[number + 1 :]]
        kept = sum(later) * self._reduce // self._shards if self._keeps_reduced else 0
        return kept + (self._reduction(later[0]) if later else 0)

    def _end(self, reduced: int) -> Iterator[InUse]:
        """Yield the end of the backward pass, and the optimizer step."""
        rest = self._trained.rest * self._gradient
        first = self._reduction(self._blocks[0].padded) if self._blocks else 0
        yield InUse(reduced, self._rest() + first, self._first + rest)
        yield InUse(self.shard_bytes, 0, self._first + self._update)

    def _shard(self, parameters: int) -> int:
        return self._weight * parameters // self._shards

    def _rest(self) -> int:
        """Return the gathered weights outside the blocks, which stay gathered."""
        rest = self._padded.rest + (self._clip_gathered if self._is_frozen else 0)
        return self._converted + (self._width * rest if self._is_sharded else 0)

    def _weights(self, block: _Block) -> int:
        """Return the gathered weights of ``block``, 0 if all blocks stay gathered."""
        return self._width * block.gathered if self._is_sharded and self._reshards else 0

    def _all_gathered(self, number: int) -> int:
        """Return the weights of blocks that stay gathered: up to block ``number``, as backward frees them."""
        if self._reshards or not self._is_sharded:
            return 0
        return self._width * sum(block.gathered for block in self._blocks[: number + 1])

    def _buffer(self, block: _Block) -> int:
        """Return the buffer into which the weights of ``block`` are gathered; a shard alone needs none."""
        return self._width * block.gathered if self._is_sharded and self._shards > 1 else 0

    def _reduction(self, parameters: int) -> int:
        """Return the copy of a block's gradients from which they are reduced."""
        return self._reduce * parameters if self._is_sharded else 0
