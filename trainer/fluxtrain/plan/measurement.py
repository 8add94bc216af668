"""One real optimizer step on fake tensors, which have shapes but no values, watched by torch's own trackers.

The model, its sharding, the loss and the optimizer are those of a training; only the values, the other ranks
and the network are missing. A fake tensor raises an error if its value is read, so a step that waits for the
device does not get through.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fluxtrain import optim
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import AnyBatch, Batch, ImageBatch
from fluxtrain.data.order import BatchShares
from fluxtrain.encode.codec import Autoencoder
from fluxtrain.encode.encoders import Encoders
from fluxtrain.encode.files import CLIP_L, T5_XXL, has_published_text_encoders
from fluxtrain.encode.text import T5Clip, TextModel
from fluxtrain.model.blocks import DoubleStreamBlock, SingleStreamBlock, rotation
from fluxtrain.model.clip import CLIP_LENGTH
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import rate_of
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.compile import attention_backend, compile_module
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import (
    DTYPES,
    WeightScaling,
    allocate,
    empty_model,
    finish_sharding,
)
from fluxtrain.parallel.sharding import local_part
from fluxtrain.parallel.traffic import AXES, Axis, Collective, Operation
from fluxtrain.runtime.step_times import StepTimes
from fluxtrain.train import step


@dataclass(frozen=True)
class Measured:
    """What one rank used in a step of ``micro_batches`` micro batches."""

    micro_batches: int
    memory: dict[str, int]
    """Bytes in use at the peak, by the tracker's kinds; those that are 0 are left out."""
    collectives: list[Collective]
    flops: int
    """FLOPs of the matrix products of this rank, recomputed ones included."""
    encoder_bytes: int
    """Of the frozen encoders, which `memory` counts as inputs."""
    ahead_bytes: int
    """Of the batches that a GPU copies ahead, which `memory` counts as inputs too."""
    buffer_bytes: int
    """Of the buffers for weights that are in host memory: inputs too."""
    kernels: int
    """Operators that launched a kernel, without compilation."""
    host_syncs: list[str]
    """The operator that read a value from the device; the step ends there."""

    @property
    def peak_bytes(self) -> int:
        """Return the bytes in use at the peak."""
        return sum(self.memory.values())


def eager(config: RunConfig) -> RunConfig:
    """Return ``config`` without compilation: what is measured here."""
    parallel = config.parallel.model_copy(update={"compile": False})
    return config.model_copy(update={"parallel": parallel})


def measure(
    config: RunConfig, num_nodes: int, ranks_per_node: int, has_gpu: bool = True
) -> Measured:
    """Return what rank 0 uses in one step of ``config``, without compilation, on as many ranks.

    With GPUs, batches are copied ahead.
    """
    config = eager(config)
    with fake_world(num_nodes, ranks_per_node) as world:
        model = empty_model(config, world)  # makes the mesh, which cannot be made of fake tensors
        encoders = empty_encoders(config) if encodes(config) else None
        # none of other devices' kernels of attention keeps the scores either
        attention = "math" if config.parallel.attention == "math" else "flash"
        with FakeTensorMode(allow_non_fake_inputs=True), attention_backend(attention):
            allocate(model, world.device)
            finish_sharding(model)
            return _measured(Step(config, world, model, encoders, copies_ahead=has_gpu))


def _measured(step: Step) -> Measured:
    """Take ``step``; return what it used."""
    tracker, recorder = _tracker(step), Recorder(_groups(step.model))
    syncs = list[str]()
    with recorder, tracker:
        try:
            step.take(tracker.reset_mod_stats)
        except DataDependentOutputException as error:
            syncs.append(str(error.func))
    peak = Counter[str]()
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for kind, used in snapshot.items():
            if isinstance(kind, Enum):  # not the total
                peak[str(kind.value)] += used
    return Measured(
        step.micro_batches,
        dict(+peak),
        recorder.collectives(),
        recorder.flops,
        _bytes(_encoders(step)),
        _bytes(_ahead(step)),
        _bytes(_buffers(step)),
        recorder.kernels,
        syncs,
    )


