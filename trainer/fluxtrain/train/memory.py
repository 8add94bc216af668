"""Peak memory of one rank in an optimizer step with FSDP2 or HSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import is_quantized
from fluxtrain.data.order import BatchShares
from fluxtrain.encode.files import encoder_bytes
from fluxtrain.model.clip import frozen_clip_parameters, saved_by_clip
from fluxtrain.model.cost import (
    BYTES,
    BlockMoments,
    Moment,
    block_moments,
    buffer_sizes,
    first_layers_bytes,
    host_sizes,
    is_recomputed,
    last_layers_bytes,
    offloaded_blocks,
    with_adapters,
)
from fluxtrain.model.layers import (
    block_number,
    dora_rows,
    entries,
    has_small_base,
    linear_layers,
    padded,
    values_of_shard,
)
from fluxtrain.model.parameters import (
    count_parameters,
    count_trained,
    frozen_blocks,
    gathered_in_fp8,
)
from fluxtrain.optim.optimizer import MOST_VALUES
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.node_memory import quantized_bytes
from fluxtrain.parallel.traffic import all_reduces_each
from fluxtrain.runtime.devices import memory_of


class Memory(BaseModel):
    """Memory of one GPU at the peak of a step, in bytes: what exists at that moment."""

    model_config = ConfigDict(frozen=True)

    weights: int
    """This rank's shard of the weights, in ``precision.weights``; a single rank has those of float32 in the
    compute dtype too."""
    gradients: int
    """This rank's shard of the gradients that are reduced already, in ``precision.weights``."""
    optimizer: int
    """This rank's shard of the optimizer's state, float32 or, of ``adamw_8bit``, mostly of 8 bits."""
    gathered: int
    """Weights of gathered blocks, in the compute dtype, and gradients that are being reduced."""
    activations: int
    """Saved activations of one micro batch, and the gradients that a block computes from them; what a step
    of weights in bfloat16 computes in float32."""
    encoders: int
    """Frozen text encoders and autoencoder, if images are encoded during training."""
    copied_ahead: int
    """The next micro batch, and the first batch of an evaluation, which a GPU copies while it computes."""
    offload_buffers: int
    """Frozen weights of blocks that are in host memory: of the one that computes, and of the next."""
    total: int
    """Sum of the above."""


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of one parameter in a checkpoint: its weight, and the optimizer's state."""
    return round(config.precision.weight_bytes + config.optim.state_bytes)


def memory(
    config: RunConfig,
    sharding: Sharding,
    micro_batch: int,
    accumulates: bool,
    *,
    copies_ahead: bool = True,
) -> Memory:
    """Return the peak memory of one rank at micro batches of ``micro_batch`` samples.

    With ``accumulates`` a step has several of them: all gradients exist when the later ones begin. Only GPUs
    copy batches ahead.
    """
    return memory_at(config, sharding, accumulates, copies_ahead=copies_ahead)(micro_batch)


def memory_at(
    config: RunConfig, sharding: Sharding, accumulates: bool, *, copies_ahead: bool = True
) -> Callable[[int], Memory]:
    """Return `memory` as a function of the micro batch, which is quick."""
    passes = Passes(config, sharding, 1, accumulates)
    # one that averages has weights next to the parameters, which are float32
    has_more_weights = config.optim.kind.averages and not passes.is_rounded
    values = config.optim.state_values + has_more_weights
    fixed = {
        "weights": passes.weight_bytes,
        "optimizer": values * passes.state_bytes + quantized_bytes(config, sharding.dp_shard),
        "encoders": encoder_bytes(config),
        "offload_buffers": sum(buffer_sizes(host_sizes(config))),
    }
    copied = copies_ahead * copied_bytes(config)

    def at(micro_batch: int) -> Memory:
        peak = max(passes.of(micro_batch).moments(), key=lambda moment: moment.total)
        evaluated = config.evaluation.batch_size if config.evaluation.is_on else 0
        parts = {
            **fixed,
            "gradients": peak.gradients,
            "gathered": peak.gathered,
            "activations": peak.activations,
            "copied_ahead": copied * (micro_batch + evaluated),
        }
        return Memory(**parts, total=sum(parts.values()))

    return at


