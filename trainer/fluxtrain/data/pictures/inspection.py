"""Looks at all pictures of a run as its training would: what it uses, changes and leaves out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from fluxtrain.contract.run.data import DataConfig, Size
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.folder import MARK, texts_beside
from fluxtrain.data.pictures.picture import control_of, decode, mask_of
from fluxtrain.data.pictures.subset import (
    FAULTS,
    ReadPicture,
    TrainingPicture,
    read_picture,
    reason_of,
)
from fluxtrain.runtime.files import atomic_write_by_several
from fluxtrain.runtime.progress import first_of

THUMBNAIL = 128
"""Longest side of a thumbnail in pixels."""
_MUCH_CROPPED = 0.6
"""Part of a picture that is seen, below which it is named."""


@dataclass(frozen=True)
class Look:
    """What a training makes of one picture."""

    picture: TrainingPicture
    width: int = 0
    height: int = 0
    sha256: str = ""
    placements: tuple[tuple[int, Placement], ...] = ()
    """As `ReadPicture` has them."""
    fault: str = ""
    texts: tuple[str, ...] = ()
    """Names of the text files beside it, of which the first with a caption is used."""
    thumbnail: Image.Image | None = None
    """The part that is seen, at the first size."""

    @property
    def name(self) -> str:
        """Return the name of the picture in reports."""
        return self.picture.label

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Return width and height in pixels of its samples, one for each resolution."""
        return tuple({number: each.size for number, each in self.placements}.values())

    @property
    def scale(self) -> float:
        """Return the largest factor by which it is resized; above 1 it is enlarged."""
        found = (p.resized[0] / self.width for _, p in self.placements)
        other = (p.resized[1] / self.height for _, p in self.placements)
        return max(*found, *other)

    @property
    def seen(self) -> float:
        """Return the smallest part of its area that is left after a crop."""
        return min(
            p.size[0] * p.size[1] / (p.resized[0] * p.resized[1]) for _, p in self.placements
        )


@dataclass(frozen=True)
class Inspection:
    """What a training makes of its pictures."""

    looks: list[Look]
    unread: Mapping[str, str]
    """Files that are skipped and not looked at, with the reason."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Files and folders that are no pictures of the user's, with the reason."""

    @property
    def used(self) -> list[Look]:
        return [look for look in self.looks if not look.fault]

    @property
    def skipped(self) -> dict[str, str]:
        """Return the names of the files that are not used, with the reason."""
        faults = {look.name: look.fault for look in self.looks if look.fault}
        return dict(sorted((dict(self.unread) | faults).items()))

    @property
    def enlarged(self) -> list[Look]:
        """Return the pictures that have fewer pixels than they are trained with, the smallest first."""
        return sorted((look for look in self.used if look.scale > 1), key=lambda look: -look.scale)

    @property
    def much_cropped(self) -> list[Look]:
        """Return the pictures of which much is not seen, the least seen first."""
        found = (look for look in self.used if look.seen < _MUCH_CROPPED)
        return sorted(found, key=lambda look: look.seen)

    @property
    def without_caption(self) -> list[Look]:
        """Return the pictures that have no caption of their own."""
        return [look for look in self.used if not look.picture.file.caption]

    @property
    def several_texts(self) -> list[Look]:
        """Return the pictures that have more than one text file."""
        return [look for look in self.used if len(look.texts) > 1]

    def long_captions(self, length: int) -> list[Look]:
        """Return the pictures whose captions have more than ``length`` words, and so even more tokens."""
        return [look for look in self.used if len(look.picture.caption.split()) > length]

    @property
    def equal(self) -> list[list[Look]]:
        """Return groups of pictures that have the same bytes."""
        groups = defaultdict[str, list[Look]](list)
        for look in self.used:
            groups[look.sha256].append(look)
        return [group for group in groups.values() if len(group) > 1]

    def samples(self, held_out: frozenset[str] = frozenset()) -> Counter[Size]:
        """Return the samples of an epoch by width and height in pixels, the most pixels first.

        Those of ``held_out``, by their hashes, are no samples of the training.
        """
        found = Counter[Size]()
        for look in (look for look in self.used if look.sha256 not in held_out):
            for size in look.sizes:
                found[size] += look.picture.repeats
        return Counter(
            dict(sorted(found.items(), key=lambda each: (-each[0][0] * each[0][1], each[0])))
        )

    def kinds(self) -> Counter[str]:
        """Return how many of the pictures that are used have each file suffix."""
        return Counter(Path(look.picture.file.name).suffix.lower() for look in self.used)


