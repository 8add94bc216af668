"""Cleaning CC12M as the MLPerf reference does, on datasets and torchvision; for ``benchmarks.data.clean``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 256
BATCH = 1000


def fit(batch: dict[str, Any]) -> list[bool]:
    """Return which images have no side below 256 pixels."""
    return [min(image.size) >= SIZE for image in batch["jpg"]]


def cropped(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the images, resized to 256 on the short side and center-cropped."""
    from torchvision.transforms import functional

    bicubic = functional.InterpolationMode.BICUBIC
    resized = [functional.resize(image, SIZE, interpolation=bicubic) for image in batch["jpg"]]
    return {"png": [functional.center_crop(image, (SIZE, SIZE)) for image in resized]}


def clean(folder: Path) -> None:
    """Clean ``folder``/raw into ``folder``/theirs."""
    from datasets import load_dataset

    raw, cache = str(folder / "raw"), str(folder / "cache")
    dataset = load_dataset("webdataset", data_dir=raw, split="train", cache_dir=cache)
    dataset = dataset.filter(fit, batched=True, batch_size=BATCH)
    dataset = dataset.map(cropped, batched=True, batch_size=BATCH)
    dataset.save_to_disk(str(folder / "theirs"))


def dump(folder: Path) -> None:
    """Write the images of ``folder``/theirs as raw RGB, for comparison."""
    from datasets import load_from_disk

    (folder / "dump").mkdir()
    for row in load_from_disk(str(folder / "theirs")):
        pixels = np.array(row["png"].convert("RGB"))
        (folder / "dump" / f"{row['__key__']}.rgb").write_bytes(pixels.tobytes())


if __name__ == "__main__":
    (dump if "--dump" in sys.argv else clean)(Path(sys.argv[1]))
