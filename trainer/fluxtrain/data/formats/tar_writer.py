"""Writes image data sets: WebDataset tars of images and captions that data/images.py reads."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from fluxtrain.data.formats.tar import MAX_MEMBER_BYTES, name_fault, quoted
from fluxtrain.data.formats.tar_index import IMAGE_SUFFIXES, MAX_CAPTION_BYTES, split_name
from fluxtrain.errors import DataError


class TarWriter:
    """Writes an image data set; each file appears whole or not at all, equal input gives equal bytes."""

    def __init__(self, folder: Path, shard_size: int = 1000) -> None:
        """Write tars of ``shard_size`` samples.

        Raises DataError if ``folder`` holds tars already, which readers would read too.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.tar")):
            raise DataError(f"{folder}: holds tars already; write to an empty folder")
        self.folder, self.shard_size = folder, shard_size
        self._num_tars, self._keys = 0, set[str]()
        self._tar: tarfile.TarFile | None = None

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last tar; delete it if an exception was raised."""
        if kind is not None:
            if self._tar is not None:
                self._tar.close()
                self._tar = None
                self._partial.unlink(missing_ok=True)
        else:
            self._finish()

    def add(
        self,
        key: str,
        image: bytes,
        suffix: str,
        caption: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Append a sample; DataError if ``key``, ``suffix`` or ``caption`` could not be read back."""
        self._check(key, image, suffix, caption)
        contents = {suffix: image, "txt": caption.encode()}
        if metadata is not None:
            contents["json"] = json.dumps(metadata).encode()
        self._keys.add(key)
        for ending, content in contents.items():
            if self._tar is None:
                self._tar = open_tar(self._partial)
            add_member(self._tar, f"{key}.{ending}", content)
        if len(self._keys) == self.shard_size:
            self._finish()

    def _check(self, key: str, image: bytes, suffix: str, caption: str) -> None:
        fault = _key_fault(key) or _size_fault(image, caption)
        if suffix not in IMAGE_SUFFIXES:
            fault = f"suffix {suffix!r} is not {'|'.join(IMAGE_SUFFIXES)}"
        if key in self._keys:
            fault = "given twice"
        if fault:
            raise DataError(f"key {quoted(key)}: {fault}")

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


def open_tar(path: Path) -> tarfile.TarFile:
    """Return a new tar of the portable format, which has no times of its own."""
    return tarfile.TarFile(path, "w", format=tarfile.USTAR_FORMAT)


def add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append the file ``name``; equal contents give equal bytes."""
    tar.addfile(_header(name, len(content)), io.BytesIO(content))


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)  # modification time and owner are 0 by default
    header.size = size
    return header


def _key_fault(key: str) -> str | None:
    fault = name_fault(key)
    if fault or key.startswith("./") or split_name(f"{key}.x") != (key, "x"):
        return fault or "it starts with ./ or its last part is empty or has a dot"
    try:
        _header(f"{key}.webp", 0).tobuf(tarfile.USTAR_FORMAT)
    except ValueError as error:  # ustar has 100 bytes for the name and 155 for its folders
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
