"""One optimizer step of rank 0, on a batch without values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fluxtrain import optim, optimizer_step
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch
from fluxtrain.data.order import BatchShares
from fluxtrain.distributed import World
from fluxtrain.loss import FlowLoss
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import DTYPES
from fluxtrain.step_times import StepTimes

MOST_MICRO_BATCHES = 2
"""Of a step that accumulates gradients: the second one begins with all gradients, as every later one does."""
_STEP = 1


class Step:
    """The parts of a step of ``model``, which has its weights, on fake tensors or real ones."""

    def __init__(self, config: RunConfig, world: World, model: Flux) -> None:
        """Make the optimizer and a micro batch."""
        self._config, self._device = config, world.device
        self._shares = BatchShares.of(config, world.size)
        self.model = model
        self.optimizer = optim.make_optimizer(model, config.optim)
        self.micro_batches = min(self._shares.accumulation_steps, MOST_MICRO_BATCHES)
        self.batch = self._batch()
        self._flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
        self._times = StepTimes(world.device)
        self._bad_step = torch.tensor(optim.NEVER, device=world.device)

    def take(self, after_micro_batch: Callable[[], None] = lambda: None) -> None:
        """Take the step, of `micro_batches` micro batches."""
        samples = self._shares.micro_batch_size * self._shares.accumulation_steps
        for number in range(1, self.micro_batches + 1):
            optimizer_step.add_gradients(
                *(self._flow_loss, lambda _: self.batch, self.batch, samples, self._times),
                is_last=number == self.micro_batches,
            )
            after_micro_batch()
        optimizer_step.update(self.optimizer, self._config, _STEP, self._bad_step, self._times)

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
