"""Detects, opens and writes the four layouts of encoded data sets; converts and verifies what was written.

``shards`` is ours; MLCommons and its submitters use ``arrow``, ``parquet`` and ``webdataset``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from fluxtrain.contract.run.data import Layout
from fluxtrain.data.dataset import Encodings, shape_at
from fluxtrain.data.shard_dataset import FileDataset, ShardDataset
from fluxtrain.data.shards import FIELDS, LISTING, Sample, SampleWriter, ShardWriter, sample_views
from fluxtrain.errors import ConfigError, DataError, StorageError

Advance = Callable[[int], None]
_SAMPLES_PER_READ = 16
_HASH_BYTES = 16


def convert(
    source: Path,
    target: Path,
    to: Layout,
    layout: Layout | None = None,
    shard_size: int = 1024,
    advance: Advance = lambda samples: None,
) -> int:
    """Write the samples of ``source`` to ``target`` in the layout ``to``; return their number.

    ``layout`` None detects the layout of ``source``. What was written is read back and compared, sample by
    sample, before ``target`` is renamed into place. Megabytes are in memory at once, or one shard.
    Raises DataError for the first unreadable sample, ConfigError if ``target`` exists, ``source`` is not
    bfloat16 or has several sizes, which only shards hold; StorageError if what was written differs.
    """
    layout = layout or detect(source)
    dataset = open_encoded(source, layout, verify=layout == "shards")
    _check(source, target, dataset, to)
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        hashes = _write(dataset, partial, to, shard_size, advance)
        _compare(open_encoded(partial, to, verify=to == "shards"), hashes, target, advance)
        partial.rename(target)
    except OSError as error:
        path = error.filename or partial
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
    return len(dataset)


def _check(source: Path, target: Path, dataset: FileDataset, to: Layout) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("TARGET", str(target), "exists already; name a new folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError("TARGET", str(target), "is inside the source")
    if to != "shards" and len(np.unique(dataset.latent_sizes, axis=0)) > 1:
        raise ConfigError("--to", to, "holds samples of one size only; use shards")
    if dataset.shape.dtype != torch.bfloat16:
        dtype = str(dataset.shape.dtype).removeprefix("torch.")
        raise ConfigError("SOURCE", str(source), f"holds {dtype}; these layouts hold bfloat16")


def _write(
    dataset: FileDataset, folder: Path, to: Layout, shard_size: int, advance: Advance
) -> list[bytes]:
    """Write all samples; return their hashes."""
    hashes, timesteps = list[bytes](), dataset.stored_timesteps is not None
    with make_writer(to, folder, len(dataset), shard_size, timesteps) as writer:
        for sample in samples(dataset):
            hashes.append(_hash(sample))
            writer.add(sample)
            advance(1)
    return hashes


def _compare(written: FileDataset, hashes: list[bytes], target: Path, advance: Advance) -> None:
    if len(written) != len(hashes):
        raise StorageError(f"{target}: {len(written)} of {len(hashes)} samples were written")
    for index, (sample, expected) in enumerate(zip(samples(written), hashes, strict=True)):
        if _hash(sample) != expected:
            raise StorageError(f"{target}: sample {index} differs from what was written")
        advance(1)


def samples(dataset: FileDataset) -> Iterator[Sample]:
    """Yield every sample of ``dataset`` in order; DataError, naming it, if one cannot be read."""
    stored, count = dataset.stored_timesteps, len(dataset)
    changes = np.any(np.diff(dataset.latent_sizes, axis=0), axis=1)  # of size
    ends = np.union1d(
        np.arange(_SAMPLES_PER_READ, count, _SAMPLES_PER_READ), np.nonzero(changes)[0] + 1
    )
    for indices in np.split(np.arange(count), ends):
        shape = shape_at(dataset, indices)
        batch = Encodings.empty(len(indices), shape)  # a new one: writers keep samples
        faults = dataset.read(indices, batch, np.zeros(len(indices), dtype=bool))
        for row, (index, fault) in enumerate(zip(indices.tolist(), faults, strict=True)):
            if fault:
                raise DataError(fault)
            yield Sample(
                dataset.key(index),
                dataset.caption(index),
                batch.txt[row],
                batch.vec[row],
                batch.mean[row],
                batch.logvar[row],
                None if stored is None else int(stored[index]),
            )


def _hash(sample: Sample) -> bytes:
    """Return a hash of what every layout stores: key, timestep, encodings. Only shards store captions."""
    digest = blake2b(f"{sample.key}\0{sample.timestep}\0".encode(), digest_size=_HASH_BYTES)
    for field in FIELDS:
        digest.update(sample_views(getattr(sample, field).unsqueeze(0))[0])
    return digest.digest()


_PATTERNS: dict[Layout, str] = {
    "shards": LISTING,
    "arrow": "*.arrow",
    "parquet": "*.parquet",
    "webdataset": "*.tar",
}


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
        from fluxtrain.data.formats.arrow import open_arrow

        return open_arrow(folder)
    if layout == "parquet":
        from fluxtrain.data.formats.parquet import ParquetDataset

        return ParquetDataset(folder)
    from fluxtrain.data.formats.webdataset import open_webdataset

    return open_webdataset(folder)


def make_writer(
    layout: Layout, folder: Path, num_samples: int, shard_size: int, timesteps: bool
) -> SampleWriter:
    if layout == "shards":
        return ShardWriter(folder, shard_size)
    if layout == "arrow":
        from fluxtrain.data.formats.arrow import ArrowWriter

        return ArrowWriter(folder, num_samples, shard_size, timesteps)
    if layout == "parquet":
        from fluxtrain.data.formats.parquet import ParquetWriter

        return ParquetWriter(folder, shard_size, timesteps)
    from fluxtrain.data.formats.webdataset import WebDatasetWriter

    return WebDatasetWriter(folder, shard_size, timesteps)
