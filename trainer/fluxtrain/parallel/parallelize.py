"""Activation checkpointing, compiling, sharding and loading of the model, applied from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from fluxtrain.contract.run.config import ParallelConfig, RunConfig, Sharding
from fluxtrain.contract.run.precision import Precision, PrecisionConfig
from fluxtrain.model.clip import ClipShape, ClipText, ClipWeights
from fluxtrain.model.cost import is_recomputed, offloaded_blocks
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import Fp8Linear, rounded, stored, use_fp8
from fluxtrain.model.layers import (
    BASE_MAGNITUDE,
    BLOCKS,
    MAGNITUDE,
    TEXT_ENCODER,
    WHOLE_MAGNITUDE,
    adapted_layers,
    has_small_base,
    linear_layers,
)
from fluxtrain.model.lora import AdapterDropout, add_adapters, is_adapter, magnitudes, measure
from fluxtrain.model.offloading import Offloading
from fluxtrain.model.parameters import initial_value
from fluxtrain.parallel.compile import compile_blocks, compiles, kernels_on
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.sharding import largest_of_parts, local_part, rows_of_parts, whole_of
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.step_times import StepTimes

DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(
    config: RunConfig,
    world: World,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    alive: Alive = lambda: None,
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
    clip: ClipWeights | None = None,
) -> Flux:
    """Return the model with ``weights``, sharded over the ranks as in ``config.parallel``.

    ``weights`` yields every unsharded parameter by name, but for those of adapters; without them the values
    are random, as are those of adapters that ``adapters`` does not have. ``clip`` has the weights of the text
    encoder, if its adapters are trained. ``alive`` is called after each parameter.
    """
    model = empty_model(config, world, None if clip is None else clip.shape)
    initial = initial_weights(model, config.drawn_seed, world.device)
    if weights is not None:
        drawn = initial_weights(model, config.drawn_seed, world.device, is_adapter)
        of_clip = {} if clip is None else clip.tensors
        initial = chain(
            weights,
            ((f"{TEXT_ENCODER}.{name}", tensor) for name, tensor in of_clip.items()),
            ((name, _given(model, adapters, name, value)) for name, value in drawn),
        )
    load_weights(model, initial, world.device, alive)
    finish_sharding(model)
    return model


def finish_sharding(model: nn.Module) -> None:
    """Let FSDP2 initialize ``model`` now, not at its first forward; nothing happens without FSDP2.

    There torch < 2.10 gives uneven parts new memory: an optimizer made before would change the old one.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def empty_model(config: RunConfig, world: World, clip: ClipShape | None = None) -> Flux:
    """Return the model without values, on the meta device: as in ``config.parallel``, for ``world``.

    ``clip`` is the shape of the text encoder, if its adapters are trained; None: CLIP-L's.
    """
    with torch.device("meta"):
        model = Flux(config.model).to(DTYPES[config.precision.weights])
        if config.adapter is not None:
            if config.adapter.clip is not None:
                model.text_encoder = ClipText(clip or ClipShape.of(config.model))
            layers = adapted_layers(config.model, config.adapter)
            dropout = AdapterDropout.of(config.adapter)
            small = linear_layers(config.model) if has_small_base(config) else ()
            add_adapters(model, layers, DTYPES[config.precision.compute], dropout, small)
    if config.precision.fp8 != "none":
        use_fp8(model, config.precision.fp8, world.device)
    if "blocks" in kernels_on(world.device, config):
        from fluxtrain.model.kernels import use_kernels  # Triton takes a second to import

        use_kernels(model)
    recompute_activations(model, config.parallel.activation_checkpointing)
    if compiles(config.parallel, world.device):
        compile_blocks(model, has_sizes=config.data.buckets is not None)
    if chosen := offloaded_blocks(config):
        offload(model, chosen)
    if uses_fsdp(config, world.size):
        mesh = world.mesh(Sharding.of(config, world.size, world.local_size).dp_replicate)
        shard(model, mesh, config.parallel, config.precision)
    return model


def uses_fsdp(config: RunConfig, num_ranks: int) -> bool:
    """Return whether FSDP2 divides the model. The optimizer keeps the float32 weights of a single rank.

    With torch < 2.10 a gradient has the data type of its parameter, so FSDP2 does that too.
    """
    precision = config.precision
    return num_ranks > 1 or not (
        precision.weights == precision.compute or hasattr(Tensor, "grad_dtype")
    )


def offload(model: Flux, numbers: Iterable[int]) -> None:
    """Let the blocks with ``numbers`` have their frozen weights on the host; they have no memory yet."""
    names = [f"{kind}.{number}" for kind in BLOCKS for number in range(len(getattr(model, kind)))]
    chosen = [names[number] for number in numbers]
    model.offloading = Offloading({name: model.get_submodule(name) for name in chosen})


