"""Samples the same grid of images several times during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.empty_text import EmptyText
from fluxtrain.data.images.dataset import ImageDataset
from fluxtrain.data.sources import Source, Sources
from fluxtrain.distributed import World
from fluxtrain.draws import Array
from fluxtrain.encode.codec import load_decoder
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.loss import FlowLoss
from fluxtrain.sample.denoise import Latents, denoise, initial_noise, to_pil_images
from fluxtrain.sample.image_grid import Column, save_grid


@dataclass(frozen=True)
class GridContents:
    """Encoded prompts: those of ``sampling.prompts``, then validation captions with their images."""

    captions: list[str]
    txt: Float[Tensor, "n l d"]
    vec: Float[Tensor, "n v"]
    empty: tuple[Float[Tensor, "n l d"], Float[Tensor, "n v"]]
    originals: Latents
    """Latents of the validation images."""


class GridSampler:
    """Samples the grid on all ranks; rank 0 writes it."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World, sources: Sources) -> None:
        """Load nothing; the encoders are loaded for the first grid."""
        self.config, self.paths, self.world, self.sources = config, paths, world, sources
        self._contents: GridContents | None = None

    def write(
        self, flow_loss: FlowLoss, path: Path, step: int, alive: Callable[[], object] = lambda: None
    ) -> None:
        """Write the grid to ``path``; every rank must call this. ``alive`` is called after each step."""
        sampling, device = self.config.sampling, self.world.device
        contents = self._contents = self._contents or self._load_contents()
        alive()
        count, shape = len(contents.captions), self.config.latent_shape
        noise = initial_noise(self.config.drawn_seed, count, shape).to(device)
        flow_loss.model.eval()
        latents = denoise(
            flow_loss,
            noise,
            (contents.txt.to(device), contents.vec.to(device)),
            (contents.empty[0].to(device), contents.empty[1].to(device)),
            sampling,
            alive,
        )
        flow_loss.model.train()
        if self.world.is_main:
            self._save(contents, path, latents, step)

    def _load_contents(self) -> GridContents:
        source = self.sources.validation
        count = min(self.config.sampling.num_prompts, len(source))
        indices = np.linspace(0, len(source) - 1, count).round().astype(np.int64)
        rows, empty = self._read_samples(source, indices)
        prompts = list(self.config.sampling.prompts)
        txt, vec = self._encode(prompts)
        captions = prompts + [source.caption(int(index)) for index in indices]
        total = len(captions)
        return GridContents(
            captions,
            torch.cat([txt, rows.txt.float()]) if prompts else rows.txt.float(),
            torch.cat([vec, rows.vec.float()]) if prompts else rows.vec.float(),
            (empty[0].float().expand(total, -1, -1), empty[1].float().expand(total, -1)),
            rows.mean.float(),
        )

    def _read_samples(self, source: Source, indices: Array) -> tuple[Encodings, EmptyText]:
        """Return the encodings of the samples at ``indices`` and those of the empty prompt."""
        if isinstance(source, ImageDataset):
            encoders = load_encoders(self.config, self.paths.models, self.world.device)
            return encoders.encode_at(source, indices), encoders.empty_text()
        rows = Encodings.empty(len(indices), source.shape)
        source.read(indices, rows, np.zeros(len(indices), dtype=bool))
        assert self.sources.empty_text is not None
        return rows, self.sources.empty_text

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        if not prompts:
            return torch.empty(0), torch.empty(0)
        if self.config.data.source == "images":
            encoders = load_encoders(self.config, self.paths.models, self.world.device)
            txt, vec = encoders.text.encode(prompts)
            return txt.float(), vec.float()
        from fluxtrain.encode.text import load_text_encoder

        encoder = load_text_encoder(
            self.config.encoders,
            self.config.data.text_length,
            self.paths.models,
            torch.device("cpu"),
            torch.float32,
        )
        return encoder.encode(prompts)

    def _save(self, contents: GridContents, path: Path, latents: Latents, step: int) -> None:
        decode = load_decoder(self.config.encoders, self.paths.models, self.world.device)
        generated = to_pil_images(decode(latents))
        originals = to_pil_images(decode(contents.originals.to(latents.device)))
        num_prompts = len(contents.captions) - len(originals)
        above = [list[Image]()] * num_prompts + [[original] for original in originals]
        columns: list[Column] = [
            (caption, [*images, image])
            for caption, images, image in zip(contents.captions, above, generated, strict=True)
        ]
        parts = ["chosen prompts (sampling.prompts)"] * bool(num_prompts)
        parts += ["validation prompts, the originals above the model's"] * bool(originals)
        title = f"step {step}: {'; then '.join(parts)}"
        save_grid(path, columns, title, self.sources.validation.attribution)
