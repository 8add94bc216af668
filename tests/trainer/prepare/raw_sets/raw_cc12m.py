"""Raw CC12M tars in small: images of every usable and of every unusable kind."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

Sample = tuple[str, dict[str, bytes]]


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return smooth.convert(mode)


def saved(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def transparent() -> Image.Image:
    image = photo(300, 280, mode="RGBA")
    image.putalpha(photo(300, 280, seed=1, mode="L"))
    return image


def huge_header() -> bytes:
    """Return a small PNG whose header says 100,000 x 100,000 pixels."""
    small = saved(photo(300, 300), "PNG")
    side = (100_000).to_bytes(4, "big")
    header = b"IHDR" + side + side + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]


USABLE = {
    "tall": saved(photo(300, 421)),
    "wide": saved(photo(387, 258)),
    "exact": saved(photo(256, 256)),
    "narrow": saved(photo(256, 259)),
    "odd": saved(photo(513, 257)),
    "grey": saved(photo(300, 400, mode="L")),
    "cmyk": saved(photo(300, 400, mode="CMYK")),
    "rotated": saved(photo(300, 420), exif=oriented(6)),
    "mirrored": saved(photo(300, 420), exif=oriented(5)),
    "upright": saved(photo(300, 420), exif=oriented(1)),
    "palette": saved(photo(300, 280).quantize(32), "PNG"),
    "two colours": saved(photo(300, 280, mode="1"), "PNG"),
    "transparent": saved(transparent(), "PNG"),
    "grey transparent": saved(transparent().convert("LA"), "PNG"),
    "webp": saved(photo(300, 280), "WEBP", lossless=True),
    "gif": saved(photo(300, 280), "GIF"),
    "tiff": saved(photo(300, 280), "TIFF"),
}
UNUSABLE = {
    "small": (saved(photo(300, 255)), "a side below 256 pixels"),
    "thin": (saved(photo(255, 900)), "a side below 256 pixels"),
    "truncated": (saved(photo(300, 300))[:2000], "unreadable image"),
    "cut png": (saved(photo(300, 300), "PNG")[:2000], "unreadable image"),
    "text": (b"<html>404</html>", "unreadable image"),
    "empty": (b"", "unreadable image"),
    "huge header": (huge_header(), "unreadable image"),
    "damaged exif": (
        saved(photo(300, 300), dpi=(72, 72), exif=b"Exif\0\0garbage!"),
        "unreadable image",
    ),
    "another format": (saved(photo(300, 300), "PPM"), "unreadable image"),
}


def parts(image: bytes, caption: str | bytes = "a caption ☃") -> dict[str, bytes]:
    text = caption.encode() if isinstance(caption, str) else caption
    return {"jpg": image, "json": b'{"url": "https://example.org"}', "txt": text}


def write_tar(path: Path, samples: Sequence[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, files in samples:
            for suffix, content in files.items():
                header = tarfile.TarInfo(f"{key}.{suffix}")
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))


def tars_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def write_raw_cc12m(folder: Path) -> list[tuple[Sample, str | None]]:
    """Write four tars; return all samples in order, each with the reason for which it is dropped."""
    plan: list[tuple[dict[str, bytes], str | None]] = []
    for name, content in USABLE.items():
        plan.append((parts(content, f"a {name} image"), None))
    for number, (content, reason) in enumerate(UNUSABLE.values()):
        plan.insert(3 * number, (parts(content), reason))
    plan.insert(5, ({"txt": b"alone"}, "no image"))
    plan.insert(9, ({"jpg": USABLE["tall"]}, "no caption"))
    plan.insert(14, (parts(USABLE["wide"], b"\xff\xfe"), "caption not UTF-8"))
    plan.insert(20, (parts(USABLE["wide"]) | {"png": USABLE["gif"]}, "two images or two captions"))
    samples = [((f"{i:09d}", files), reason) for i, (files, reason) in enumerate(plan)]
    for number, start in enumerate(range(0, len(samples), 8)):
        shard = [sample for sample, _ in samples[start : start + 8]]
        write_tar(folder / f"cc12m-train-{number:04d}.tar", shard)
    return samples
