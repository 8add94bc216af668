"""Image data sets: WebDataset tars of images and captions, read at random and never unpacked.

    folder/
      shard_000000.tar              key.png|jpg|jpeg|webp, key.txt, optional key.json
      shard_000000.tar.index.json   where the samples lie; made on first use

A tar is whole or refused (DataError); a sample that is not whole is named in ``skipped``; one that
turns out unreadable raises SampleError, and the caller counts it.
Axes: H W image.
"""

from __future__ import annotations

import io
import json
import os
import resource
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from fluxtrain.data.images import MAX_PIXELS, decode
from fluxtrain.data.tar_index import (
    IMAGE_SUFFIXES,
    MAX_CAPTION_BYTES,
    Skipped,
    open_index,
    split_name,
)
from fluxtrain.data.tar_members import MAX_MEMBER_BYTES, name_fault, shown
from fluxtrain.errors import DataError


class SampleError(DataError):
    """One sample cannot be read; its text names the sample and says why."""


class ImageDataset:
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


class TarWriter:
    """Writes an image data set; each file appears whole or not at all, equal input gives equal bytes."""

    def __init__(
        self, folder: Path, shard_size: int = 1000, extra_files: Mapping[str, str] | None = None
    ) -> None:
        """Write tars of ``shard_size`` samples, and ``extra_files``: texts by their name, beside them.

        Raises DataError where ``folder`` holds tars already: a reader would take them for its own.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.tar")):
            raise DataError(f"{folder}: tars are here already; write to an empty folder")
        self.folder, self.shard_size = folder, shard_size
        self._extra_files = extra_files or {}
        self._num_tars, self._keys = 0, set[str]()
        self._tar: tarfile.TarFile | None = None

    def __enter__(self) -> TarWriter:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the last tar and the extra files; if something went wrong, drop the last tar."""
        if kind is not None:
            self._drop()
            return
        self._finish()
        for name, text in self._extra_files.items():
            partial = self.folder / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.folder / name)

    def add(
        self,
        key: str,
        image: bytes,
        suffix: str,
        caption: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Append a sample; DataError where ``key``, ``suffix`` or ``caption`` could not be read back."""
        self._check(key, image, suffix, caption)
        contents = {suffix: image, "txt": caption.encode()}
        if metadata is not None:
            contents["json"] = json.dumps(metadata).encode()
        self._keys.add(key)
        for ending, content in contents.items():
            self._put(_header(f"{key}.{ending}", len(content)), content)
        if len(self._keys) == self.shard_size:
            self._finish()

    def _check(self, key: str, image: bytes, suffix: str, caption: str) -> None:
        fault = _key_fault(key) or _size_fault(image, caption)
        if suffix not in IMAGE_SUFFIXES:
            fault = f"suffix {suffix!r} is not {'|'.join(IMAGE_SUFFIXES)}"
        if key in self._keys:
            fault = "given twice"
        if fault:
            raise DataError(f"key {shown(key)}: {fault}")

    def _put(self, header: tarfile.TarInfo, content: bytes) -> None:
        if self._tar is None:
            self._tar = tarfile.TarFile(self._partial, "w", format=tarfile.USTAR_FORMAT)
        self._tar.addfile(header, io.BytesIO(content))

    @property
    def _partial(self) -> Path:
        return self.folder / f"shard_{self._num_tars:06d}.partial"

    def _finish(self) -> None:
        if self._tar is None:
            return
        self._tar.close()
        self._partial.replace(self._partial.with_suffix(".tar"))
        self._tar, self._keys = None, set()
        self._num_tars += 1

    def _drop(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None
            self._partial.unlink(missing_ok=True)


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)  # time 0 and owner 0 unless set
    header.size = size
    return header


def _key_fault(key: str) -> str | None:
    """Return why a sample named ``key`` could not be found again, or None."""
    fault = name_fault(key)
    if fault or key.startswith("./") or split_name(f"{key}.x") != (key, "x"):
        return fault or "it starts with ./ or its last part is empty or has a dot"
    try:
        _header(f"{key}.webp", 0).tobuf(tarfile.USTAR_FORMAT)
    except ValueError as error:  # ustar holds 100 bytes, and 155 of folders before them
        return str(error)
    return None


def _size_fault(image: bytes, caption: str) -> str | None:
    try:
        length = len(caption.encode())
    except UnicodeEncodeError:
        return "its caption cannot be written as UTF-8"
    if length > MAX_CAPTION_BYTES:
        return f"a caption of {length} bytes, at most {MAX_CAPTION_BYTES} are read"
    if len(image) > MAX_MEMBER_BYTES:
        return f"an image of {len(image)} bytes, at most {MAX_MEMBER_BYTES} are read"
    return None