def inspect(
    pictures: Sequence[TrainingPicture],
    unread: Mapping[str, str],
    data: DataConfig,
    seed: int,
    threads: int,
    advance: Callable[[], object] = lambda: None,
    decodes: bool = True,
    left_out: Mapping[str, str] | None = None,
) -> Inspection:
    """Return what a training with ``data`` makes of ``pictures``; it ``decodes`` all, and their masks.

    ``advance`` is called after each picture.
    """
    looks = list[Look]()
    with ThreadPoolExecutor(threads, thread_name_prefix="picture") as pool:
        for look in pool.map(lambda picture: _look(picture, data, seed, decodes), pictures):
            looks.append(look)
            advance()
    return Inspection(looks, unread, left_out or {})


def _look(picture: TrainingPicture, data: DataConfig, seed: int, decodes: bool) -> Look:
    try:
        read = read_picture(picture, data, seed)
        for _, each in read.placements if decodes else ():
            if read.mask is not None:
                mask_of(read.mask, picture.mask_kind, read.size, each)
        for _, each in read.placements if decodes else ():
            if read.control is not None:
                control_of(read.control, read.size, each, picture.takes)
        thumbnail = _thumbnail(read) if decodes else None
    except FAULTS as error:
        return Look(picture, fault=reason_of(error))
    return Look(
        picture,
        read.width,
        read.height,
        read.sha256,
        read.placements,
        texts=tuple(path.name for path in texts_beside(picture.path)),
        thumbnail=thumbnail,
    )


def _thumbnail(read: ReadPicture) -> Image.Image:
    """Return the part of a picture that is seen at its first size, as a thumbnail."""
    _, placement = read.placements[0]
    scale = THUMBNAIL / max(placement.size)
    width, height = (max(1, round(side * scale)) for side in placement.resized)
    image = decode(read.content, at_least=(width, height))
    ratio = image.width / placement.resized[0], image.height / placement.resized[1]
    left, top, right, bottom = (side * ratio[axis % 2] for axis, side in enumerate(placement.box))
    part = image.crop((round(left), round(top), max(1, round(right)), max(1, round(bottom))))
    part.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    return part


MAX_PICTURES = 400
"""More pictures would make a page of which nothing is seen."""
_PER_ROW, _GAP, _TEXT_HEIGHT, _LINE, _FONT_SIZE = 8, 8, 42, 13, 11
_INK, _FAULT, _NOTE = "#222222", "#b00020", "#9a6700"


@dataclass(frozen=True)
class ContactSheet:
    """What was drawn."""

    pictures: int
    lacking: str
    """Characters of names and captions that no font has."""


def save_contact_sheet(path: Path, inspection: Inspection) -> ContactSheet:
    """Write a PNG with the first MAX_PICTURES pictures and their captions to ``path``.

    The pictures that cannot be used are among them, with the reason. In place of characters that no font of
    this machine has is their number, and before such a name that of the picture.
    Raises OSError if it cannot be written.
    """
    looks = inspection.looks[:MAX_PICTURES]
    num_rows = max(1, -(-len(looks) // _PER_ROW))
    cell = THUMBNAIL + _GAP, THUMBNAIL + _TEXT_HEIGHT + _GAP
    columns = min(_PER_ROW, max(1, len(looks)))
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, num_rows * cell[1] + _GAP), "white")
    fonts = Fonts(_FONT_SIZE, [text for look in looks for text in (look.name, _text(look)[0])])
    draw = ImageDraw.Draw(sheet)
    for number, look in enumerate(looks):
        row, column = divmod(number, _PER_ROW)
        left, top = _GAP + column * cell[0], _GAP + row * cell[1]
        _draw_thumbnail(sheet, draw, look, left, top)
        _draw_text(draw, fonts, look, number, left, top + THUMBNAIL + 2)
    info = PngInfo()
    info.add_text(*MARK)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_by_several(path) as partial:
        sheet.save(partial, format="PNG", pnginfo=info)
    return ContactSheet(len(looks), fonts.lacking)


def _text(look: Look) -> tuple[str, str]:
    if look.fault:
        return look.fault, _FAULT
    return (look.picture.caption, _INK) if look.picture.caption else ("no caption", _NOTE)


