"""Image data sets: WebDataset tars of images and captions, read at random without unpacking.

    folder/
      shard_000000.tar              key.png|jpg|jpeg|webp, key.txt, optional key.json
      shard_000000.tar.index.json   the samples' spans; written on first use

A tar that is not whole raises DataError; a sample without image or caption is listed in ``skipped``; one that
cannot be read later raises SampleError, which the caller counts.
"""

from __future__ import annotations

from pathlib import Path

from fluxtrain.data.images.decode import MAX_PIXELS
from fluxtrain.data.images.files import ImageFiles
from fluxtrain.data.tar.index import Skipped, open_index
from fluxtrain.errors import DataError


class TarImages(ImageFiles):
    """The samples of every tar in a folder."""

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS) -> None:
        """Open ``folder``; images of more than ``max_pixels`` are not decoded.

        Raises DataError, naming the file, if a tar is cut off or not a tar, or if there are no samples.
        """
        paths = sorted(folder.glob("*.tar"))
        if not paths:
            raise DataError(f"{folder}: no tars are here")
        indices = [open_index(path) for path in paths]
        super().__init__(
            paths, [index.keys for index in indices], [index.spans for index in indices], max_pixels
        )
        skipped = Skipped()
        for path, index in zip(paths, indices, strict=True):
            for message in index.skipped.messages:
                skipped.add(f"{path}: {message}")
            skipped.count += index.skipped.count - len(index.skipped.messages)
        self.skipped, self.num_skipped = skipped.messages, skipped.count
        if not len(self):
            reason = f": {self.skipped[0]}" if self.skipped else ""
            raise DataError(f"{folder}: its tars hold no images with captions{reason}")
