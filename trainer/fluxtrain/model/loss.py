"""Each sample's loss: sample latents, add noise, predict the velocity, compare."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import LossWeighting
from fluxtrain.data.dataset import Batch
from fluxtrain.model import flux
from fluxtrain.model.flux import Flux
from fluxtrain.model.lora import set_keys
from fluxtrain.runtime.draws import resolution_mu


@dataclass(frozen=True)
class FlowLoss:
    """The loss of a model with a run's latent scaling; called with a batch on the model's device."""

    model: Flux
    config: RunConfig
    dtype: torch.dtype
    _ids: dict[tuple[int, int, int, int, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Position ids on the device: to copy them for each batch would wait for the device."""

    def __call__(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return each sample's mean squared error of the velocity, float32."""
        encoders = self.config.encoders
        rounded = self.dtype if self.config.flow.reference_rounding else torch.float32
        channels = self.config.latent_channels
        mean, logvar, latent_noise, noise, timesteps = (
            values.to(rounded)
            for values in (
                batch.mean[:, :channels],
                batch.logvar[:, :channels],
                batch.latent_noise,
                batch.noise,
                batch.timesteps,
            )
        )
        clean = sample_latents(
            mean, logvar, latent_noise, encoders.latent_shift, encoders.latent_scale
        )
        noisy = interpolate(clean, noise, timesteps)
        guidance, condition = self.config.training_guidance, batch.mean[:, channels:]
        text = batch.txt, batch.vec
        prediction = self.predict(noisy, *text, timesteps.float(), guidance, condition)
        return sample_losses(prediction, velocity(clean, noise), batch.mask)

    def training(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return each sample's loss times its weights: that of its timestep, and 0 for padding."""
        if self.config.adapter is not None and self.config.adapter.has_dropout:
            set_keys(self.model, batch.keys)
        weighting = self.config.flow.loss_weighting
        if weighting == "none":
            return self(batch) * batch.weights
        weights = loss_weights(batch.timesteps.float(), weighting)
        return self(batch) * weights * batch.weights

    def predict(
        self,
        noisy: Float[Tensor, "b ch h w"],
        txt: Float[Tensor, "b l d"],
        vec: Float[Tensor, "b v"] | Int[Tensor, "b i"],
        timesteps: Float[Tensor, " b"],
        guidance: float,
        condition: Float[Tensor, "b e h w"] | None = None,
    ) -> Float[Tensor, "b ch h w"]:
        """Return the predicted velocity at ``noisy``; ``guidance`` is for models with ``guidance_embed``.

        ``vec`` has CLIP's token ids if its adapters are trained. The ``condition`` is what `condition_of`
        returns; one of further tokens may be left out.
        """
        height, width = noisy.shape[-2:]
        model, img = self.config.model, flux.pack(noisy)
        num_tokens, images = img.shape[1], 1
        if condition is not None and condition.shape[1]:
            latents, hole = condition[:, : noisy.shape[1]], condition[:, noisy.shape[1] :]
            encoders = self.config.encoders
            scaled = (latents - encoders.latent_shift) * encoders.latent_scale
            given = flux.pack(torch.cat([scaled, hole], dim=1)).to(img)
            images = model.image_tokens(height, width) // num_tokens
            img = torch.cat([img, given], dim=2 if images == 1 else 1)
        key = height, width, txt.shape[1], images, noisy.device
        if key not in self._ids:
            ids = _ids(height, width, images), flux.text_ids(txt.shape[1])
            self._ids[key] = ids[0].to(noisy.device), ids[1].to(noisy.device)
        img_ids, txt_ids = self._ids[key]
        prediction = self.model(
            img=img.to(self.dtype),
            img_ids=img_ids,
            txt=txt.to(self.dtype),
            txt_ids=txt_ids,
            timesteps=timesteps,
            y=vec.to(self.dtype) if vec.is_floating_point() else vec,
            guidance=torch.full_like(timesteps, guidance) if model.guidance_embed else None,
        )
        return flux.unpack(prediction[:, :num_tokens], height, width)


def _ids(height: int, width: int, images: int) -> Tensor:
    """Return the positions of the tokens of several latent images, whose first axis counts them."""
    ids = flux.image_ids(height, width).repeat(images, 1)
    ids[:, 0] = torch.arange(images).repeat_interleave(len(ids) // images)
    return ids


# Rectified flow: the straight line from clean latents (t=0) to noise (t=1).
#
# Axes: b batch, ch h w latent image.


_LEAST_TIME = 1e-3
"""Least t in weights: FLUX.1's schedules have a thousand timesteps."""

Latents = Float[Tensor, "b ch h w"]
PerSample = Float[Tensor, " b"]


def sample_latents(
    mean: Latents, logvar: Latents, latent_noise: Latents, shift: float, scale: float
) -> Latents:
    """Return latents sampled from the autoencoder's normal distribution, shifted and scaled for the model."""
    return (mean + torch.exp(0.5 * logvar) * latent_noise - shift) * scale


def interpolate(clean: Latents, noise: Latents, t: PerSample) -> Latents:
    """Return the point at time ``t`` on the line from ``clean`` to ``noise``."""
    t = rearrange(t, "b -> b 1 1 1")
    return (1 - t) * clean + t * noise


def velocity(clean: Latents, noise: Latents) -> Latents:
    """Return d/dt of :func:`interpolate`: constant along the line, and the model's target."""
    return noise - clean


def sampling_times(num_steps: int, image_tokens: int, time_shift: str) -> Float[Tensor, " n"]:
    """Return the ``num_steps`` + 1 timesteps of Euler's method, from noise (1) to clean (0).

    ``none``: equal steps (FLUX.1 schnell). ``dev``: shifted towards noise, more so for more tokens:
    exp(mu) t / (1 + (exp(mu) - 1) t), mu linear from 0.5 at 256 tokens to 1.15 at 4096.
    """
    times = torch.linspace(1, 0, num_steps + 1)
    if time_shift == "none":
        return times
    factor = math.exp(resolution_mu(image_tokens))
    return factor * times / (1 + (factor - 1) * times)


def loss_weights(timesteps: PerSample, weighting: LossWeighting) -> PerSample:
    if weighting == "sigma_sqrt":
        return timesteps.clamp(min=_LEAST_TIME) ** -2.0
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * timesteps + 2 * timesteps**2))
    return torch.ones_like(timesteps)


def sample_losses(
    prediction: Latents, target: Latents, mask: Float[Tensor, "b h w"] | None = None
) -> PerSample:
    """Return each sample's mean squared error over all its elements, in float32.

    ``mask`` weighs the elements; the mean is over all of them, also those of weight 0, as kohya's is.
    """
    errors = (prediction.float() - target.float()).square()
    if mask is not None:
        errors = errors * rearrange(mask.float(), "b h w -> b 1 h w")
    return errors.mean(dim=(1, 2, 3))