def _draw_thumbnail(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, look: Look, left: int, top: int
) -> None:
    """Draw one picture, or a crossed box if it is not used."""
    box = (left, top, left + THUMBNAIL - 1, top + THUMBNAIL - 1)
    if look.thumbnail is None:
        draw.rectangle(box, outline=_FAULT)
        draw.line(box, fill=_FAULT)
    else:
        free = THUMBNAIL - look.thumbnail.width, THUMBNAIL - look.thumbnail.height
        sheet.paste(look.thumbnail, (left + free[0] // 2, top + free[1] // 2))


def _draw_text(
    draw: ImageDraw.ImageDraw, fonts: Fonts, look: Look, number: int, left: int, top: int
) -> None:
    text, colour = _text(look)
    name = fonts.drawable(look.name)
    name = name if name == look.name else f"#{number + 1} {name}"
    ascent = fonts.base.getmetrics()[0]
    for row, line in enumerate([name, *_wrapped(fonts, fonts.drawable(text), lines=2)]):
        x = float(left)
        for part, font in fonts.runs(_fitted(fonts, line)):
            place = x, top + row * _LINE + ascent
            draw.text(place, part, fill=colour if row else _INK, font=font, anchor="ls")
            x += font.getlength(part)


def _wrapped(fonts: Fonts, text: str, lines: int) -> list[str]:
    """Return ``text`` in at most ``lines`` lines; the last may be too long."""
    found = [""]
    for word in text.split():
        longer = f"{found[-1]} {word}".strip()
        if len(found) < lines and found[-1] and fonts.length(longer) > THUMBNAIL:
            found.append(word)
        else:
            found[-1] = longer
    if len(found) < lines:  # a language that has no spaces
        fitting = len(found[-1])
        while fitting > 1 and fonts.length(found[-1][:fitting]) > THUMBNAIL:
            fitting -= 1
        last = found.pop()
        found += [last[:fitting], last[fitting:]] if fitting < len(last) else [last]
    return found


def _fitted(fonts: Fonts, text: str) -> str:
    """Return the beginning of ``text`` that is no wider than a thumbnail."""
    if fonts.length(text) <= THUMBNAIL:
        return text
    text = text[: THUMBNAIL // 2]
    while text and fonts.length(f"{text}…") > THUMBNAIL:
        text = text[:-1]
    return f"{text}…"


SUGGESTED = "Noto Sans CJK"
_NO_REAL_GLYPHS = "lastresort"
"""Part of the file names of fonts that have a box for every character."""


class Fonts:
    """The fonts with which texts are drawn at one size; characters that none has are replaced."""

    def __init__(self, size: int, texts: Iterable[str]) -> None:
        """Find fonts for all characters of ``texts``; installed ones are looked at if DejaVu lacks some."""
        from matplotlib import get_data_path

        base = Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
        self.base = ImageFont.truetype(base, size=size)
        self._of = dict[str, ImageFont.FreeTypeFont]()
        drawn = {char for char in set().union(*texts) if char.isprintable() and not char.isspace()}
        selectors = set(map(chr, range(0xFE00, 0xFE10)))
        left = drawn - selectors - _characters(base)
        for path, has in _best_first(left) if left else ():
            if found := left & has:
                try:
                    font = ImageFont.truetype(path, size=size)
                except OSError:  # such as one of bitmaps, which has other sizes
                    continue
                self._of |= dict.fromkeys(found, font)
                left -= found
        self.lacking = "".join(sorted(left))
        """Characters that no font has."""

    def drawable(self, text: str) -> str:
        """Return ``text`` with the number of characters in place of those that no font has."""
        parts = groupby(text, key=lambda char: char in self.lacking)
        return "".join(_count(len([*part])) if lacks else "".join(part) for lacks, part in parts)

    def runs(self, text: str) -> Iterator[tuple[str, ImageFont.FreeTypeFont]]:
        """Yield the parts of ``text`` with the font of each."""
        for font, part in groupby(text, key=lambda char: self._of.get(char, self.base)):
            yield "".join(part), font

    def length(self, text: str) -> float:
        """Return the width of ``text`` in pixels."""
        return sum(font.getlength(part) for part, font in self.runs(text))


def _count(characters: int) -> str:
    return f"[{characters} character{'s' * (characters > 1)}]"


def _best_first(wanted: set[str]) -> list[tuple[Path, frozenset[str]]]:
    """Return the installed fonts that have some of ``wanted``, those with the most first."""
    found = [(path, _characters(path) & wanted) for path in map(Path, sorted(installed_fonts()))]
    useful = [pair for pair in found if pair[1] and _NO_REAL_GLYPHS not in pair[0].name.lower()]
    return sorted(useful, key=lambda pair: (-len(pair[1]), pair[0].name, pair[0]))


def installed_fonts() -> list[str]:
    """Return the files of the fonts of this machine."""
    from matplotlib.font_manager import findSystemFonts

    return findSystemFonts()


@cache
def _characters(path: Path) -> frozenset[str]:
    """Return the characters that the font ``path`` has; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(map(chr, FT2Font(str(path)).get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()


def named(characters: str, most: int = 5) -> str:
    """Return the first of ``characters`` with their numbers, for a message."""
    return first_of([f"{char} U+{ord(char):04X}" for char in characters], most)
