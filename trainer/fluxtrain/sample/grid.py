"""Samples the same images several times during training: chosen prompts, and those of validation samples."""

from __future__ import annotations

import hashlib
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image as PilImage
from PIL import ImageDraw, ImageFont
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import IMMUTABLE_PATHS, RunConfig, value_at
from fluxtrain.contract.run.data import PIXELS_PER_LATENT
from fluxtrain.data.dataset import EmptyText, Source
from fluxtrain.data.sources import Sources
from fluxtrain.encode.clip import caption_ids
from fluxtrain.encode.codec import load_decoder
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.errors import FluxtrainError
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World
from fluxtrain.report.gallery import ORIGINALS
from fluxtrain.runtime.draws import Array
from fluxtrain.runtime.files import atomic_write_by_several, writing
from fluxtrain.sample.denoise import (
    Condition,
    Latents,
    TextEncoding,
    conditions_of,
    sample_latents,
    to_pil_images,
)
from fluxtrain.sample.prompts import Prompt, chosen_prompts, plain_prompts

T = TypeVar("T")


@dataclass(frozen=True)
class GridContents:
    """What is sampled each time, on the host."""

    prompts: list[Prompt]
    texts: list[TextEncoding]
    negatives: list[TextEncoding]
    """Of each prompt: its negative prompt, or the empty one."""
    conditions: list[Condition]
    """Of each prompt."""
    originals: list[Float[Tensor, "ch h w"]]
    """Latents of the validation images, whose prompts are the last ones."""


