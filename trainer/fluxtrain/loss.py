"""Each sample's loss: sample latents, add noise, predict the velocity, compare."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fluxtrain import flow
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch
from fluxtrain.model import latents
from fluxtrain.model.flux import Flux
from fluxtrain.model.lora import set_keys


@dataclass(frozen=True)
class FlowLoss:
    """The loss of a model with a run's latent scaling; called with a batch on the model's device."""

    model: Flux
    config: RunConfig
    dtype: torch.dtype
    _ids: dict[tuple[int, int, int, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Position ids on the device: to copy them for each batch would wait for the device."""

    def __call__(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return each sample's mean squared error of the velocity, float32."""
        encoders = self.config.encoders
        rounded = self.dtype if self.config.flow.reference_rounding else torch.float32
        mean, logvar, latent_noise, noise, timesteps = (
            values.to(rounded)
            for values in (
                batch.mean,
                batch.logvar,
                batch.latent_noise,
                batch.noise,
                batch.timesteps,
            )
        )
        clean = flow.sample_latents(
            mean, logvar, latent_noise, encoders.latent_shift, encoders.latent_scale
        )
        noisy = flow.interpolate(clean, noise, timesteps)
        guidance = self.config.training_guidance
        prediction = self.predict(noisy, batch.txt, batch.vec, timesteps.float(), guidance)
        return flow.sample_losses(prediction, flow.velocity(clean, noise), batch.mask)

    def training(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return each sample's loss times its weights: that of its timestep, and 0 for padding."""
        if self.config.adapter is not None and self.config.adapter.has_dropout:
            set_keys(self.model, batch.keys)
        weighting = self.config.flow.loss_weighting
        if weighting == "none":
            return self(batch) * batch.weights
        weights = flow.loss_weights(batch.timesteps.float(), weighting)
        return self(batch) * weights * batch.weights

    def predict(
        self,
        noisy: Float[Tensor, "b ch h w"],
        txt: Float[Tensor, "b l d"],
        vec: Float[Tensor, "b v"] | Int[Tensor, "b i"],
        timesteps: Float[Tensor, " b"],
        guidance: float,
    ) -> Float[Tensor, "b ch h w"]:
        """Return the predicted velocity at ``noisy``; ``guidance`` is for models with ``guidance_embed``.

        ``vec`` has CLIP's token ids if its adapters are trained.
        """
        height, width = noisy.shape[-2:]
        guided = self.config.model.guidance_embed
        key = height, width, txt.shape[1], noisy.device
        if key not in self._ids:
            ids = latents.image_ids(height, width), latents.text_ids(txt.shape[1])
            self._ids[key] = ids[0].to(noisy.device), ids[1].to(noisy.device)
        img_ids, txt_ids = self._ids[key]
        prediction = self.model(
            img=latents.pack(noisy).to(self.dtype),
            img_ids=img_ids,
            txt=txt.to(self.dtype),
            txt_ids=txt_ids,
            timesteps=timesteps,
            y=vec.to(self.dtype) if vec.is_floating_point() else vec,
            guidance=torch.full_like(timesteps, guidance) if guided else None,
        )
        return latents.unpack(prediction, height, width)
