"""Each sample's loss: sample latents, add noise, predict the velocity, compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain import flow
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch
from fluxtrain.model import latents
from fluxtrain.model.flux import Flux


@dataclass(frozen=True)
class FlowLoss:
    """The loss of a model with a run's latent scaling; called with a batch on the model's device."""

    model: Flux
    config: RunConfig
    dtype: torch.dtype

    def __call__(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return each sample's mean squared error of the velocity, float32."""
        encoders = self.config.encoders
        clean = flow.sample_latents(
            batch.mean,
            batch.logvar,
            batch.latent_noise,
            encoders.latent_shift,
            encoders.latent_scale,
        )
        noisy = flow.interpolate(clean, batch.noise, batch.timesteps)
        prediction = self.predict(noisy, batch.txt, batch.vec, batch.timesteps)
        return flow.sample_losses(prediction, flow.velocity(clean, batch.noise))

    def predict(
        self,
        noisy: Float[Tensor, "b ch h w"],
        txt: Float[Tensor, "b l d"],
        vec: Float[Tensor, "b v"],
        timesteps: Float[Tensor, " b"],
    ) -> Float[Tensor, "b ch h w"]:
        """Return the predicted velocity at ``noisy``."""
        height, width = noisy.shape[-2:]
        guidance = None
        if self.config.model.guidance_embed:
            guidance = torch.full_like(timesteps, self.config.sampling.guidance)
        prediction = self.model(
            img=latents.pack(noisy).to(self.dtype),
            img_ids=latents.image_ids(height, width).to(noisy.device),
            txt=txt.to(self.dtype),
            txt_ids=latents.text_ids(txt.shape[1]).to(noisy.device),
            timesteps=timesteps,
            y=vec.to(self.dtype),
            guidance=guidance,
        )
        return latents.unpack(prediction, height, width)
