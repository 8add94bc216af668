"""The sample images of a run as small pictures for a page: rows are prompts, columns are steps."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

MOST_STEPS, MOST_PROMPTS = 12, 32
_SIDE, _SMALL = 320, 128
_QUALITY = 85
_SETTINGS = ("prompt", "negative_prompt", "seed", "index", "steps", "cfg_scale", "guidance")
ORIGINALS = "originals"
"""Folder below that of the samples with the images of validation prompts."""


@dataclass(frozen=True)
class Picture:
    """An image of the samples."""

    file: str
    """Path relative to the output of the run."""
    data: str
    """A data: URL of a small version."""
    width: int
    height: int
    fields: dict[str, str]
    """Text fields of the file."""

    @property
    def settings(self) -> tuple[object, ...]:
        """Return what it was sampled with, the prompt first: equal in all pictures of a row."""
        return *(self.fields.get(name) for name in _SETTINGS), self.width, self.height


class Pictures:
    """The pictures of a run, read from its samples folder once."""

    def __init__(self, folder: Path) -> None:
        """Read nothing; ``folder`` holds step_0000250/00.png and originals/00.png."""
        self._folder = folder
        self._steps = list[int]()
        self._known = dict[str, Picture | None]()

    def add(self, step: int) -> None:
        """Add the images of ``step``, and read those that are shown from now on."""
        if step not in self._steps:
            self._steps = sorted([*self._steps, step])
        wanted = {_name(step): step for step in self.shown_steps}
        for folder in (*wanted, ORIGINALS):
            for index in range(MOST_PROMPTS):
                name = f"{folder}/{index:02d}.png"
                if self._known.get(name) is None:
                    self._known[name] = self._read(name)
        kept = {*wanted, ORIGINALS}
        self._known = {name: each for name, each in self._known.items() if name[:-7] in kept}

    @property
    def shown_steps(self) -> list[int]:
        """Return the steps with a column: the first, the last, and every n-th between."""
        stride = 1
        while len(self._steps[::stride]) > MOST_STEPS - 1:
            stride *= 2
        return sorted({*self._steps[::stride], *self._steps[-1:]})

    @property
    def num_steps(self) -> int:
        """Return the number of steps with images."""
        return len(self._steps)

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts with a picture: fewer than `rows` if some were changed."""
        return sum(any(self._of_prompt(index)) for index in range(MOST_PROMPTS))

    def rows(self) -> list[tuple[Picture | None, list[Picture | None]]]:
        """Return for each prompt its original image, if there is one, and the picture of each shown step.

        A prompt whose settings were changed on the way has a row for each of them.
        """
        found = list[tuple[Picture | None, list[Picture | None]]]()
        for index in range(MOST_PROMPTS):
            pictures = self._of_prompt(index)
            original = self._known.get(f"{ORIGINALS}/{index:02d}.png")
            for settings in dict.fromkeys(each.settings for each in pictures if each):
                row = [each if each and each.settings == settings else None for each in pictures]
                is_of_row = original is not None and original.settings[0] == settings[0]
                found.append((original if is_of_row else None, row))
        return found

    def _of_prompt(self, index: int) -> list[Picture | None]:
        """Return the picture of each shown step of the prompt with this number."""
        return [self._known.get(f"{_name(step)}/{index:02d}.png") for step in self.shown_steps]

    def _read(self, name: str) -> Picture | None:
        path = self._folder / name
        if not path.is_file():
            return None
        try:
            with Image.open(path) as image:
                fields = {str(key): str(value) for key, value in image.info.items()}
                width, height = image.size
                small = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None  # cut off, or not of this run
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        kind = "png" if max(small.size) <= _SMALL else "jpeg"
        buffer = io.BytesIO()
        small.save(buffer, kind, quality=_QUALITY)
        data = base64.b64encode(buffer.getvalue()).decode()
        file = f"{self._folder.name}/{name}"
        return Picture(file, f"data:image/{kind};base64,{data}", width, height, fields)


def _name(step: int) -> str:
    return f"step_{step:07d}"
