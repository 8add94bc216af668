"""Parameter counts of the transformer, also without creating it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.clip import clip_flops
from fluxtrain.model.cost import (
    Linear,
    forward_flops,
    linears,
    offloaded_blocks,
    rows_of,
    training_flops,
)
from fluxtrain.model.fp8 import is_in_fp8
from fluxtrain.model.layers import (
    BLOCKS,
    AdaptedLayer,
    adapters_of_blocks,
    block_layers,
    block_number,
    count_adapter_parameters,
    entries,
    padded,
)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of each block, in the order of the passes, and of the rest."""

    blocks: tuple[int, ...]
    rest: int
    final_layer: int
    """Those of the rest that come after the blocks."""

    @property
    def total(self) -> int:
        return sum(self.blocks) + self.rest


class TrainedCounts(ParameterCounts):
    """Of each block only the trained parameters; the rest are CLIP's adapters, or all without adapters."""

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
    counts = Counter[str]()
    for entry in entries(config.one_of_each):
        counts[entry.name.partition(".")[0]] += padded(entry.shape, num_shards)
    blocks = [count * (counts.pop(kind),) for kind, count in config.depths.items()]
    return ParameterCounts(sum(blocks, ()), counts.total(), counts["final_layer"])


def gathered_in_fp8(config: RunConfig, num_shards: int = 1) -> list[list[int]]:
    """Return the sizes of the weights of each block that FSDP2 gathers in fp8, padded as above."""
    sizes = defaultdict[str, list[int]](list)
    for entry in entries(config.model.one_of_each) if config.precision.fp8 == "tensorwise" else ():
        layer, _, kind = entry.name.rpartition(".")
        if kind == "weight" and is_in_fp8(layer):
            sizes[entry.name.partition(".")[0]].append(padded(entry.shape, num_shards))
    return [sizes[kind] for kind, count in config.model.depths.items() for _ in range(count)]


