"""Folders of pairs of pictures, and runs on them of a model that edits, or fills, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageOps
from tests.trainer.picture_cache.folders import RUN, file_of
from tests.trainer.tiny_encoders import CHANNELS, SIDE, WIDTH, caption, small_image

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve

CONDITIONS = {
    "kontext": {"condition": "kontext", "in_channels": 4 * CHANNELS},
    "fill": {"condition": "fill", "in_channels": 8 * CHANNELS + 256},
    "depth": {"condition": "depth", "in_channels": 8 * CHANNELS},
}
"""``model`` of each condition."""
SHAPES = ((SIDE, SIDE), (2 * SIDE, SIDE // 2), (SIDE // 2, 2 * SIDE))
"""Width and height of the pictures in turn."""
FOLDERS = {"kontext": "pairs/control", "fill": "pairs/mask", "depth": "pairs/control"}
"""``data.controls`` of each condition."""


def write_pairs(folder: Path, count: int) -> Path:
    """Write ``count`` pictures to ``target``, negatives to ``control`` and masks to ``mask``."""
    for name in ("target", "control", "mask"):
        (folder / name).mkdir(parents=True)
    for index in range(count):
        image = small_image(index, 2 * SIDE).resize(SHAPES[index % 3])
        mask, (width, height) = Image.new("L", image.size), image.size
        box = (index, height // 4, width // 2, 3 * height // 4)
        ImageDraw.Draw(mask).rectangle(box, fill=255)
        (folder / f"target/{index:03d}.png").write_bytes(file_of(image, "PNG"))
        (folder / f"target/{index:03d}.txt").write_text(caption(index))
        negative = ImageOps.invert(image)
        (folder / f"control/{index:03d}.webp").write_bytes(file_of(negative, "WEBP", lossless=True))
        (folder / f"mask/{index:03d}.png").write_bytes(file_of(mask, "PNG"))
    return folder


def config(condition: str, **changes: Any) -> RunConfig:
    """Return a run of three steps on ``pairs``, with ``changes`` to its sections."""
    model = {"vec_in_dim": WIDTH, "context_in_dim": WIDTH} | CONDITIONS[condition]
    data = {"images": "pairs/target", "controls": FOLDERS[condition]}
    return resolve(merge(merge(RUN, {"model": model, "data": data}), changes))