def _tracker(step: Step) -> MemTracker:
    inputs = (*step.batch.tensors().values(), *_ahead(step), *_encoders(step), *_buffers(step))
    if isinstance(step.model, FSDPModule):
        tracker = FSDPMemTracker(step.model, step.optimizer)
        _leave_frozen(tracker, step.model)
        own = step.optimizer.weights.values() if step.config.optim.kind.averages else ()
        scale = step.optimizer.scale
        rounded = scale.memory if isinstance(scale, WeightScaling) else ()
        tracker.track_inputs((*inputs, *map(local_part, own), *rounded))  # next to the parameters
        return tracker
    plain = MemTracker()
    vars(plain).update(memory_tracking=_Unread())
    _leave_frozen(plain, step.model)
    weights = nn.ParameterList(step.optimizer.weights.values())
    plain.track_external(weights, step.model, step.optimizer, *inputs)
    return plain


class _Unread(dict[nn.Module, Any]):
    """Peaks of modules, which nobody reads: torch's tracker would go through all after every operator."""

    def values(self) -> Any:
        return ()


class _NoHook:
    """The handle of a hook that a parameter without a gradient does not need."""

    def remove(self) -> None:
        """Do nothing."""


def _leave_frozen(tracker: MemTracker, model: Flux) -> None:
    """Let ``tracker`` watch no gradients of frozen parameters, for which torch's raises an error."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            tracker._param_to_grad_hook_handles[parameter] = (_NoHook(), _NoHook())


def _encoders(step: Step) -> list[Tensor]:
    """Return the weights and buffers of the encoders."""
    modules = [] if step.encoders is None else modules_of(step.encoders)
    return [each for module in modules for each in (*module.parameters(), *module.buffers())]


def _ahead(step: Step) -> list[Tensor]:
    return [tensor for batch in step.ahead for tensor in batch.device_tensors().values()]


def _buffers(step: Step) -> list[Tensor]:
    offloading = step.model.offloading
    return [] if offloading is None else offloading.ring.buffers


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _groups(model: Flux) -> dict[Axis, dist.ProcessGroup]:
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor):
        return {}
    mesh = parameter.device_mesh
    return {axis: mesh.get_group(axis) for axis in AXES if axis in (mesh.mesh_dim_names or ())}


_C10D = torch.ops.c10d
_FUNCTIONAL = torch.ops._c10d_functional
_FLASH = "_scaled_dot_product_flash_attention"
_FORMULAS = {
    getattr(torch.ops.aten, f"{_FLASH}_for_cpu{suffix}"): flop_registry[
        getattr(torch.ops.aten, f"{_FLASH}{suffix}")
    ]
    for suffix in ("", "_backward")
} | flop_registry
"""Operator -> torch's formula of its FLOP; torch 2.9 to 2.13 has none of attention on CPUs."""
_WITHOUT_KERNEL = {
    "aten::_unsafe_view",
    "aten::detach",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_.source_Storage",
}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is active, the collectives by mesh axis, and the operators that launch kernels.

    A list operator, such as those of the fused AdamW, counts as one kernel.
    """

    def __init__(self, groups: dict[Axis, dist.ProcessGroup]) -> None:
        """Count the collectives of ``groups``, by the name of their mesh axis."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes: dict[str, Axis] = {group.group_name: axis for axis, group in groups.items()}
        self._alone = {group.group_name for group in groups.values() if group.size() == 1}
        """Groups that send nothing: with torch < 2.10 FSDP2 may have one rank."""
        self._bytes = Counter[tuple[Axis, Operation]]()
        self._calls = Counter[tuple[Axis, Operation]]()
        self.kernels = 0
        self.flops = 0
        """By torch's formulas. Its own FlopCounterMode keeps recomputed activations alive with its hooks."""

    def collectives(self) -> list[Collective]:
        """Return the collectives, in the order of `traffic.collectives`; raise KeyError for another group."""
        order = sorted(self._bytes, key=lambda key: (AXES.index(key[0]), key[1]))
        return [
            Collective(axis, operation, self._calls[axis, operation], self._bytes[axis, operation])
            for axis, operation in order
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count ``func``, and call it; DTensor's operators are counted as those of its local tensors."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        self._count(func, args)
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        match func:
            case _C10D._allgather_base_.default:
                self._add("all_gather", args[2], args[0])
            case _C10D._reduce_scatter_base_.default:
                self._add("reduce_scatter", args[2], args[1])
            case _C10D.allreduce_.default:
                self._add("all_reduce", args[1], *args[0])
            case _FUNCTIONAL.all_reduce.default:
                self._add("all_reduce", args[2], args[0])
            case _ if func.namespace in ("c10d", "_c10d_functional"):
                if func is not _FUNCTIONAL.wait_tensor.default:
                    raise NotImplementedError(f"the collective {func} is not counted")
            case _ if func.namespace in ("aten", "fsdp"):
                self.kernels += not (func.is_view or func.name() in _WITHOUT_KERNEL)

    def _add(self, operation: Operation, group: Any, *content: Tensor) -> None:
        name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
        if name in self._alone:
            return
        key = self._axes[name], operation
        self._calls[key] += 1
        self._bytes[key] += sum(tensor.nbytes for tensor in content)


MOST_MICRO_BATCHES = 2
"""Of a step that accumulates gradients: the second one begins with all gradients, as every later one does."""
_STEP, _SEED = 1, 0


class Step:
    """The parts of a step of ``model``, which has its weights, on fake tensors or real ones."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        model: Flux,
        encoders: Encoders | None = None,
        copies_ahead: bool = False,
    ) -> None:
        """Make the optimizer, a micro batch, and those that a GPU has copied ahead by then."""
        self.config, self._device = config, world.device
        self._shares = BatchShares.of(config, world.size)
        self.model, compute = model, DTYPES[config.precision.compute]
        self.micro_batches = min(self._shares.accumulation_steps, MOST_MICRO_BATCHES)
        self.optimizer = optim.make_optimizer(
            *(model, config.optim, compute),
            partial(rate_of, adapter=config.adapter),
            _SEED,
            accumulates=self.micro_batches > 1,
        )
        self.encoders = encoders and allocated(encoders, world.device)
        self.batch = self._batch(self._shares.micro_batch_size)
        self.ahead = [self._batch(self._shares.micro_batch_size)] if copies_ahead else []
        if copies_ahead and config.evaluation.is_on:
            self.ahead.append(self._batch(config.evaluation.batch_size))
        self._flow_loss = FlowLoss(model, config, compute)
        self._times = StepTimes(world.device)
        self._bad_step = torch.tensor(optim.NEVER, device=world.device)

    def take(self, after_micro_batch: Callable[[], None] = lambda: None) -> None:
        """Take the step, of `micro_batches` micro batches."""
        samples = self._shares.micro_batch_size * self._shares.accumulation_steps
        for number in range(1, self.micro_batches + 1):
            step.add_gradients(
                *(self._flow_loss, self._encode, self.batch, samples, self._times),
                is_last=number == self.micro_batches,
            )
            after_micro_batch()
        step.update(self.optimizer, self.config, _STEP, self._bad_step, self._times)

    def _encode(self, batch: AnyBatch) -> Batch:
        if isinstance(batch, Batch):
            return batch
        assert self.encoders is not None
        return self.encoders.encode_batch(batch)

    def _batch(self, size: int) -> AnyBatch:
        """Return a batch without values, its text encodings in the dtype that they are stored in."""
        config, device = self.config, self._device

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, *shape, dtype=dtype, device=device)

        drawn: dict[str, Any] = {
            "latent_noise": make(config.latent_channels, *config.latent_shape[1:]),
            "noise": make(config.latent_channels, *config.latent_shape[1:]),
            "timesteps": make(),
            "weights": make(),
            "keys": make(dtype=torch.int64),
            "dropped": make(dtype=torch.bool),
            "indices": make(dtype=torch.int64),
        }
        if self.encoders is not None:
            side = config.data.image_size
            images = make(3, side, side, dtype=torch.uint8)
            return ImageBatch(images=images, captions=("",) * size, **drawn)
        is_synthetic = config.data.source == "synthetic"
        stored = torch.float32 if is_synthetic else DTYPES[config.encoders.precision]
        vec = make(config.model.vec_in_dim, dtype=stored)
        if config.trains_clip:
            vec = make(CLIP_LENGTH, dtype=torch.int32)
        return Batch(
            mean=make(*config.latent_shape),
            logvar=make(*config.latent_shape),
            txt=make(config.data.text_length, config.model.context_in_dim, dtype=stored),
            vec=vec,
            **drawn,
        )


# The kernels of compiled blocks, counted in the code that torch's compiler generates for the CPU.
# A narrow block of two heads is compiled on few tokens: its graph is that of the real one. What is
# fused for a GPU may differ.

_CALL = re.compile(r"^ +(\w+ = )?(cpp_\w+|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)
_NUM_HEADS, _TOKENS, _BATCH = 2, 16, 2


def compiled_kernels(config: RunConfig) -> dict[str, int]:
    """Return the kernels of forward and backward of a compiled block, by its kind; takes some seconds."""
    return {"double-stream": _kernels(config, 2), "single-stream": _kernels(config, 1)}


def _kernels(config: RunConfig, num_streams: int) -> int:
    model, dtype = config.model, DTYPES[config.precision.compute]
    hidden = _NUM_HEADS * sum(model.axes_dim)
    kind = DoubleStreamBlock if num_streams == 2 else SingleStreamBlock
    mlp_hidden = int(hidden * model.mlp_ratio)
    block: nn.Module = kind(hidden, _NUM_HEADS, mlp_hidden, model.qk_norm_eps).to(dtype)
    compile_module(block)

    make = partial(torch.randn, dtype=dtype, requires_grad=True)
    streams = [make(_BATCH, _TOKENS, hidden) for _ in range(num_streams)]
    ids = torch.zeros(num_streams * _TOKENS, len(model.axes_dim))
    inputs = *streams, make(_BATCH, hidden), rotation(ids, model.axes_dim, model.theta)

    def pass_both_ways() -> None:
        outputs: Any = block(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    with mock.patch.object(AsyncCompile, "cpp_pybinding"):  # only the code counts: nothing is built
        _, codes = run_and_get_code(pass_both_ways)
    return sum(len(_CALL.findall(code)) for code in codes)


def encodes(config: RunConfig) -> bool:
    """Return whether the step encodes images, which only FLUX.1's published encoders can be made for."""
    published = has_published_text_encoders(config) and config.encoders.autoencoder_kind == "flux"
    return config.data.source == "images" and published


def empty_encoders(config: RunConfig) -> Encoders:
    """Return the encoders of ``config`` on the meta device, in their dtype; every caption is token 0."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    dtype: torch.dtype = getattr(torch, config.encoders.precision)
    with torch.device("meta"):
        t5 = T5EncoderModel(T5Config(**T5_XXL))
        clip = CLIPTextModel(CLIPTextConfig(**CLIP_L))
        codec = Autoencoder()

    def load(module: nn.Module) -> Any:
        return module.to(dtype).eval().requires_grad_(False)

    text = T5Clip(
        TextModel(_tokens, load(t5), config.data.text_length),
        TextModel(_tokens, load(clip), CLIP_LENGTH),
    )
    return Encoders(text, load(codec), torch.device("meta"), dtype)


def allocated(encoders: Encoders, device: torch.device) -> Encoders:
    """Return ``encoders`` on ``device``, their weights not set."""
    t5, clip, codec = modules_of(encoders)
    for module in (t5, clip, codec):
        module.to_empty(device=device)
    t5.encoder.embed_tokens.weight = t5.shared.weight  # one tensor, until it was moved
    return replace(encoders, device=device)


def modules_of(encoders: Encoders) -> list[Any]:
    """Return the modules of `empty_encoders`."""
    assert isinstance(encoders.text, T5Clip)
    return [encoders.text.t5.encoder, encoders.text.clip.encoder, encoders.codec]


def _tokens(captions: list[str], max_length: int, **_: object) -> Any:
    """Tokenize like transformers' tokenizers, without a vocabulary."""
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": torch.zeros(len(captions), max_length, dtype=torch.int64)})


@contextmanager
def fake_world(num_nodes: int, ranks_per_node: int) -> Iterator[World]:
    """Join a group of ``num_nodes`` x ``ranks_per_node`` ranks, of which no other exists; then leave it.

    Raises RuntimeError in a process that is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already")
    size = num_nodes * ranks_per_node
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(0, 0, size, torch.device("cpu"), ranks_per_node, num_nodes)
    finally:
        dist.destroy_process_group()
