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

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluxtrain import optim, optimizer_step
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch
from fluxtrain.data.order import BatchShares
from fluxtrain.distributed import World
from fluxtrain.loss import FlowLoss
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import DTYPES, empty_model
from fluxtrain.step_times import StepTimes
from fluxtrain.traffic import AXES, Axis, Collective
from fluxtrain.verify.fake_world import fake_world
from fluxtrain.verify.recorder import Recorder

MOST_MICRO_BATCHES = 2
"""Of a step that accumulates gradients: the second one begins with all gradients, as every later one does."""
_STEP = 1


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
            return _Step(config, world, model).measured()


class _Step:
    """One optimizer step of ``model``, whose weights are fake tensors."""

    def __init__(self, config: RunConfig, world: World, model: Flux) -> None:
        self._config, self._model, self._device = config, model, world.device
        self._shares = BatchShares.of(config, world.size)
        self._optimizer = optim.make_optimizer(model, config.optim)
        self._flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
        self._times = StepTimes(world.device)
        self._bad_step = torch.tensor(optim.NEVER, device=world.device)
        self._micro_batches = min(self._shares.accumulation_steps, MOST_MICRO_BATCHES)

    def measured(self) -> Measured:
        """Take the step; return what it used."""
        self._update_once()
        batch = self._batch()
        tracker = self._tracker(batch)
        recorder = Recorder(self._groups())
        syncs = list[str]()
        with ExitStack() as stack:
            stack.enter_context(recorder)
            stack.enter_context(tracker)
            try:
                self._take(batch, tracker)
            except DataDependentOutputException as error:
                syncs.append(str(error.func))
        peak = Counter[str]()
        for snapshot in tracker.get_tracker_snapshot("peak").values():
            for kind, used in snapshot.items():
                if isinstance(kind, Enum):  # not the total
                    peak[str(kind.value)] += used
        return Measured(
            self._micro_batches,
            dict(+peak),
            recorder.collectives(),
            recorder.flops,
            recorder.kernels,
            syncs,
        )

    def _take(self, batch: Batch, tracker: MemTracker) -> None:
        samples = self._shares.micro_batch_size * self._shares.accumulation_steps
        for _ in range(self._micro_batches):
            optimizer_step.add_gradients(
                self._flow_loss, lambda _: batch, batch, samples, self._times
            )
            tracker.reset_mod_stats()
        self._update()

    def _update(self) -> None:
        optimizer_step.update(
            self._model, self._optimizer, self._config, _STEP, self._bad_step, self._times
        )

    def _update_once(self) -> None:
        """Update with zero gradients: DTensor remembers operators, from fake tensors that are unsharded."""
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()

    def _tracker(self, batch: Batch) -> MemTracker:
        inputs = tuple(batch.tensors().values())
        if isinstance(self._model, FSDPModule):
            tracker = FSDPMemTracker(self._model, self._optimizer)
            tracker.track_inputs(inputs)
            return tracker
        plain = MemTracker()
        plain.track_external(self._model, self._optimizer, *inputs)
        return plain

    def _groups(self) -> dict[Axis, dist.ProcessGroup]:
        parameter = next(self._model.parameters())
        if not isinstance(parameter, DTensor):
            return {}
        mesh = parameter.device_mesh
        return {axis: mesh.get_group(axis) for axis in AXES if axis in (mesh.mesh_dim_names or ())}

    def _batch(self) -> Batch:
        """Return a micro batch without values, its encodings in the compute dtype."""
        config, size = self._config, self._shares.micro_batch_size

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, *shape, dtype=dtype, device=self._device)

        compute, model = DTYPES[config.precision.compute], config.model
        return Batch(
            latent_noise=make(*config.latent_shape),
            noise=make(*config.latent_shape),
            timesteps=make(),
            weights=make(),
            dropped=make(dtype=torch.bool),
            indices=make(dtype=torch.int64),
            mean=make(*config.latent_shape),
            logvar=make(*config.latent_shape),
            txt=make(config.data.text_length, model.context_in_dim, dtype=compute),
            vec=make(model.vec_in_dim, dtype=compute),
        )