def forward_memory(config: RunConfig, sharding: Sharding, batch: int) -> int:
    """Return the most memory of one rank in passes of ``batch`` samples that keep nothing for a backward one.

    A block counts as if it kept what it saves in training, until its end. A single rank has its weights in
    the compute dtype alone.
    """
    passes = Passes(config.model_copy(update={"adapter": None}), sharding, batch, accumulates=False)
    weights = passes.weight_bytes - passes.shard_bytes * passes.is_rounded
    return weights + max(moment.total for moment in passes.without_backward())


# The memory of one rank along a forward and a backward pass: activations shrink while gradients
# grow.
#
# FSDP2 gathers a block's weights before its pass, and the next one's ahead. In the backward pass a
# block's gradients are copied for their reduction, and the copy is kept until those of the next
# block exist.


_FLOAT32 = 4


@dataclass(frozen=True)
class InUse:
    """Bytes in use at one moment, beside weights and optimizer state."""

    gradients: int
    """Reduced gradients, in the data type of the weights, or of one micro batch as they come."""
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
    """Bytes of the parameters as they are gathered, padded too."""
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
        self._kept_gradient = self._weight
        if self.is_rounded and not accumulates and config.optim.kind.takes_rounded_gradients:
            self._gradient = self._kept_gradient = self._width
        self._reshards = config.parallel.reshards
        # with replicas the gradients of another dtype are kept until backward ends, as they are all-reduced
        self._keeps_reduced = sharding.dp_replicate > 1 and self._reduce != self._weight
        self._trained = count_trained(config.model, config.adapter)
        self._trained_padded = count_trained(config.model, config.adapter, self._shards)
        self._is_frozen = config.adapter is not None
        self._padded = count_parameters(config.model, self._shards)
        self._offloaded = frozenset(offloaded_blocks(config))
        layers = linear_layers(config.model) if has_small_base(config) else {}
        sizes = [(sum(rows for _, rows in parts), width) for width, parts in layers.values()]
        self._in_8_bits = sum(
            padded(size, self._shards)
            for name, size in zip(layers, sizes, strict=True)
            if block_number(name, config.model) not in self._offloaded
        )
        converted = max((rows * width for rows, width in sizes), default=0)
        converts = not self._is_sharded or self._offloaded
        self._converted = self._width * converted if converts else 0
        """Weights of the layer that computes, in the compute dtype; those that are gathered are in it."""
        self._row_bytes = _FLOAT32 * (sum(rows for rows, _ in sizes) + dora_rows(config))
        """A number for each row of a layer, of fp8 and of DoRA, on each rank."""
        self._in_fp8 = gathered_in_fp8(config, self._shards) if self._is_sharded else []
        self._blocks = list(self._in_order(config))
        self._of_sample = first_layers_bytes(config) + held_bytes(config) + saved_by_clip(config)
        clip = config.model, config.adapter
        self._clip = frozen_clip_parameters(*clip, self._shards)
        self._clip_gathered = 0 if self._reshards else self._clip + self._trained_padded.rest
        self._update = update_bytes(config, self._shards)
        self._last_of_sample = last_layers_bytes(config)

    def of(self, micro_batch: int) -> Passes:
        """Return those of ``micro_batch`` samples."""
        other = copy(self)
        other._micro_batch = micro_batch
        return other

    @property
    def _first(self) -> int:
        return self._micro_batch * self._of_sample

    @property
    def _last(self) -> int:
        return self._micro_batch * self._last_of_sample

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of this rank's shard of the trained weights, and of sums of their gradients."""
        return self._weight * self._trained_padded.total // self._shards

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

        A single rank keeps the trained ones in the compute dtype too, others their parts of those in fp8 and
        room for the largest of them, as FSDP2 takes it for each.
        """
        in_fp8 = [size for block in self._in_fp8 for size in block]
        rounded_parts = sum(in_fp8) // self._shards + self._width * max(in_fp8, default=0)
        rounded = self._width * self._trained.total if self.is_rounded else 0
        frozen = sum(block.frozen for block in self._blocks) + self._padded.rest + self._clip
        frozen *= self._width if self._is_frozen else 0
        frozen -= (self._width - 1) * self._in_8_bits
        trained = self.shard_bytes + rounded + rounded_parts
        return trained + frozen // self._shards + self._row_bytes

    def moments(self) -> Iterator[InUse]:
        """Yield the moments of which one is the peak."""
        kept = [self._kept(block) for block in self._blocks]
        yield from self._forward(sum(kept))
        reduced = self.shard_bytes if self._accumulates else 0
        for number in reversed(range(len(self._blocks))):
            saved = self._first + sum(kept[: number + 1])
            yield from self._backward(number, saved, reduced)
            if not self._accumulates:
                reduced += self._kept_gradient * self._blocks[number].padded // self._shards
        yield from self._end(reduced)

    def without_backward(self) -> Iterator[InUse]:
        """Yield the ends of the blocks' forward passes, and that of the whole, if nothing is kept."""
        blocks, everywhere = self._blocks, self._rest() + self._all_gathered(len(self._blocks) - 1)
        for block, ahead in zip(blocks, [*blocks[1:], *blocks[-1:]], strict=True):
            live = block.moments.saved + block.moments.forward.activations
            gathered = everywhere + self._weights(block) + self._buffer(ahead)
            yield InUse(0, gathered, self._first + self._micro_batch * live)
        yield InUse(0, everywhere, self._first + self._last)

    def _in_order(self, config: RunConfig) -> Iterator[_Block]:
        fraction = config.parallel.activation_checkpointing
        frozen = frozen_blocks(config, self._padded)
        for index, moments in enumerate(block_moments(config)):
            trained = self._trained_padded.blocks[index]
            less = (self._width - 1) * sum(self._in_fp8[index]) if self._in_fp8 else 0
            yield _Block(
                with_adapters(moments, config, index),
                frozen[index],
                self._width * (frozen[index] + trained) - less,
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
        kept = self._kept_gradient * self._trained_padded.total // self._shards
        yield InUse(kept, 0, self._first + self._update)

    def _rest(self) -> int:
        """Return the gathered weights outside the blocks, which stay gathered."""
        rest = self._padded.rest + (self._clip_gathered if self._is_frozen else 0)
        return self._converted + (self._width * rest if self._is_sharded else 0)

    def _weights(self, block: _Block) -> int:
        """Return the gathered weights of ``block``, 0 if all blocks stay gathered."""
        return block.gathered if self._is_sharded and self._reshards else 0

    def _all_gathered(self, number: int) -> int:
        """Return the weights of blocks that stay gathered: up to block ``number``, as backward frees them."""
        if self._reshards or not self._is_sharded:
            return 0
        return sum(block.gathered for block in self._blocks[: number + 1])

    def _buffer(self, block: _Block) -> int:
        """Return the buffer into which the weights of ``block`` are gathered; a shard alone needs none."""
        return block.gathered if self._is_sharded and self._shards > 1 else 0

    def _reduction(self, parameters: int) -> int:
        """Return the copy of a block's gradients from which they are reduced."""
        return self._reduce * parameters if self._is_sharded else 0


_BATCH_FLOAT32, _INT64 = 4, 8
_PER_SAMPLE = 2 * _BATCH_FLOAT32 + _INT64
"""Timestep, weight, and the key of its draws on the device."""


def held_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample that exist during its passes, beside the model's own inputs."""
    held = _latents(config)
    if config.data.source == "images":
        held += _image(config)
    if _stored(config) != BYTES[config.precision.compute]:
        held += _text(config)  # beside its copy in the compute dtype
    return held + _mask(config) + _PER_SAMPLE


def copied_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample as it is copied to the device."""
    if config.data.source == "images":
        return _latents(config) // 2 + _image(config) + _PER_SAMPLE
    return _latents(config) + _text(config) + _mask(config) + _PER_SAMPLE


def _latents(config: RunConfig) -> int:
    """Return the bytes of mean and logvar, and of both kinds of noise, which the condition has not."""
    channels, height, width = config.latent_shape
    return 2 * _BATCH_FLOAT32 * (channels + config.latent_channels) * height * width


def _mask(config: RunConfig) -> int:
    return _BATCH_FLOAT32 * prod(config.latent_shape[1:]) if config.data.masks else 0


def _image(config: RunConfig) -> int:
    return 3 * config.data.image_size**2


def _stored(config: RunConfig) -> int:
    """Return the bytes of a number of the text's encodings."""
    return _BATCH_FLOAT32 if config.data.source == "synthetic" else BYTES[config.encoders.precision]


def _text(config: RunConfig) -> int:
    model = config.model
    return (config.data.text_length * model.context_in_dim + model.vec_in_dim) * _stored(config)


# Weights in bfloat16: what a step computes in float32 to change them, and the error of their
# gradients.
#
# A bounded number of them is changed at a time.


_DIFFERENCE = 4
"""Bytes of the difference from the average of the weights."""
_SUM_ERROR = 0.0011
"""Of a sum in bfloat16, over its L2 norm and the root of the number of micro batches; measured with the
preset micro at 4 to 256 of them."""


def update_bytes(config: RunConfig, num_shards: int) -> int:
    """Return the most memory that the update of the weights in bfloat16 needs; 0 if they are float32."""
    if config.precision.weights == "float32":
        return 0
    group = _largest_group(config.model, num_shards)
    average = _DIFFERENCE * group * (config.optim.ema_decay is not None)
    kind = config.optim.kind
    if kind.quantized_values:  # one parameter after the other
        moments = _FLOAT32 * kind.quantized_values
        return max(average, _largest_step(config.model, num_shards, kind.step_bytes, moments))
    return kind.step_bytes * group


def sum_error(config: RunConfig, sharding: Sharding, accumulation: int) -> float:
    """Return the error of gradients that ``accumulation`` micro batches sum in bfloat16, over their L2 norm.

    0 if they are summed in float32, as FSDP2 does if replicas wait for the last one.
    """
    waits = sharding.dp_replicate > 1 and not all_reduces_each(config)
    if config.precision.weights == "float32" or accumulation == 1 or waits:
        return 0.0
    return _SUM_ERROR * sqrt(accumulation)


@lru_cache(maxsize=16)  # a plan asks for them at each micro batch that it tries
def _largest_group(model: ModelConfig, num_shards: int) -> int:
    """Return the values of the largest group of parameters that are changed together."""
    largest = count = 0
    for entry in entries(model):
        values = values_of_shard(entry.shape, num_shards)
        count = count + values if count + values <= MOST_VALUES else values
        largest = max(largest, count)
    return largest


@lru_cache(maxsize=16)
def _largest_step(model: ModelConfig, num_shards: int, step: int, moments: int) -> int:
    """Return the most bytes of one parameter: ``step`` of each value, and its ``moments`` in float32."""
    return max(
        (step + moments * is_quantized(each.shape)) * values_of_shard(each.shape, num_shards)
        for each in entries(model)
    )


ROOM = 0.8
"""Fraction of a GPU's memory below which a step must stay for all weights to stay gathered."""


def settle_resharding(
    config: RunConfig, num_ranks: int, ranks_per_node: int, gpu_memory: int | None
) -> RunConfig:
    """Return ``config`` with ``parallel.reshard_after_forward`` set, for GPUs with ``gpu_memory`` bytes.

    Weights are freed if that is unknown (None), as for CPUs, or if encoders use a part of it.
    """
    if config.parallel.reshard_after_forward is not None:
        return config
    if gpu_memory is None or config.data.source == "images":
        return with_parallel(config, reshard_after_forward=True)
    kept = with_parallel(config, reshard_after_forward=False)
    shares = BatchShares.of(config, num_ranks)
    accumulates = shares.accumulation_steps > 1
    sharding = Sharding.of(config, num_ranks, ranks_per_node)
    used = memory(kept, sharding, shares.micro_batch_size, accumulates).total
    return with_parallel(config, reshard_after_forward=used >= ROOM * gpu_memory)


def settle_resharding_of(world: World, config: RunConfig) -> RunConfig:
    """Return ``config`` as `settle_resharding` does, for the smallest GPU; every rank must call it."""
    own = memory_of(world.device)
    if own is None or config.parallel.reshard_after_forward is not None:
        return config
    smallest = min(number for (number,) in world.gather_numbers([float(own)]))
    return settle_resharding(config, world.size, world.local_size, int(smallest))


def with_parallel(config: RunConfig, **changes: int | bool) -> RunConfig:
    """Return ``config`` with ``changes`` to its section ``parallel``."""
    parallel = config.parallel.model_copy(update=changes)
    return config.model_copy(update={"parallel": parallel})
