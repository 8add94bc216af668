"""COCO-2014's validation archives in small: captions of random images, and JPEGs of odd sizes and modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.trainer.prepare.raw_sets.raw_cc12m import oriented, saved

CAPTIONS = "annotations/captions_val2014.json"
PHRASES = (
    'a "quoted" word',
    "a tab\there",
    "two\nlines",
    "  spaces ",
    "cr\rhere",
    "☃, snow",
    "plain",
)


def random_annotations(num_images: int, per_image: int) -> list[dict[str, Any]]:
    """Return captions in COCO's form, in random order, with ids that are not in that order."""
    rng = np.random.default_rng(0)
    images = rng.permutation(np.repeat(rng.permutation(10 * num_images)[:num_images], per_image))
    ids = rng.permutation(20 * len(images))[: len(images)]
    return [
        {"image_id": int(image), "id": int(id_), "caption": f"{PHRASES[i % len(PHRASES)]} {i}\n"}
        for i, (image, id_) in enumerate(zip(images, ids, strict=True))
    ]


def write_captions(path: Path, annotations: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"info": {}, "annotations": annotations}))
    return path


def image_name(image_id: int) -> str:
    return f"COCO_val2014_{image_id:012d}.jpg"


def random_jpeg(seed: int) -> bytes:
    """Return a JPEG of random size: by ``seed`` modulo 4 RGB, grey, CMYK or with an EXIF orientation."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(40, 300)), int(rng.integers(40, 300))
    image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size)
    image = image.convert(("RGB", "L", "CMYK", "RGB")[seed % 4])
    return saved(image, exif=oriented(6) if seed % 4 == 3 else b"")


def write_raw_coco(folder: Path, num_images: int = 30) -> list[dict[str, Any]]:
    """Write three captions for each of ``num_images`` images, and the images; return the annotations."""
    annotations = random_annotations(num_images, 3)
    (folder / "val2014").mkdir(parents=True)
    for image_id in {row["image_id"] for row in annotations}:
        (folder / "val2014" / image_name(image_id)).write_bytes(random_jpeg(image_id))
    write_captions(folder / CAPTIONS, annotations)
    return annotations
