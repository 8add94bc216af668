"""Image data sets: WebDataset tars of images and captions, read at random without unpacking.

    folder/
      shard_000000.tar              key.png|jpg|jpeg|webp, key.txt, optional key.json
      shard_000000.tar.index.json   the samples' spans; written on first use

A tar that is not whole raises DataError; a sample without image or caption is listed in ``skipped``; one that
cannot be read later raises SampleError, which the caller counts.
Axes: H W image.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from fluxtrain.data.images.decode import MAX_PIXELS, decode
from fluxtrain.data.open_files import max_open_files
from fluxtrain.data.tar.index import Skipped, open_index
from fluxtrain.errors import DataError


class SampleError(DataError):
    """One sample cannot be read; the message has its name and the reason."""


class TarImages:
    """The samples of every tar in a folder; may be used from several threads and processes."""

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS) -> None:
        """Open ``folder``; images of more than ``max_pixels`` are not decoded.

        Raises DataError, naming the file, if a tar is cut off or not a tar, or if there are no samples.
        """
        self.folder, self._max_pixels = folder, max_pixels
        self._paths = _tars(folder)
        self._indices = [open_index(path) for path in self._paths]
        self._starts = np.cumsum([0, *(len(index.keys) for index in self._indices)])
        self._files = _Files(self._paths, max_open=max(1, max_open_files() // 4))
        skipped = self._skipped()
        self.skipped, self.num_skipped = skipped.messages, skipped.count
        if not len(self):
            reason = f": {self.skipped[0]}" if self.skipped else ""
            raise DataError(f"{folder}: its tars hold no images with captions{reason}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def key(self, index: int) -> str:
        """Return the key of sample ``index``."""
        number, record = self._place(index)
        return self._indices[number].keys[record]

    def name(self, index: int) -> str:
        """Return the tar and the key of sample ``index``, for messages."""
        number, _ = self._place(index)
        return f"{self._paths[number]} key {self.key(index)!r}"

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``; SampleError if it is not UTF-8."""
        try:
            return self._read(index, slice(2, 4)).decode("utf-8")
        except UnicodeDecodeError:
            raise SampleError(f"{self.name(index)}: its caption is not UTF-8") from None

    def image(self, index: int) -> UInt8[Tensor, "3 H W"]:
        """Return the image of sample ``index`` on white; SampleError if it is unreadable."""
        content = self._read(index, slice(0, 2))
        try:
            return decode(content, self._max_pixels)
        except ValueError as error:
            raise SampleError(f"{self.name(index)}: {error}") from None

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the sample's JSON; {} if there is none or it is not an object."""
        try:
            content = json.loads(self._read(index, slice(4, 6)) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of the tar of sample ``index``, and its record there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _read(self, index: int, columns: slice) -> bytes:
        number, record = self._place(index)
        offset, size = self._indices[number].spans[record, columns].tolist()
        try:
            content = self._files.read(number, offset, size)
        except OSError as error:
            raise SampleError(f"{self.name(index)}: {error.strerror}") from None
        if len(content) != size:
            raise SampleError(f"{self.name(index)}: cut off")
        return content

    def _skipped(self) -> Skipped:
        skipped = Skipped()
        for path, index in zip(self._paths, self._indices, strict=True):
            for message in index.skipped.messages:
                skipped.add(f"{path}: {message}")
            skipped.count += index.skipped.count - len(index.skipped.messages)
        return skipped


def _tars(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        raise DataError(f"{folder}: no tars are here")
    return paths


class _Files:
    """Open tars, at most ``max_open``; the others are opened for each read.

    None is closed before the data set is, so that no thread loses the one it is reading.
    """

    def __init__(self, paths: list[Path], max_open: int) -> None:
        self._paths, self._max_open, self._open = paths, max_open, dict[int, int]()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open descriptors, for another process."""
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        """Close all descriptors."""
        for file in self._open.values():
            os.close(file)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset`` of tar ``number``; OSError if it cannot be opened."""
        file = self._open.get(number)
        if file is not None:
            return _pread(file, offset, size)
        file = os.open(self._paths[number], os.O_RDONLY | os.O_NONBLOCK)
        # setdefault is atomic; a lock could be held by another thread during a fork.
        if len(self._open) < self._max_open and self._open.setdefault(number, file) == file:
            return _pread(file, offset, size)
        try:
            return _pread(file, offset, size)
        finally:
            os.close(file)


def _pread(file: int, offset: int, size: int) -> bytes:
    """Return ``size`` bytes, or fewer if the file ends before."""
    content = os.pread(file, size, offset)
    while len(content) < size:  # a network file system may return less than requested
        more = os.pread(file, size - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
