"""Samples the same images several times during training: chosen prompts, and those of validation samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.buckets import PIXELS_PER_LATENT
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import Dataset, Encodings, shape_at
from fluxtrain.data.empty_text import EmptyText
from fluxtrain.data.images.dataset import ImageDataset
from fluxtrain.data.sources import Source, Sources
from fluxtrain.distributed import World
from fluxtrain.draws import Array
from fluxtrain.encode.clip import caption_ids
from fluxtrain.encode.codec import load_decoder
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.loss import FlowLoss
from fluxtrain.report.gallery.pictures import ORIGINALS
from fluxtrain.sample.batches import TextEncoding, sample_latents
from fluxtrain.sample.denoise import Latents, to_pil_images
from fluxtrain.sample.image_grid import Column, save_grid
from fluxtrain.sample.png import model_digest, save_png, text_fields
from fluxtrain.sample.prompt_file import Prompt, plain_prompts
from fluxtrain.sample.prompts import chosen_prompts

T = TypeVar("T")


@dataclass(frozen=True)
class GridContents:
    """What is sampled each time, on the host."""

    prompts: list[Prompt]
    texts: list[TextEncoding]
    negatives: list[TextEncoding]
    """Of each prompt: its negative prompt, or the empty one."""
    originals: list[Float[Tensor, "ch h w"]]
    """Latents of the validation images, whose prompts are the last ones."""


class GridSampler:
    """Samples on all ranks; rank 0 writes the images and the grid."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World, sources: Sources) -> None:
        """Load nothing; the encoders are loaded for the first grid."""
        self.config, self.paths, self.world, self.sources = config, paths, world, sources
        self._contents: GridContents | None = None

    def write(
        self, flow_loss: FlowLoss, path: Path, step: int, alive: Callable[[], object] = lambda: None
    ) -> bool:
        """Write the grid to ``path``, and each image below it, such as step_0000250/00.png.

        Every rank must call this; ``alive`` is called after each Euler step. Returns whether rank 0 has
        written them. If a rank cannot load what it needs, or rank 0 cannot decode or write, it prints why,
        and no rank raises. A failure inside of the model is that of a training step, unless there is one
        rank.
        """
        contents = self._agreed(step, self._load_contents)
        if contents is None:
            return False
        alive()
        flow_loss.model.eval()
        try:
            if self.world.size == 1:
                latents = self._agreed(step, lambda: self._sample(flow_loss, contents, alive))
            else:  # its collectives cannot be left by one rank
                latents = self._sample(flow_loss, contents, alive)
        finally:
            flow_loss.model.train()
        if latents is None:
            return False

        def save() -> bool:
            if self.world.is_main:
                self._save(contents, path, latents, step)
            return True

        return self._agreed(step, save) is not None

    def _agreed(self, step: int, make: Callable[[], T]) -> T | None:
        """Return what ``make`` returns; None on all ranks if it raises on one, which prints why."""
        made, failed = None, torch.zeros(1, device=self.world.device)
        try:
            made = make()
        except Exception as error:  # whatever it is, the training is worth more
            failed += 1
            print(
                f"no sample images at step {step}: rank {self.world.rank}: {_reason(error)}; "
                "the training goes on",
                file=sys.stderr,
                flush=True,
            )
        return None if self.world.all_sum(failed).item() else made

    def _sample(
        self, flow_loss: FlowLoss, contents: GridContents, alive: Callable[[], object]
    ) -> list[Latents]:
        texts = contents.texts, contents.negatives
        return sample_latents(flow_loss, contents.prompts, *texts, self.world, alive)

    def _load_contents(self) -> GridContents:
        if self._contents is not None:
            return self._contents
        source, config = self.sources.validation, self.config
        chosen = chosen_prompts(config, self.paths.data)
        length = self.sources.lengths[1]
        count = min(config.sampling.num_validation_prompts, length)
        indices = np.linspace(0, max(length - 1, 0), count).round().astype(np.int64)
        originals, own, empty = self._read_samples(source, indices)
        captions = [source.caption(int(index)) for index in indices] if source is not None else []
        plain = plain_prompts(config, captions, first=len(chosen))
        prompts = chosen + [_sized(*each) for each in zip(plain, originals, strict=True)]
        wanted = [each.text for each in chosen] + [each.negative for each in chosen]
        encoded = self._encode([text for text in wanted if text])
        negatives = [encoded.get(each.negative, empty) for each in prompts]
        texts = [encoded[each.text] for each in chosen] + own
        if config.trains_clip:
            texts, negatives = self._with_ids(prompts, texts, negatives)
        self._contents = GridContents(prompts, texts, negatives, originals)
        return self._contents

    def _with_ids(
        self, prompts: list[Prompt], texts: list[TextEncoding], negatives: list[TextEncoding]
    ) -> tuple[list[TextEncoding], list[TextEncoding]]:
        """Return the encodings of ``prompts`` with CLIP's token ids instead of its pooled vectors."""
        wanted = [text for each in prompts for text in (each.text, each.negative)]
        ids = caption_ids(self.config.encoders, self.paths.models, wanted)
        pairs = list(zip(prompts, texts, negatives, strict=True))
        return (
            [(text[0], torch.from_numpy(ids[each.text])) for each, text, _ in pairs],
            [(negative[0], torch.from_numpy(ids[each.negative])) for each, _, negative in pairs],
        )

    def _read_samples(
        self, source: Source | None, indices: Array
    ) -> tuple[list[Tensor], list[TextEncoding], TextEncoding]:
        """Return latents and texts of the samples at ``indices``, and the encoding of the empty prompt."""
        if self.sources.empty_text is None:  # of images
            encoders = load_encoders(self.config, self.paths.models, self.world.device)
            empty = encoders.empty_text()
        else:
            empty = self.sources.empty_text
        if source is None or not len(indices):
            return [], [], _on_host(empty)
        if isinstance(source, ImageDataset):
            parts = [encoders.encode_at(source, indices)]
        else:
            parts = [_read(source, index) for index in indices]
        texts = [_on_host(text) for part in parts for text in zip(part.txt, part.vec, strict=True)]
        return [mean.float() for part in parts for mean in part.mean], texts, _on_host(empty)

    def _encode(self, texts: list[str]) -> dict[str, TextEncoding]:
        """Return the encodings of ``texts``; an encoder that training does not need is freed again."""
        if not texts:
            return {}
        config, models = self.config, self.paths.models
        if config.data.source == "images":
            encoder = load_encoders(config, models, self.world.device).text
        else:
            from fluxtrain.encode.text import load_text_encoder

            length, host = config.data.text_length, torch.device("cpu")
            encoder = load_text_encoder(config.encoders, length, models, host, torch.float32)
        encoded = {}
        for text in dict.fromkeys(texts):
            txt, vec = encoder.encode([text])
            encoded[text] = _on_host((txt[0], vec[0]))
        return encoded

    def _save(
        self, contents: GridContents, path: Path, latents: Sequence[Latents], step: int
    ) -> None:
        decode = load_decoder(self.config.encoders, self.paths.models, self.world.device)
        generated = [to_pil_images(decode(each))[0] for each in latents]
        device = self.world.device
        originals = [to_pil_images(decode(each[None].to(device)))[0] for each in contents.originals]
        digest = model_digest(self.config, step)
        for index, (prompt, image) in enumerate(zip(contents.prompts, generated, strict=True)):
            fields = text_fields(self.config, prompt) | {"step": str(step), "model": digest}
            save_png(path.with_suffix("") / f"{index:02d}.png", image, fields)
        num_chosen = len(contents.prompts) - len(originals)
        for index, image in enumerate(originals, num_chosen):
            name = path.with_name(ORIGINALS) / f"{index:02d}.png"
            if not name.exists():
                save_png(name, image, {"prompt": contents.prompts[index].text})
        above = [list[Image]()] * num_chosen + [[original] for original in originals]
        columns: list[Column] = [
            (prompt.text, [*images, image])
            for prompt, images, image in zip(contents.prompts, above, generated, strict=True)
        ]
        parts = ["chosen prompts (sampling.prompts)"] * bool(num_chosen)
        parts += ["validation prompts, the originals above the model's"] * bool(originals)
        title = f"step {step}: {'; then '.join(parts)}"
        save_grid(path, columns, title, self.sources.attribution)


def _read(dataset: Dataset, index: int) -> Encodings:
    """Return the encodings of sample ``index``."""
    indices = np.array([index])
    rows = Encodings.empty(1, shape_at(dataset, indices))
    dataset.read(indices, rows, np.zeros(1, dtype=bool))
    return rows


def _sized(prompt: Prompt, original: Float[Tensor, "ch h w"]) -> Prompt:
    """Return ``prompt`` with the size of the image whose latents are ``original``."""
    height, width = (PIXELS_PER_LATENT * side for side in original.shape[1:])
    return replace(prompt, width=width, height=height)


def _on_host(text: EmptyText) -> TextEncoding:
    return text[0].float().cpu(), text[1].float().cpu()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