def recompute_activations(model: Flux, fraction: float) -> None:
    """Apply activation checkpointing to ``fraction`` of the blocks, spread evenly."""
    for index, block in enumerate(model.blocks):
        if is_recomputed(index, fraction):
            block.forward = _recomputing(block.forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` with activation checkpointing, as a function that torch.compile can trace."""

    def recompute(*inputs: Tensor) -> Any:
        # blocks use no random numbers but those that follow from their samples' keys
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)

    return recompute


def shard(
    model: Flux, mesh: DeviceMesh, parallel: ParallelConfig, precision: PrecisionConfig
) -> None:
    """Apply FSDP2 to blocks, CLIP and the rest: gather in the compute dtype, reduce in ``precision.reduce``.

    Inputs are not cast: timestep embedding and RoPE tables stay in float32. Each rank has all of the weights
    that are in host memory.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )
    ignored = None if model.offloading is None else set(model.offloading.parameters)
    shard_one = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for part in _parts(model):
        shard_one(part, reshard_after_forward=parallel.reshards, ignored_params=ignored)
    shard_one(model, reshard_after_forward=False)


def _parts(model: Flux) -> list[nn.Module]:
    """Return what is gathered and reduced by itself: the blocks, and CLIP if its adapters are trained."""
    return [*model.blocks, *([] if model.text_encoder is None else [model.text_encoder])]


def reduce_between_replicas(model: Flux, is_on: bool) -> None:
    """Let backward passes of ``model`` reduce gradients between replicas, or sum them within each (HSDP)."""
    for module in (*_parts(model), model):
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(is_on, recurse=False)


def free_gathered(model: Flux) -> None:
    """Free gathered weights of ``model``, so that its next pass gathers those that it has by then."""
    for module in (*_parts(model), model):
        if isinstance(module, FSDPModule):
            module.reshard()


class WeightScaling:
    """The weights in fp8 with one scale a tensor: their largest values, and what FSDP2 gathers of them."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        """Give the layers of ``model``, whose passes have weights in ``compute``, zeros to read."""
        layers = (each for each in model.modules() if isinstance(each, Fp8Linear))
        self._layers = [each for each in layers if each.recipe == "tensorwise"]
        self._weights = [layer.weight.detach() for layer in self._layers]
        parts = map(local_part, self._weights)  # in place of none a zero, whose norm exists
        self._parts = [part if part.numel() else part.new_zeros(1) for part in parts]
        self._largest = [part.new_zeros((), dtype=torch.float32) for part in self._parts]
        self._compute = compute
        for layer, largest in zip(self._layers, self._largest, strict=True):
            layer.largest = largest
        sharded = [each for each in self._layers if isinstance(each.weight, DTensor)]
        size = max((layer.weight.numel() for layer in sharded), default=0)
        room = self._largest[0].new_empty(size, dtype=compute) if sharded else None
        self._gathered = [_GatheredInFp8(layer, room) for layer in sharded if room is not None]
        groups = (_group(module) for module in model.modules()) if sharded else ()
        for parameter in chain.from_iterable(group.fsdp_params for group in groups if group):
            parameter._init_extensions()  # FSDP2 has looked for the hooks before they were there

    @property
    def memory(self) -> list[Tensor]:
        """Return the tensors of more than one value each."""
        rounded_parts = [each.rounded for each in self._gathered]
        return [*rounded_parts, *(each.room for each in self._gathered[:1])]

    @torch.no_grad()
    def __call__(self) -> None:
        """Find them for the weights as they are now; every rank must call this."""
        if not self._parts:
            return
        found = torch.stack(torch._foreach_norm(self._parts, torch.inf))
        values = found.to(self._compute).float()  # of the rounded values it is the largest too
        values = largest_of_parts(values, self._weights[0])
        torch._foreach_copy_(self._largest, list(values.unbind()))
        for each in self._gathered:
            each.round_part()


class _GatheredInFp8:
    """A layer's weight, of which each rank rounds its part after a step; FSDP2 gathers what is rounded.

    That is the layer's ``values``. What FSDP2 takes for the gathered weight has the compute dtype, as its
    gradient must have, and is never read: it is in the same ``room`` for all layers.
    """

    def __init__(self, layer: Fp8Linear, room: Tensor) -> None:
        self._layer, self.room = layer, room
        weight: Any = layer.weight
        self._part = weight._local_tensor  # to_local returns a view, where FSDP2 does not look
        self._part.fsdp_pre_all_gather = self._rounded
        self._part.fsdp_post_all_gather = self._give
        shape = rows_of_parts(layer.weight), layer.in_features
        self.rounded = room.new_zeros(shape, dtype=layer.dialect.forward)

    def round_part(self) -> None:
        """Round this rank's part, whose rows FSDP2 pads to those of the largest part."""
        part = self._part.to(self.room.dtype)
        values, _ = rounded(part, self.rounded.dtype, None, self._layer.largest)
        self.rounded[: len(part)] = values

    def _rounded(
        self, mesh: object, size: object, stride: object, module: object, policy: object
    ) -> tuple[tuple[Tensor], None]:
        return (self.rounded,), None

    def _give(
        self, gathered: tuple[Tensor], metadata: None, dtype: object, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Give the layer what is ``gathered``, whose memory is the same each time."""
        if out is not None:
            return None
        self._layer.values = gathered[0][: self._layer.out_features]
        return self.room, ()


def _group(module: nn.Module) -> Any:
    """Return FSDP2's own description of the parameters that ``module`` gathers; None if there are none."""
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def observe_waits(model: Flux, times: StepTimes) -> None:
    """Tell ``times`` where this rank waits for others in the passes of ``model``, which is sharded.

    FSDP2 waits for weights in a hook before each block and before the model. In a backward pass it does so
    in hooks of their outputs, and reduces the gradients of a block once those of all its inputs are known.
    """

    def watch(tensors: object, call: Callable[[], None]) -> None:
        if times.is_measured:
            _before_gradients(tensors, call)

    for module in (*_parts(model), model):
        module.register_forward_pre_hook(_untraced(lambda *_: times.gather_begins()), prepend=True)
        module.register_forward_pre_hook(_untraced(lambda *_: times.gather_ends()))
        module.register_forward_hook(
            _untraced(lambda module, inputs, outputs: watch(outputs, times.gather_begins)),
            prepend=True,
        )
        module.register_forward_hook(
            _untraced(lambda module, inputs, outputs: watch(outputs, times.gather_ends))
        )
    for block in model.blocks:
        block.register_forward_pre_hook(
            _untraced(lambda block, inputs: watch(inputs, times.gradient_ends))
        )


def _before_gradients(tensors: object, call: Callable[[], None]) -> None:
    """Call ``call`` when the gradient of each of ``tensors`` is known, before hooks that are added later."""
    for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: call())  # type: ignore[no-untyped-call]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return ``hook`` as one that torch.compile leaves out of the graph, as it does FSDP2's."""
    untraced: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced


def initial_weights(
    model: nn.Module,
    seed: int,
    device: torch.device,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial value of every parameter whose name ``is_wanted``.

    A value depends on the seed and the name only, so it is the same for any number of ranks.
    """
    for name, parameter in model.named_parameters():
        if is_wanted(name):
            yield name, initial_value(name, parameter.shape, seed, device)


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    device: torch.device,
    alive: Alive = lambda: None,
) -> None:
    """Copy this rank's part of ``weights`` into the parameters, which are on the meta device.

    ``alive`` is called after each parameter.
    """
    allocate(model, device, alive)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if isinstance(model, Flux) and model.offloading is not None:
        parameters |= model.offloading.host
    with torch.no_grad():
        for name, full in weights:
            parameter = parameters[name]
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            values, full = stored(model, name, full)
            local.copy_(_local_part(values, parameter))
            measure(model, name, full)
            alive()


def allocate(model: nn.Module, device: torch.device, alive: Alive = lambda: None) -> None:
    """Give the parameters of ``model``, which are on the meta device, memory without values.

    It is on ``device``, or on the host for those that are copied to it. ``alive`` is called now and then.
    """

    def empty(each: Tensor) -> Tensor:
        return whole_of(torch.empty_like(local_part(each), device=device), each)

    offloading = model.offloading if isinstance(model, Flux) else None
    with offloading.without_parameters() if offloading else nullcontext():
        model._apply(empty)  # type: ignore[no-untyped-call]
    if offloading:
        offloading.allocate(device, alive)


def _given(model: nn.Module, adapters: Mapping[str, Tensor], name: str, value: Tensor) -> Tensor:
    """Return the parameter ``name`` of ``adapters``; ``value`` if it is not there."""
    layer, _, kind = name.rpartition(".")
    whole = adapters.get(f"{layer}.{WHOLE_MAGNITUDE}") if kind == MAGNITUDE else None
    if whole is not None:
        return whole.to(value.device) - magnitudes(model)[f"{layer}.{BASE_MAGNITUDE}"]
    return adapters.get(name, value)


def _local_part(full: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return full[tuple(slice(o, o + s) for s, o in zip(shape, offset, strict=True))]
