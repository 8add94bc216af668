"""Makers of tars, whole and damaged: members, raw headers, image samples."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.trainer.picture_cache.folders import file_of

from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.images import TarImages

PILLOW_FORMATS = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP"}
END_MARK = bytes(1024)
TAR_FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
Member = tuple[tarfile.TarInfo, bytes]


def encode(image: Image.Image, suffix: str = "png", **options: Any) -> bytes:
    return file_of(image, PILLOW_FORMATS[suffix], **options)


def pixels(i: int, height: int = 5, width: int = 7) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(i: int = 0, suffix: str = "png") -> bytes:
    return encode(Image.fromarray(pixels(i)), suffix)


def write_tars(folder: Path, count: int = 7, shard_size: int = 3, suffix: str = "png") -> Path:
    with TarWriter(folder, shard_size) as writer:
        for i in range(count):
            writer.add(f"part/key-{i}", image(i, suffix), suffix, f"Prompt {i} ☃", {"number": i})
    return folder


def member(name: str, content: bytes = b"", **fields: Any) -> Member:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    for field, value in fields.items():
        setattr(header, field, value)
    return header, content


def sample(key: str, i: int = 0) -> list[Member]:
    return [member(f"{key}.png", image(i)), member(f"{key}.txt", f"Prompt {i}".encode())]


def add_member(tar: tarfile.TarFile, name: str, content: bytes, **fields: Any) -> None:
    header, _ = member(name, content, **fields)
    tar.addfile(header, io.BytesIO(content))


def tar(*members: tuple[str, bytes], form: int = tarfile.DEFAULT_FORMAT, **fields: Any) -> bytes:
    """Return a tar of names with contents, as the standard library writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, content in members:
            add_member(file, name, content, **fields)
    return buffer.getvalue()


def block(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header that claims ``size`` bytes of content."""
    return member(name, type=kind, size=size)[0].tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(*records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    content = b"".join(records)
    return block("pax", len(content), kind) + padded(content)


def raw(*members: Member) -> bytes:
    """Return ``members`` as a tar without its end mark."""
    return b"".join(header.tobuf(tarfile.GNU_FORMAT) + padded(data) for header, data in members)


TWO_SAMPLES = raw(*sample("a"), *sample("b", 1))


def put(folder: Path, content: bytes, name: str = "a.tar") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    return path


def open_with(folder: Path, *members: Member) -> TarImages:
    """Return the data set of one tar: ``members``, then a valid sample of key ``good``."""
    put(folder, raw(*members, *sample("good", 9)) + END_MARK)
    return TarImages(folder)
