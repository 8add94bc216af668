"""Image data sets: WebDataset tars of images and captions, read at random and never unpacked.

    folder/
      shard_000000.tar              key.png|jpg|jpeg|webp, key.txt, optional key.json
      shard_000000.tar.index.json   where the samples lie; made on first use

A tar is whole or refused (DataError); a sample that is not whole is named in ``skipped``; one that
turns out unreadable raises SampleError, and the caller counts it.
Axes: H W image.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from fluxtrain.data.images.decode import MAX_PIXELS, decode
from fluxtrain.data.tar.index import Skipped, open_index
from fluxtrain.errors import DataError


class SampleError(DataError):
    """One sample cannot be read; its text names the sample and says why."""


class TarImages:
    """The samples of every tar in a folder; may be used from several threads and processes."""

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS) -> None:
        """Open ``folder``; images of more than ``max_pixels`` are not decoded.

        Raises DataError, naming the file, where a tar is cut off or is none, or no sample is found.
        """
        self.folder, self._max_pixels = folder, max_pixels
        self._paths = _tars(folder)
        self._indices = [open_index(path) for path in self._paths]
        self._starts = np.cumsum([0, *(len(index.keys) for index in self._indices)])
        self._files = _Files(self._paths, most=_most_files())
        noted = self._skipped()
        self.skipped, self.num_skipped = noted.texts, noted.count
        if not len(self):
            why = f": {self.skipped[0]}" if self.skipped else ""
            raise DataError(f"{folder}: its tars hold no images with captions{why}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` inside its tar."""
        number, record = self._place(index)
        return self._indices[number].keys[record]

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        number, _ = self._place(index)
        return f"{self._paths[number]} key {self.key(index)!r}"

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``; SampleError where it is not UTF-8."""
        try:
            return self._read(index, slice(2, 4)).decode("utf-8")
        except UnicodeDecodeError:
            raise SampleError(f"{self.name(index)}: its caption is not UTF-8") from None

    def image(self, index: int) -> UInt8[Tensor, "3 H W"]:
        """Return the picture of sample ``index`` on white; SampleError where it is unreadable."""
        content = self._read(index, slice(0, 2))
        try:
            return decode(content, self._max_pixels)
        except ValueError as error:
            raise SampleError(f"{self.name(index)}: {error}") from None

    def metadata(self, index: int) -> dict[str, Any]:
        """Return what the sample's JSON member says; empty where there is none, or it is no table."""
        try:
            content = json.loads(self._read(index, slice(4, 6)) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of the tar that holds sample ``index``, and its place there."""
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
        noted = Skipped()
        for path, index in zip(self._paths, self._indices, strict=True):
            for text in index.skipped.texts:
                noted.add(f"{path}: {text}")
            noted.count += index.skipped.count - len(index.skipped.texts)
        return noted


def _tars(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        raise DataError(f"{folder}: no tars are here")
    return paths


def _most_files() -> int:
    """Return a quarter of what this process may open: large data sets have more tars than that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft if soft >= 0 else 1 << 20) // 4)


class _Files:
    """Open tars, at most ``most``; the others are opened for each read.

    None is closed while the data set lives, so that no thread loses the one it reads.
    """

    def __init__(self, paths: list[Path], most: int) -> None:
        self._paths, self._most, self._open = paths, most, dict[int, int]()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind when sent to another process."""
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        """Close what is open."""
        for file in self._open.values():
            os.close(file)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset`` of tar ``number``; OSError where it is gone."""
        file = self._open.get(number)
        if file is not None:
            return _pread(file, offset, size)
        file = os.open(self._paths[number], os.O_RDONLY | os.O_NONBLOCK)
        # setdefault is atomic; a lock could be held by another thread at the moment of a fork.
        if len(self._open) < self._most and self._open.setdefault(number, file) == file:
            return _pread(file, offset, size)
        try:
            return _pread(file, offset, size)
        finally:
            os.close(file)


def _pread(file: int, offset: int, size: int) -> bytes:
    """Return ``size`` bytes, or fewer where the file ends before."""
    content = os.pread(file, size, offset)
    while len(content) < size:  # a network file system may return less than there is
        more = os.pread(file, size - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