def described_parameters(model: nn.Module) -> str:
    """Return how many parameters ``model`` has and, of adapters, how many of them are trained."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters" if trained == total else f"{trained:,} of {total:,} parameters"


# Initial weights, which depend on the seed and the parameter's name only.
#
# every bias                                         zero
# QK norms' scale                                    one
# modulations and the final layer                    zero: each block starts as the identity
# time_in, vector_in, guidance_in                    normal, standard deviation 0.02
# img_in, txt_in, qkv, proj, mlp, linear1, linear2   Xavier uniform on the fused matrix
# lora_A of an adapter                               uniform up to 1 / sqrt(inputs), as peft's
# lora_B of an adapter                               zero: an adapter starts without effect
# lokr_w1, lokr_w1_a, lokr_w1_b, lokr_w2_a           uniform up to 1 / sqrt(columns), as LyCORIS'
# lokr_w2, lokr_w2_b; magnitude (DoRA); hada_w2_a    zero
# hada_w1_a, hada_w1_b, hada_w2_b                    normal, standard deviation 0.1, 1, 1, as LyCORIS'


_ZERO = ("img_mod", "txt_mod", "modulation", "final_layer")
_DOWN = ("lora_A", "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a")
_UP = ("lora_B", "lokr_w2", "lokr_w2_b", "hada_w2_a", "magnitude")
_HADAMARD = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}
_NORMAL = ("time_in", "vector_in", "guidance_in")


def initial_value(
    name: str, shape: torch.Size, seed: int, device: torch.device | None = None
) -> Tensor:
    """Return the unsharded initial value of parameter ``name``: the same on every rank."""
    parts = name.split(".")
    if parts[-1] == "scale":
        return torch.ones(shape, device=device)
    is_down = parts[-1] in (*_DOWN, *_HADAMARD)
    is_zero = parts[-1] in ("bias", *_UP) or any(part in _ZERO for part in parts)
    if is_zero and not is_down:
        return torch.zeros(shape, device=device)
    generator = torch.Generator(device or "cpu").manual_seed(_key(seed, name))
    value = torch.empty(shape, device=device)
    if parts[-1] in _HADAMARD:
        return value.normal_(0, _HADAMARD[parts[-1]], generator=generator)
    if is_down:
        bound = 1 / math.sqrt(shape[1])
        return value.uniform_(-bound, bound, generator=generator)
    if parts[0] in _NORMAL:
        return value.normal_(0, 0.02, generator=generator)
    bound = math.sqrt(6 / (shape[0] + shape[1]))
    return value.uniform_(-bound, bound, generator=generator)


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


# FLOPs of one sample if adapters are trained: frozen weights need no gradient of their own.
#
# As in flops.py: matrix products only, and those of attention in full.


def run_flops(config: RunConfig, image_tokens: int | None = None) -> int:
    """Return the FLOPs of forward and backward for one sample of ``config``, without recomputation.

    It has ``image_tokens``, or those of the largest image.
    """
    image_tokens = image_tokens or config.image_tokens
    sizes = config.model, image_tokens, config.data.text_length
    if config.adapter is None:
        return training_flops(*sizes)
    layers = block_layers(config.model, config.adapter)
    first = (
        0 if config.trains_clip else min(block_number(each.name, config.model) for each in layers)
    )
    tokens = image_tokens + config.data.text_length
    attention = 4 * tokens * tokens * config.model.hidden_size
    trained_blocks = config.model.num_blocks - first
    adapted = {layer.name for layer in layers}
    passing = {
        layer.name.removesuffix(".weight"): layer.flops
        for layer in linears(*sizes)
        if _passes_gradient(config, layer, first, adapted)
    }
    adapters = sum(
        _adapter_flops(config, layer, image_tokens, layer.name in passing) for layer in layers
    )
    backward = sum(passing.values()) + 2 * trained_blocks * attention
    blocks = forward_flops(*sizes) + backward + adapters
    return blocks + clip_flops(config)


def norm_flops(config: RunConfig) -> int:
    """Return the FLOPs of DoRA's norms and of LoHa's matrices, which are computed once for a micro batch."""
    if config.adapter is None or not (config.adapter.dora or config.adapter.kind == "loha"):
        return 0
    flops = 0
    for layer in block_layers(config.model, config.adapter):
        if layer.is_loha:
            flops += 16 * layer.outputs * layer.inputs * layer.rank
            continue
        rank, outputs = layer.rank, layer.outputs
        crossed = 2 * outputs * layer.inputs * rank
        squared = 2 * rank * rank * (len(layer.splits) * layer.inputs + outputs)
        flops += crossed + squared
    return flops


def _adapter_flops(
    config: RunConfig, layer: AdaptedLayer, image_tokens: int, needs_input: bool
) -> int:
    """Return the FLOPs of the products of ``layer``'s adapter, and of their gradients.

    ``needs_input`` says whether the layer's input needs one too.
    """
    rows = rows_of(layer.name, image_tokens, config.data.text_length)
    if (factors := layer.kronecker) is not None:
        down, up = (rows * flops for flops in factors.flops)
    elif layer.is_loha:
        down, up = 2 * rows * layer.outputs * layer.inputs, 0
    else:
        (stacked, inputs), (outputs, rank) = (layer.shapes[each] for each in ("lora_A", "lora_B"))
        down, up = 2 * rows * stacked * inputs, 2 * rows * outputs * rank
    return (3 if needs_input else 2) * down + 3 * up


def _passes_gradient(config: RunConfig, layer: Linear, first: int, adapted: set[str]) -> bool:
    """Return whether the input of ``layer`` needs a gradient, if ``first`` is the first block with adapters.

    That block's own input needs none, nor its first layers, unless the modulation between has an adapter.
    """
    if config.trains_clip and layer.name.startswith((*BLOCKS, "vector_in", "final_layer")):
        return True
    if layer.rows == 1 or layer.is_first:
        return False
    if not layer.name.startswith(BLOCKS):
        return True
    block, name = block_number(layer.name, config.model), layer.name.removesuffix(".weight")
    if block == first and name.endswith((".linear1", "_attn.qkv")):
        return name.replace("linear1", "modulation.lin").replace("attn.qkv", "mod.lin") in adapted
    return block >= first
