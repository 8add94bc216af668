"""Pictures on the way: Euler steps from noise to latents, decoded and laid out with their prompts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fluxtrain import draws
from fluxtrain.loss import FlowLoss

Latents = Float[Tensor, "b ch h w"]
_CAPTION_HEIGHT, _GAP, _SCALE = 30, 6, 2


def starting_noise(seed: int, count: int, shape: tuple[int, int, int]) -> Latents:
    """Return the noise that picture 0 ... ``count`` - 1 starts from: the same at every step of a run."""
    noise = [
        draws.generator(seed, draws.SAMPLING, index).standard_normal(shape, dtype=np.float32)
        for index in range(count)
    ]
    return torch.from_numpy(np.stack(noise))


@torch.no_grad()
def euler(
    flow_loss: FlowLoss,
    noise: Latents,
    prompts: tuple[Tensor, Tensor],
    empty: tuple[Tensor, Tensor],
    num_steps: int,
    cfg_scale: float,
) -> Latents:
    """Return latents as the autoencoder knows them, walked from ``noise`` (t=1) to t=0 in equal steps.

    ``prompts`` and ``empty`` are text tokens "b l d" and pooled vectors "b v". With ``cfg_scale`` other
    than 1 each step extrapolates from the empty prompt's velocity (classifier-free guidance).
    """
    txt, vec = prompts
    if guided := cfg_scale != 1:
        txt, vec = torch.cat([txt, empty[0]]), torch.cat([vec, empty[1]])
    times = torch.linspace(1, 0, num_steps + 1, device=noise.device)
    x = noise
    for t, following in pairwise(times):
        both = torch.cat([x, x]) if guided else x
        velocity = flow_loss.predict(both, txt, vec, t.expand(len(both))).float()
        if guided:
            with_prompt, without = velocity.chunk(2)
            velocity = without + cfg_scale * (with_prompt - without)
        x = x + (following - t) * velocity
    encoders = flow_loss.config.encoders
    return x / encoders.latent_scale + encoders.latent_shift


def to_pictures(images: Float[Tensor, "b 3 H W"]) -> list[Image.Image]:
    """Return images in [-1, 1] as 8-bit RGB pictures."""
    pixels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu()
    return [Image.fromarray(rearrange(image, "c h w -> h w c").numpy()) for image in pixels]


Column = tuple[str, list[Image.Image]]


def save_grid(path: Path, columns: list[Column], title: str) -> None:
    """Write a PNG of ``columns``: a caption above pictures that belong together, eight to a row."""
    per_row = 6
    rows = [columns[start : start + per_row] for start in range(0, len(columns), per_row)]
    width, height = columns[0][1][0].size
    cell_w, cell_h = width * _SCALE + _GAP, height * _SCALE + _GAP
    heights = [_CAPTION_HEIGHT + cell_h * max(len(pictures) for _, pictures in row) for row in rows]
    grid = Image.new("RGB", (cell_w * per_row + _GAP, sum(heights) + _CAPTION_HEIGHT), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=11)
    draw.text((_GAP, 8), title, fill="black", font=font)
    top = _CAPTION_HEIGHT
    for row, row_height in zip(rows, heights, strict=True):
        for number, (caption, pictures) in enumerate(row):
            left = _GAP + number * cell_w
            draw.multiline_text((left, top), _wrapped(caption), fill="black", font=font, spacing=1)
            for index, picture in enumerate(pictures):
                enlarged = picture.resize(
                    (width * _SCALE, height * _SCALE), Image.Resampling.LANCZOS
                )
                grid.paste(enlarged, (left, top + _CAPTION_HEIGHT + index * cell_h))
        top += row_height
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    grid.save(partial, format="PNG")
    partial.replace(path)


def _wrapped(caption: str, width: int = 22) -> str:
    lines = [""]
    for word in caption.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:2])
