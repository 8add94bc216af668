"""One real optimizer step on fake tensors, which have shapes but no values, watched by torch's own trackers.

The model, its sharding, the loss and the optimizer are those of a training; only the values, the other ranks
and the network are missing. A fake tensor raises an error if its value is read, so a step that waits for the
device does not get through.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluxtrain.attention_backend import attention_backend
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.flux import Flux
from fluxtrain.optimizers.schedule_free import ScheduleFreeAdamW
from fluxtrain.parallelize import allocate, empty_model
from fluxtrain.sharded_tensor import local_part
from fluxtrain.traffic import AXES, Axis, Collective
from fluxtrain.verify.encoders import empty_encoders, encodes, modules_of
from fluxtrain.verify.fake_world import fake_world
from fluxtrain.verify.recorder import Recorder
from fluxtrain.verify.step import Step


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
        with FakeTensorMode(allow_non_fake_inputs=True), attention_backend(_attention(config)):
            allocate(model, world.device)
            return _measured(Step(config, world, model, encoders, copies_ahead=has_gpu))


def _attention(config: RunConfig) -> str:
    """Return what computes attention here: none of other devices' keeps the scores either."""
    return "math" if config.parallel.attention == "math" else "flash"


def _measured(step: Step) -> Measured:
    """Take ``step``; return what it used."""
    tracker, recorder = _tracker(step), Recorder(_groups(step.model))
    syncs = list[str]()
    with ExitStack() as stack:
        stack.enter_context(recorder)
        stack.enter_context(tracker)
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
        tracker.track_inputs((*inputs, *_beside_parameters(step)))
        return tracker
    plain = MemTracker()
    _leave_frozen(plain, step.model)
    weights = nn.ParameterList(step.optimizer.weights.values())
    plain.track_external(weights, step.model, step.optimizer, *inputs)
    return plain


def _beside_parameters(step: Step) -> list[Tensor]:
    """Return this rank's parts of weights that are not the sharded parameters themselves."""
    if not isinstance(step.optimizer, ScheduleFreeAdamW):
        return []
    return [local_part(weight) for weight in step.optimizer.weights.values()]


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
