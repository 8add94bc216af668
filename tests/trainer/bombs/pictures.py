"""Pictures that claim, or decode to, far more than their bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from tests.trainer.bombs.limited import Make
from tests.trainer.picture_cache.folders import file_of

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.images import ImageDataset, TarImages
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.data.pictures.inspection import inspect
from fluxtrain.data.pictures.kohya_config import Subset
from fluxtrain.data.pictures.subset import training_pictures
from fluxtrain.errors import DataError


def in_a_folder(path: Path) -> object:
    """Look at the pictures beside ``path`` as a training does; raise the fault of one that is skipped."""
    listing, data = list_pictures(path.parent), DataConfig(image_size=512, latent_size=64)
    pictures = training_pictures([(Subset(path.parent), listing)])
    inspection = inspect(pictures, listing.skipped, data, seed=0, threads=1)
    for name, fault in inspection.skipped.items():
        raise DataError(f"{name}: {fault}")
    return [look.thumbnail for look in inspection.looks]


def in_a_tar(path: Path) -> object:
    """Read the one sample of the tar ``path`` at 256 x 256 pixels."""
    dataset = ImageDataset(TarImages(path.parent), 256)
    return dataset.read(0, torch.empty(3, 256, 256, dtype=torch.uint8))


def put(name: str, content: Callable[[], bytes]) -> Make:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content())
        return path

    return make


def put_in_tar(content: Callable[[], bytes]) -> Make:
    def make(folder: Path) -> Path:
        with TarWriter(folder, shard_size=1) as writer:
            writer.add("a", content(), "png", "a caption", None)
        return next(folder.glob("*.tar"))

    return make


def png(width: int, height: int, *, bits: int = 8, colour: int = 0, lines: bool = True) -> bytes:
    """Return a PNG of black pixels; without ``lines`` nearly all of them are missing."""
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    row = bytes(1 + (width * samples * bits + 7) // 8)
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(row) for _ in range(height if lines else 1)) + packer.flush()
    return _png(width, height, bits, colour, data)


def png_that_claims(width: int, height: int) -> bytes:
    """Return a PNG whose header has this size, and which has no pixels."""
    return _png(width, height, 8, 2, zlib.compress(bytes(100)))


def _png(width: int, height: int, bits: int, colour: int, data: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = [_chunk(b"IHDR", head), _chunk(b"IDAT", data), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def png_with_text() -> bytes:
    """Return a PNG with a compressed text and a colour profile of 64 MiB each."""
    packer = zlib.compressobj(1)
    mib = bytes(1 << 20)
    zeros = b"".join(packer.compress(mib) for _ in range(64)) + packer.flush()
    whole = png(64, 64)
    extra = _chunk(b"iCCP", b"p\0\0" + zeros) + _chunk(b"zTXt", b"t\0\0" + zeros)
    return whole[:33] + extra + whole[33:]


def gif(width: int, height: int) -> bytes:
    """Return a GIF whose screen is small, and whose first frame claims ``width`` x ``height`` pixels."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    return screen + frame + b";"


def gif_of_frames(count: int) -> bytes:
    """Return an animation of ``count`` black frames."""
    content = file_of(Image.new("P", (64, 64)), "GIF")
    frame = content[content.index(b",") : -1]
    return b"GIF89a" + struct.pack("<HHBBB", 64, 64, 0x80, 0, 0) + bytes(6) + frame * count + b";"


def webp(side: int) -> bytes:
    """Return an animated WebP whose canvas claims ``side`` x ``side`` pixels."""
    size = (side - 1).to_bytes(3, "little")
    canvas = b"VP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0]) + size + size
    animation = b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    still = file_of(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    frame_head = bytes(6) + bytes(6) + bytes(4)
    frame = b"ANMF" + struct.pack("<I", len(frame_head) + len(still)) + frame_head + still
    body = b"WEBP" + canvas + animation + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg(width: int, height: int) -> bytes:
    """Return a JPEG of 8 x 8 pixels that claims ``width`` x ``height``."""
    content = bytearray(file_of(Image.new("RGB", (8, 8)), "JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def bmp(width: int, height: int) -> bytes:
    """Return a run-length encoded BMP that claims ``width`` x ``height`` pixels."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 4, 0, 0, 256, 0)
    start = 14 + len(head) + 1024
    return b"BM" + struct.pack("<IHHI", start + 4, 0, 0, start) + head + bytes(1024) + b"\0\1\0\0"


def tiff(width: int, height: int) -> bytes:
    """Return a TIFF of one strip, compressed with deflate."""
    data = zlib.compress(bytes(1 << 16))
    tags = [(256, width), (257, height), (258, 8), (259, 8), (262, 1), (273, 8)]
    tags += [(277, 1), (278, height), (279, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory
