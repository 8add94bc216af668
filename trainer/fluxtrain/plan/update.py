"""Weights in bfloat16: what a step computes in float32 to change them, and the error of their gradients.

A bounded number of them is changed at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod, sqrt

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import OptimizerName, is_quantized
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.model.tensor_names import entries
from fluxtrain.optimizers.optimizer import MOST_VALUES
from fluxtrain.traffic import all_reduces_each

_ROUNDED = 17
"""Bytes of each value while it is rounded: weight, gradient, random numbers, and the result."""
_BYTES: Mapping[OptimizerName, int] = {
    "adamw": _ROUNDED,
    "adafactor": _ROUNDED,
    "lion": _ROUNDED + 4,  # and its update
    "prodigy": _ROUNDED + 4,
}
_MOMENTS = 8
"""Bytes of both moments in 8 bits, in float32."""
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
    if config.optim.name == "adamw_8bit":  # one parameter after the other
        return max(average, _of_8_bits(config.model, num_shards))
    return _BYTES[config.optim.name] * group


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
    for _, values in _parts(model, num_shards):
        count = count + values if count + values <= MOST_VALUES else values
        largest = max(largest, count)
    return largest


@lru_cache(maxsize=16)
def _of_8_bits(model: ModelConfig, num_shards: int) -> int:
    return max(
        (_ROUNDED + _MOMENTS * is_quantized(shape)) * values
        for shape, values in _parts(model, num_shards)
    )


def _parts(model: ModelConfig, num_shards: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the shape of each parameter, and the values in the largest of its ``num_shards`` parts."""
    for entry in entries(model):
        rows, *columns = entry.shape
        yield entry.shape, -(-rows // num_shards) * prod(columns)
