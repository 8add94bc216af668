"""The four layouts of encoded samples: which one a folder holds, and how each is read and written.

``shards`` is ours; ``arrow``, ``parquet`` and ``webdataset`` are those of MLCommons and its submitters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from fluxtrain.contract.run.config import Layout
from fluxtrain.data.dataset import Dataset
from fluxtrain.data.shard_dataset import EncodedDataset
from fluxtrain.data.shard_writer import EncodedWriter, Sample
from fluxtrain.data.shards import LISTING
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

_PATTERNS: dict[Layout, str] = {
    "shards": LISTING,
    "arrow": "*.arrow",
    "parquet": "*.parquet",
    "webdataset": "*.tar",
}


class EncodedSource(Dataset, Protocol):
    """A data set on disk, whose samples have names."""

    @property
    def stored_timesteps(self) -> Array | None:
        """Return the evaluation timestep of every sample, None where not all have one."""
        ...

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in the set it was made from."""
        ...


@runtime_checkable
class ReadInOrder(Protocol):
    """A data set that is slow in any order but its own, and says what to do about it."""

    advice: str


class SampleWriter(Protocol):
    """What takes encoded samples one by one."""

    def add(self, sample: Sample) -> None:
        """Append ``sample``."""
        ...


def detect(folder: Path) -> Layout:
    """Return the layout of ``folder``; DataError where it holds none, or several."""
    found = [layout for layout, pattern in _PATTERNS.items() if any(folder.glob(pattern))]
    if not found:
        others = ", ".join(list(_PATTERNS.values())[1:])
        raise DataError(
            f"{folder}: no encoded data set is here ({LISTING} is missing, and so are {others})"
        )
    if len(found) > 1:
        raise DataError(
            f"{folder}: holds {' and '.join(found)}; say which with spec.run.data.layout"
        )
    return found[0]


def open_encoded(folder: Path, layout: Layout | None = None, verify: bool = False) -> EncodedSource:
    """Return the samples of ``folder``; ``layout`` None finds it out.

    With ``verify`` every record's CRC-32 is compared as it is read, which only ``shards`` stores. Raises
    DataError, naming the file, where one is missing, cut off or not what the layout says.
    """
    layout = layout or detect(folder)
    if layout == "shards":
        return EncodedDataset(folder, verify)
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
    from fluxtrain.data.layouts.webdataset import open_repack

    return open_repack(folder)


def make_writer(
    layout: Layout, folder: Path, num_samples: int, shard_size: int, timesteps: bool
) -> AbstractContextManager[SampleWriter]:
    """Return what writes ``num_samples`` samples to ``folder``, ``shard_size`` to a file."""
    if layout == "shards":
        return EncodedWriter(folder, shard_size)
    if layout == "arrow":
        from fluxtrain.data.layouts.arrow import ArrowWriter

        return ArrowWriter(folder, num_samples, shard_size, timesteps)
    if layout == "parquet":
        from fluxtrain.data.layouts.parquet import ParquetWriter

        return ParquetWriter(folder, shard_size, timesteps)
    from fluxtrain.data.layouts.webdataset import RepackWriter

    return RepackWriter(folder, shard_size, timesteps)