class GridSampler:
    """Samples on all ranks; rank 0 writes the images and the grid."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World, sources: Sources) -> None:
        """Load nothing; the encoders are loaded for the first grid."""
        self.config, self.paths, self.world, self.sources = config, paths, world, sources
        self._chosen: list[Prompt] = []
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
        is_read = self._agreed(step, self._read_prompts)
        contents = self._agreed(step, self._load_contents) if is_read else None
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
                "the training continues",
                file=sys.stderr,
                flush=True,
            )
        return None if self.world.all_sum(failed).item() else made

    def _sample(
        self, flow_loss: FlowLoss, contents: GridContents, alive: Callable[[], object]
    ) -> list[Latents]:
        given = contents.texts, contents.negatives, contents.conditions
        return sample_latents(flow_loss, contents.prompts, *given, self.world, alive)

    def _read_prompts(self) -> bool:
        """Read the prompts as they are now, on rank 0; keep those of before if their file is wrong."""
        try:
            chosen = self.world.from_main(lambda: chosen_prompts(self.config, self.paths.data))
        except FluxtrainError as error:
            if self._contents is None:
                raise
            if self.world.is_main:
                text = f"{error}; the prompts of before are sampled"
                print(text, file=sys.stderr, flush=True)
        else:
            self._contents = self._contents if chosen == self._chosen else None
            self._chosen = chosen
        return True

    def _load_contents(self) -> GridContents:
        if self._contents is not None:
            return self._contents
        source, config, chosen = self.sources.validation, self.config, self._chosen
        length = self.sources.lengths[1]
        count = min(config.sampling.num_validation_prompts, length)
        indices = np.linspace(0, max(length - 1, 0), count).round().astype(np.int64)
        samples, own, empty = self._read_samples(source, indices)
        originals = [each[: config.latent_channels] for each in samples]
        captions = [source.caption(int(index)) for index in indices] if source is not None else []
        plain = plain_prompts(config, captions, first=len(chosen))
        prompts = chosen + [_sized(*each) for each in zip(plain, originals, strict=True)]
        wanted = [each.text for each in chosen] + [each.negative for each in chosen]
        encoded = self._encode([text for text in wanted if text])
        negatives = [encoded.get(each.negative, empty) for each in prompts]
        texts = [encoded[each.text] for each in chosen] + own
        if config.trains_clip:
            texts, negatives = self._with_ids(prompts, texts, negatives)
        conditions = conditions_of(chosen, config, self.paths.models, self.world.device)
        if config.model.condition != "none":
            conditions += [each[config.latent_channels :] for each in samples]
            prompts[len(chosen) :] = [
                replace(each, control=Path(ORIGINALS, f"{index:02d}.png"))
                for index, each in enumerate(prompts[len(chosen) :], len(chosen))
            ]
        else:
            conditions += [None] * len(samples)
        self._contents = GridContents(prompts, texts, negatives, conditions, originals)
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
        empty, encode = self.sources.empty_text, None
        if empty is None:  # of images
            encoders = load_encoders(self.config, self.paths.models, self.world.device)
            empty, encode = encoders.empty_text(), encoders.encode
        if source is None or not len(indices):
            return [], [], _on_host(empty)
        parts = source.encodings(indices, encode)
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

        def picture(latents: Latents) -> Image:
            return to_pil_images(decode(latents))[0]

        generated = [picture(each) for each in latents]
        device = self.world.device
        channels = self.config.latent_channels
        own = [*[None] * (len(contents.prompts) - len(contents.originals)), *contents.originals]
        above = [
            [picture(each[None, :channels].to(device)) for each in pair if each is not None]
            for pair in zip(contents.conditions, own, strict=True)
        ]
        digest = model_digest(self.config, step)
        for index, (prompt, image) in enumerate(zip(contents.prompts, generated, strict=True)):
            fields = text_fields(self.config, prompt) | {"step": str(step), "model": digest}
            save_png(path.with_suffix("") / f"{index:02d}.png", image, fields)
        num_originals = len(contents.originals)
        for index, images in enumerate(above):
            name = path.with_name(ORIGINALS) / f"{index:02d}.png"
            if images and not name.exists():
                row = PilImage.fromarray(np.hstack([np.asarray(image) for image in images]))
                save_png(name, row, {"prompt": contents.prompts[index].text})
        columns: list[Column] = [
            (prompt.text, [*images, image])
            for prompt, images, image in zip(contents.prompts, above, generated, strict=True)
        ]
        parts = ["chosen prompts (sampling.prompts)"] * (len(above) > num_originals)
        parts += ["validation prompts, the originals above the model's"] * bool(num_originals)
        controls = ", controls on top" * any(each is not None for each in contents.conditions)
        title = f"step {step}: {'; then '.join(parts)}{controls}"
        save_grid(path, columns, title, self.sources.attribution)


def _sized(prompt: Prompt, original: Float[Tensor, "ch h w"]) -> Prompt:
    height, width = (PIXELS_PER_LATENT * side for side in original.shape[1:])
    return replace(prompt, width=width, height=height)


def _on_host(text: EmptyText) -> TextEncoding:
    return text[0].float().cpu(), text[1].float().cpu()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


_CAPTION_HEIGHT, _GAP, _PER_ROW = 30, 6, 6
_SMALL, _LARGEST = 128, 384
"""Images up to the first side are drawn twice as large; larger ones to the second side at most."""
Column = tuple[str, list[PilImage.Image]]
"""A caption and the images below it."""


def save_grid(path: Path, columns: list[Column], title: str, footer: str = "") -> None:
    """Write ``columns`` to ``path`` as a PNG, six to a row, with ``title`` above and ``footer`` below."""
    rows = [columns[start : start + _PER_ROW] for start in range(0, len(columns), _PER_ROW)]
    every = [image for _, images in columns for image in images]
    longest = max(max(image.size) for image in every)
    scale = 2.0 if longest <= _SMALL else min(1.0, _LARGEST / longest)
    cell_w = round(scale * max(image.width for image in every)) + _GAP
    cell_h = round(scale * max(image.height for image in every)) + _GAP
    heights = [_CAPTION_HEIGHT + cell_h * max(len(images) for _, images in row) for row in rows]
    footer_text = _wrap(footer, cell_w * _PER_ROW // 6, max_lines=9)
    size = sum(heights) + _CAPTION_HEIGHT + 14 * len(footer_text.splitlines())
    grid = PilImage.new("RGB", (cell_w * _PER_ROW + _GAP, size), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=11)
    draw.text((_GAP, 8), title, fill="black", font=font)
    top = _CAPTION_HEIGHT
    for row, row_height in zip(rows, heights, strict=True):
        for column, (caption, images) in enumerate(row):
            left = _GAP + column * cell_w
            text = _wrap(caption, max(22, cell_w // 6))
            draw.multiline_text((left, top), text, fill="black", font=font, spacing=1)
            for index, image in enumerate(images):
                size_drawn = round(scale * image.width), round(scale * image.height)
                drawn = image.resize(size_drawn, PilImage.Resampling.LANCZOS)
                grid.paste(drawn, (left, top + _CAPTION_HEIGHT + index * cell_h))
        top += row_height
    draw.multiline_text((_GAP, top), footer_text, fill="gray", font=font, spacing=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_by_several(path) as partial:
        grid.save(partial, format="PNG")


def _wrap(text: str, width: int = 22, max_lines: int = 2) -> str:
    words = " ".join(text.split())
    lines = textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines[:max_lines])


def text_fields(config: RunConfig, prompt: Prompt) -> dict[str, str]:
    fields = {
        "prompt": prompt.text,
        "negative_prompt": prompt.negative,
        "seed": str(prompt.seed),
        "index": str(prompt.index),
        "steps": str(prompt.num_steps),
        "time_shift": config.sampling.time_shift,
        "cfg_scale": str(prompt.cfg_scale),
        "guidance": "" if prompt.guidance is None else str(prompt.guidance),
        "control": str(prompt.control or ""),
        "mask": str(prompt.mask or ""),
        "weights": str(config.initial_weights or ""),
        "adapters": ", ".join(f"{each.path}:{each.strength:g}" for each in config.added_adapters),
        "Software": f"fluxtrain {__version__}",
    }
    return {name: text for name, text in fields.items() if text}


def model_digest(config: RunConfig, step: int) -> str:
    """Return a SHA-256 that names the weights after ``step``: of it and all fields that they depend on."""
    values = config.model_dump(mode="json")
    fields = {path: value_at(values, path) for path in sorted(IMMUTABLE_PATHS)}
    text = json.dumps([fields, step], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def save_png(path: Path, image: PilImage.Image, fields: Mapping[str, str]) -> None:
    """Write ``image`` with ``fields`` to ``path``, whole or not at all; StorageError if that fails."""
    info = PngInfo()
    for key, text in fields.items():
        info.add_itxt(key, text)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write_by_several(path) as partial:
            image.save(partial, format="png", pnginfo=info)
