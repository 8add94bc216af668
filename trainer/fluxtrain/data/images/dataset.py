"""Images and captions as training takes them: one size, and what cannot be read is named.

Axes: b batch, H W image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import ImageBatch
from fluxtrain.data.images.decode import square
from fluxtrain.data.order import FILLER
from fluxtrain.data.shards import NUM_TIMESTEPS
from fluxtrain.data.tar.dataset import SampleError, TarImages
from fluxtrain.draws import Array, Draw


class ImageSource(Protocol):
    """A set of pictures with captions; SampleError where one cannot be read."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in its set."""
        ...

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        ...

    def image(self, index: int) -> Tensor:
        """Return the picture of sample ``index``, "3 H W", 8-bit RGB."""
        ...

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``."""
        ...

    def metadata(self, index: int) -> dict[str, Any]:
        """Return what is noted about sample ``index``."""
        ...


class ImageSet:
    """The samples of a set at one size."""

    attribution = ""

    def __init__(self, source: ImageSource, side: int, smallest: int = 1) -> None:
        """Take the pictures of ``source`` as ``side`` x ``side`` pixels.

        One with a side below ``smallest`` pixels counts as unreadable.
        """
        self.source, self.side, self._smallest = source, side, smallest

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def read(self, index: int, image: Tensor) -> str:
        """Fill ``image``, "3 side side", with sample ``index`` and return its caption.

        Raises SampleError, naming the sample, where it cannot be read.
        """
        pixels = self.source.image(index)
        height, width = pixels.shape[1:]
        if min(height, width) < self._smallest:
            raise SampleError(
                f"{self.source.name(index)}: {width} x {height} pixels, "
                f"{self._smallest} are needed on each side"
            )
        caption = self.source.caption(index)
        image.copy_(square(pixels, self.side))
        return caption

    def key(self, index: int) -> str:
        """Return the name of sample ``index``: COCO's image id where it has one, as MLCommons names it."""
        number = self.source.metadata(index).get("id")
        return str(number) if isinstance(number, int | str) else self.source.key(index)

    def timestep(self, index: int) -> int | None:
        """Return the evaluation timestep (0 ... 7) that is noted, None where there is none."""
        value = self.source.metadata(index).get("timestep")
        return value if type(value) is int and 0 <= value < NUM_TIMESTEPS else None

    def timesteps(self, indices: Array) -> Array:
        """Return the noted evaluation timesteps, by index where none is noted."""
        noted = [(self.timestep(int(index)), int(index)) for index in indices]
        return np.array([index % NUM_TIMESTEPS if step is None else step for step, index in noted])

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``, empty where it is unreadable."""
        try:
            return self.source.caption(index)
        except SampleError:
            return ""


def open_images(config: RunConfig, data_root: Path, part: str) -> ImageSet:
    """Return the pictures of ``part`` ("train" or "validation"); DataError where there are none."""
    side, folder = config.data.image_size, data_root / getattr(config.data, part)
    source: ImageSource
    if any(folder.glob("*.arrow")) and not any(folder.glob("*.tar")):
        from fluxtrain.data.images.arrow import ArrowImages  # pyarrow takes a while to import

        source = ArrowImages(folder)
    else:
        source = TarImages(folder)
    # As in the reference: too small a picture is no training sample; a validation set is never thinned.
    return ImageSet(source, side, side if part == "train" else 1)


def build_image_batch(pictures: ImageSet, indices: Array, chosen: list[Draw]) -> ImageBatch:
    """Return the pictures at ``indices`` with their draws; dropped prompts are empty, fillers black."""
    images = torch.zeros(len(indices), 3, pictures.side, pictures.side, dtype=torch.uint8)
    captions, faults, weights = list[str](), list[str](), list[float]()
    for index, draw, image in zip(indices.tolist(), chosen, images, strict=True):
        caption, weight = "", 0.0
        try:
            if index != FILLER:
                caption, weight = pictures.read(index, image), 1.0
        except SampleError as error:
            faults.append(str(error))
        captions.append("" if draw.dropped else caption)
        weights.append(weight)
    return ImageBatch(
        images=images,
        captions=tuple(captions),
        latent_noise=torch.from_numpy(np.stack([draw.latent_noise for draw in chosen])),
        noise=torch.from_numpy(np.stack([draw.noise for draw in chosen])),
        timesteps=torch.tensor([draw.timestep for draw in chosen], dtype=torch.float32),
        weights=torch.tensor(weights),
        dropped=torch.tensor([draw.dropped for draw in chosen]),
        indices=torch.from_numpy(indices),
        faults=tuple(faults),
    )
