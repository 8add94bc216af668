"""Sampling by Euler steps from noise to latents, and conversion of images to 8-bit RGB.

Axes: b batch, l text tokens, d text width, v pooled width, ch h w latent image, H W image.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from fluxtrain import draws, flow
from fluxtrain.contract.run.sampling import SamplingConfig
from fluxtrain.loss import FlowLoss

Latents = Float[Tensor, "b ch h w"]


def initial_noise(seed: int, count: int, shape: tuple[int, int, int], first: int = 0) -> Latents:
    """Return the noise of ``count`` images from number ``first``; it depends on seed and number only."""
    noise = [
        draws.generator(seed, draws.SAMPLING, index).standard_normal(shape, dtype=np.float32)
        for index in range(first, first + count)
    ]
    return torch.from_numpy(np.stack(noise))


@torch.no_grad()
def denoise(
    flow_loss: FlowLoss,
    noise: Latents,
    prompts: tuple[Tensor, Tensor],
    empty: tuple[Tensor, Tensor],
    sampling: SamplingConfig,
    on_step: Callable[[], object] = lambda: None,
) -> Latents:
    """Return the autoencoder's latents, integrated from ``noise`` at t=1 to t=0.

    ``prompts`` and ``empty`` are text tokens "b l d" and pooled vectors "b v". With a ``cfg_scale`` other
    than 1 each step extrapolates from the velocity of ``empty``, the empty or a negative prompt
    (classifier-free guidance). ``on_step`` is called after each step.
    """
    cfg_scale = sampling.cfg_scale
    txt, vec = prompts
    if uses_cfg := cfg_scale != 1:
        txt, vec = torch.cat([txt, empty[0]]), torch.cat([vec, empty[1]])
    image_tokens = noise.shape[-2] * noise.shape[-1] // 4
    times = flow.sampling_times(sampling.num_steps, image_tokens, sampling.time_shift)
    x = noise
    for t, next_t in pairwise(times.to(noise.device)):
        batch = torch.cat([x, x]) if uses_cfg else x
        at = t.expand(len(batch))
        velocity = flow_loss.predict(batch, txt, vec, at, sampling.guidance).float()
        if uses_cfg:
            conditional, unconditional = velocity.chunk(2)
            velocity = unconditional + cfg_scale * (conditional - unconditional)
        x = x + (next_t - t) * velocity
        on_step()
    encoders = flow_loss.config.encoders
    return x / encoders.latent_scale + encoders.latent_shift


def to_pil_images(images: Float[Tensor, "b 3 H W"]) -> list[Image.Image]:
    """Return images in [-1, 1] as 8-bit RGB."""
    pixels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu()
    return [Image.fromarray(rearrange(image, "c h w -> h w c").numpy()) for image in pixels]
