"""Image data sets for training: images of one size with captions; unreadable samples are named.

Axes: b batch, H W image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import ImageBatch, drawn_fields
from fluxtrain.data.images.decode import resize_and_crop
from fluxtrain.data.images.files import ImageFiles, SampleError
from fluxtrain.data.order import PADDING
from fluxtrain.data.tar.dataset import TarImages
from fluxtrain.draws import NUM_TIMESTEPS, Array, Draw


class ImageDataset:
    """The samples of a set, resized to one size."""

    attribution = ""

    def __init__(self, source: ImageFiles, side: int, min_side: int = 1) -> None:
        """Resize the images of ``source`` to ``side`` x ``side`` pixels.

        An image with a side below ``min_side`` pixels counts as unreadable.
        """
        self.source, self.side, self._min_side = source, side, min_side

    @property
    def files(self) -> list[Path]:
        """Return the files that samples are read from."""
        return self.source.files

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def read(self, index: int, image: Tensor) -> str:
        """Fill ``image``, "3 side side", with sample ``index`` and return its caption.

        Raises SampleError, naming the sample, if it cannot be read.
        """
        pixels = self.source.image(index)
        height, width = pixels.shape[1:]
        if min(height, width) < self._min_side:
            raise SampleError(
                f"{self.source.name(index)}: {width} x {height} pixels, "
                f"{self._min_side} are needed on each side"
            )
        caption = self.source.caption(index)
        image.copy_(resize_and_crop(pixels, self.side))
        return caption

    def key(self, index: int) -> str:
        """Return the key of sample ``index``: its COCO image id if it has one, as in MLCommons' sets."""
        image_id = self.source.metadata(index).get("id")
        return str(image_id) if isinstance(image_id, int | str) else self.source.key(index)

    def timestep(self, index: int) -> int | None:
        """Return the stored evaluation timestep (0 ... 7), None if there is none."""
        value = self.source.metadata(index).get("timestep")
        return value if type(value) is int and 0 <= value < NUM_TIMESTEPS else None

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps, index modulo 8 for samples without one."""
        steps = [(self.timestep(index), index % NUM_TIMESTEPS) for index in indices.tolist()]
        return np.array([default if step is None else step for step, default in steps])

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``, "" if it is unreadable."""
        try:
            return self.source.caption(index)
        except SampleError:
            return ""


def open_images(config: RunConfig, data_root: Path, part: str) -> ImageDataset:
    """Return the images of ``part`` ("train" or "validation"); DataError if there are none."""
    side, folder = config.data.image_size, data_root / getattr(config.data, part)
    source: ImageFiles
    if any(folder.glob("*.arrow")) and not any(folder.glob("*.tar")):
        from fluxtrain.data.images.arrow import ArrowImages  # pyarrow takes a while to import

        source = ArrowImages(folder)
    else:
        source = TarImages(folder)
    # As in the reference: small images are left out of training; a validation set is always whole.
    return ImageDataset(source, side, side if part == "train" else 1)


def build_image_batch(dataset: ImageDataset, indices: Array, drawn: list[Draw]) -> ImageBatch:
    """Return the images at ``indices`` with their draws; a dropped prompt is "", padding is black."""
    images = torch.zeros(len(indices), 3, dataset.side, dataset.side, dtype=torch.uint8)
    captions, faults, weights = list[str](), list[str](), list[float]()
    for index, draw, image in zip(indices.tolist(), drawn, images, strict=True):
        caption, weight = "", 0.0
        try:
            if index != PADDING:
                caption, weight = dataset.read(index, image), 1.0
        except SampleError as error:
            faults.append(str(error))
        captions.append("" if draw.dropped else caption)
        weights.append(weight)
    return ImageBatch(
        images=images,
        captions=tuple(captions),
        weights=torch.tensor(weights),
        faults=tuple(faults),
        **drawn_fields(indices, drawn),
    )
