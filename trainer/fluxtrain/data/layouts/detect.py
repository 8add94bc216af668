"""Detects, opens and writes the four layouts of encoded data sets.

``shards`` is ours; MLCommons and its submitters use ``arrow``, ``parquet`` and ``webdataset``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from fluxtrain.contract.run.data import Layout
from fluxtrain.data.file_dataset import FileDataset
from fluxtrain.data.sample_writer import SampleWriter
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.data.shard_writer import ShardWriter
from fluxtrain.data.shards import LISTING
from fluxtrain.errors import DataError

_PATTERNS: dict[Layout, str] = {
    "shards": LISTING,
    "arrow": "*.arrow",
    "parquet": "*.parquet",
    "webdataset": "*.tar",
}


@runtime_checkable
class SlowRandomAccess(Protocol):
    """A data set that is slow to read in a random order; ``advice`` is printed when training from it."""

    advice: str


def detect(folder: Path) -> Layout:
    """Return the layout of ``folder``; DataError if it holds none or several."""
    matches = [layout for layout, pattern in _PATTERNS.items() if any(folder.glob(pattern))]
    if not matches:
        others = ", ".join(list(_PATTERNS.values())[1:])
        raise DataError(
            f"{folder}: no encoded data set is here ({LISTING} is missing, and so are {others})"
        )
    if len(matches) > 1:
        raise DataError(f"{folder}: holds {' and '.join(matches)}; set spec.run.data.layout")
    return matches[0]


def open_encoded(folder: Path, layout: Layout | None = None, verify: bool = False) -> FileDataset:
    """Return the samples of ``folder``; ``layout`` None detects it.

    With ``verify`` the CRC-32 of every sample read is compared, which only ``shards`` stores. Raises
    DataError, naming the file, if one is missing, cut off or of another layout.
    """
    layout = layout or detect(folder)
    if layout == "shards":
        return ShardDataset(folder, verify)
    if verify:
        raise DataError(
            f"{folder}: the layout {layout} stores no checksums; leave spec.run.data.verify_checksums out"
        )
    if not any(folder.glob(_PATTERNS[layout])):
        raise DataError(f"{folder}: no {_PATTERNS[layout]} is here")
    if layout == "arrow":  # pyarrow takes a quarter of a second to import
        from fluxtrain.data.layouts.arrow import open_arrow

        return open_arrow(folder)
    if layout == "parquet":
        from fluxtrain.data.layouts.parquet import ParquetDataset

        return ParquetDataset(folder)
    from fluxtrain.data.layouts.webdataset import open_webdataset

    return open_webdataset(folder)


def make_writer(
    layout: Layout, folder: Path, num_samples: int, shard_size: int, timesteps: bool
) -> SampleWriter:
    """Return a writer of ``num_samples`` samples to ``folder``, ``shard_size`` to a file."""
    if layout == "shards":
        return ShardWriter(folder, shard_size)
    if layout == "arrow":
        from fluxtrain.data.layouts.arrow import ArrowWriter

        return ArrowWriter(folder, num_samples, shard_size, timesteps)
    if layout == "parquet":
        from fluxtrain.data.layouts.parquet import ParquetWriter

        return ParquetWriter(folder, shard_size, timesteps)
    from fluxtrain.data.layouts.webdataset import WebDatasetWriter

    return WebDatasetWriter(folder, shard_size, timesteps)
