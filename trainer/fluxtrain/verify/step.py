"""One optimizer step of rank 0, on a batch without values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluxtrain import optim, optimizer_step
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch, ImageBatch
from fluxtrain.data.loader import AnyBatch
from fluxtrain.data.order import BatchShares
from fluxtrain.distributed import World
from fluxtrain.encode.encoders import Encoders
from fluxtrain.loss import FlowLoss
from fluxtrain.model.adapted_layers import rate_of
from fluxtrain.model.clip import CLIP_LENGTH
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import DTYPES
from fluxtrain.step_times import StepTimes
from fluxtrain.verify.encoders import allocated

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
        self._config, self._device = config, world.device
        self._shares = BatchShares.of(config, world.size)
        self.model, compute = model, DTYPES[config.precision.compute]
        self.optimizer = optim.make_optimizer(
            *(model, config.optim, compute), partial(rate_of, adapter=config.adapter), _SEED
        )
        self.micro_batches = min(self._shares.accumulation_steps, MOST_MICRO_BATCHES)
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
            optimizer_step.add_gradients(
                *(self._flow_loss, self._encode, self.batch, samples, self._times),
                is_last=number == self.micro_batches,
            )
            after_micro_batch()
        optimizer_step.update(self.optimizer, self._config, _STEP, self._bad_step, self._times)

    def _encode(self, batch: AnyBatch) -> Batch:
        if isinstance(batch, Batch):
            return batch
        assert self.encoders is not None
        return self.encoders.encode_batch(batch)

    def _batch(self, size: int) -> AnyBatch:
        """Return a batch without values, its text encodings in the dtype that they are stored in."""
        config, device = self._config, self._device

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, *shape, dtype=dtype, device=device)

        drawn: dict[str, Any] = {
            "latent_noise": make(*config.latent_shape),
            "noise": make(*config.latent_shape),
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
