"""Pictures on the way: Euler steps from noise to latents, decoded and laid out with their prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from fluxtrain import draws, flow
from fluxtrain.contract.config import RunConfig, SamplingConfig
from fluxtrain.contract.launch import Places
from fluxtrain.data.dataset import Dataset, Rows
from fluxtrain.data.empty_text import EmptyText
from fluxtrain.data.loader import latent_shape, open_empty_text, open_source
from fluxtrain.data.pictures import Pictures
from fluxtrain.distributed import World
from fluxtrain.draws import Array
from fluxtrain.encode.decode import load_decoder
from fluxtrain.encoding import load_encoders
from fluxtrain.loss import FlowLoss
from fluxtrain.watch.grid import Column, save_grid

Latents = Float[Tensor, "b ch h w"]


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
    sampling: SamplingConfig,
    tick: Callable[[], object] = lambda: None,
) -> Latents:
    """Return latents as the autoencoder knows them, walked from ``noise`` (t=1) to t=0.

    ``prompts`` and ``empty`` are text tokens "b l d" and pooled vectors "b v". With a ``cfg_scale`` other
    than 1 each step extrapolates from the empty prompt's velocity (classifier-free guidance). ``tick`` is
    called after each step.
    """
    cfg_scale = sampling.cfg_scale
    txt, vec = prompts
    if guided := cfg_scale != 1:
        txt, vec = torch.cat([txt, empty[0]]), torch.cat([vec, empty[1]])
    image_tokens = noise.shape[-2] * noise.shape[-1] // 4
    times = flow.sampling_times(sampling.num_steps, image_tokens, sampling.time_shift)
    x = noise
    for t, following in pairwise(times.to(noise.device)):
        both = torch.cat([x, x]) if guided else x
        velocity = flow_loss.predict(both, txt, vec, t.expand(len(both))).float()
        if guided:
            with_prompt, without = velocity.chunk(2)
            velocity = without + cfg_scale * (with_prompt - without)
        x = x + (following - t) * velocity
        tick()
    encoders = flow_loss.config.encoders
    return x / encoders.latent_scale + encoders.latent_shift


def to_pictures(images: Float[Tensor, "b 3 H W"]) -> list[Image.Image]:
    """Return images in [-1, 1] as 8-bit RGB pictures."""
    pixels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu()
    return [Image.fromarray(rearrange(image, "c h w -> h w c").numpy()) for image in pixels]


@dataclass(frozen=True)
class Scene:
    """What is drawn: chosen prompts first, then validation prompts with their originals."""

    captions: list[str]
    txt: Float[Tensor, "n l d"]
    vec: Float[Tensor, "n v"]
    empty: tuple[Float[Tensor, "n l d"], Float[Tensor, "n v"]]
    originals: Latents
    shape: tuple[int, int, int]
    attribution: str


class Painter:
    """Draws the same pictures at every step of a run; every rank takes part, rank 0 writes."""

    def __init__(self, config: RunConfig, places: Places, world: World) -> None:
        """Load nothing before the first picture is asked for."""
        self.config, self.places, self.world = config, places, world
        self._scene: Scene | None = None

    def paint(
        self, flow_loss: FlowLoss, path: Path, step: int, tick: Callable[[], object] = lambda: None
    ) -> None:
        """Write the grid to ``path``; every rank must call it. ``tick`` is called after each part of it."""
        sampling, device = self.config.sampling, self.world.device
        scene = self._scene = self._scene or self._compose()
        tick()
        noise = starting_noise(self.config.seed, len(scene.captions), scene.shape).to(device)
        flow_loss.model.eval()
        found = euler(
            flow_loss,
            noise,
            (scene.txt.to(device), scene.vec.to(device)),
            (scene.empty[0].to(device), scene.empty[1].to(device)),
            sampling,
            tick,
        )
        flow_loss.model.train()
        if self.world.is_main:
            self._write(scene, path, found, step)

    def _compose(self) -> Scene:
        source = open_source(self.config, self.places.data, "validation")
        count = min(self.config.sampling.num_prompts, len(source))
        indices = np.linspace(0, len(source) - 1, count).round().astype(np.int64)
        rows, empty = self._read(source, indices)
        chosen = list(self.config.sampling.prompts)
        txt, vec = self._encode(chosen)
        captions = chosen + [source.caption(int(index)) for index in indices]
        total = len(captions)
        return Scene(
            captions,
            torch.cat([txt, rows.txt.float()]) if chosen else rows.txt.float(),
            torch.cat([vec, rows.vec.float()]) if chosen else rows.vec.float(),
            (empty[0].float().expand(total, -1, -1), empty[1].float().expand(total, -1)),
            rows.mean.float(),
            latent_shape(self.config),
            source.attribution,
        )

    def _read(self, source: Dataset | Pictures, indices: Array) -> tuple[Rows, EmptyText]:
        """Return the encodings of the samples at ``indices`` and those of the empty prompt."""
        if isinstance(source, Pictures):
            encoders = load_encoders(self.config, self.places.models, self.world.device)
            return encoders.read(source, indices), encoders.empty_text()
        rows = Rows.empty(len(indices), source.shape)
        source.read(indices, rows, np.zeros(len(indices), dtype=bool))
        return rows, open_empty_text(self.config, self.places.data, source)

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        if not prompts:
            return torch.empty(0), torch.empty(0)
        if self.config.data.source == "images":
            encoders = load_encoders(self.config, self.places.models, self.world.device)
            txt, vec = encoders.text.encode(prompts)
            return txt.float(), vec.float()
        from fluxtrain.encode.text import load_text_encoder

        encoder = load_text_encoder(
            self.config.encoders,
            self.config.data.text_length,
            self.places.models,
            torch.device("cpu"),
            torch.float32,
        )
        return encoder.encode(prompts)

    def _write(self, scene: Scene, path: Path, found: Latents, step: int) -> None:
        decode = load_decoder(self.config.encoders, self.places.models, self.world.device)
        generated = to_pictures(decode(found))
        originals = to_pictures(decode(scene.originals.to(found.device)))
        chosen = len(scene.captions) - len(originals)
        columns: list[Column] = [
            (caption, [picture])
            for caption, picture in zip(scene.captions[:chosen], generated[:chosen], strict=True)
        ]
        pairs = zip(scene.captions[chosen:], originals, generated[chosen:], strict=True)
        columns += [(caption, [original, picture]) for caption, original, picture in pairs]
        parts = ["chosen prompts (sampling.prompts)"] * bool(chosen)
        parts += ["validation prompts, the originals above the model's"] * bool(originals)
        save_grid(path, columns, f"step {step}: {'; then '.join(parts)}", scene.attribution)
