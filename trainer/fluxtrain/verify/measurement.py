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
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import empty_model
from fluxtrain.traffic import AXES, Axis, Collective
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


def measure(config: RunConfig, num_nodes: int, ranks_per_node: int) -> Measured:
    """Return what rank 0 uses in one step of ``config``, without compilation, on as many ranks."""
    config = eager(config)
    with fake_world(num_nodes, ranks_per_node) as world:
        model = empty_model(config, world)  # makes the mesh, which cannot be made of fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=world.device)
            return _measured(Step(config, world, model))


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
        recorder.kernels,
        syncs,
    )


def _tracker(step: Step) -> MemTracker:
    inputs = tuple(step.batch.tensors().values())
    if isinstance(step.model, FSDPModule):
        tracker = FSDPMemTracker(step.model, step.optimizer)
        tracker.track_inputs(inputs)
        return tracker
    plain = MemTracker()
    plain.track_external(step.model, step.optimizer, *inputs)
    return plain


def _groups(model: Flux) -> dict[Axis, dist.ProcessGroup]:
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor):
        return {}
    mesh = parameter.device_mesh
    return {axis: mesh.get_group(axis) for axis in AXES if axis in (mesh.mesh_dim_names or ())}
