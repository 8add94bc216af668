"""From one layout of encoded samples to another, in the same order, and compared afterwards.

Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from fluxtrain.contract.run.config import Layout
from fluxtrain.data.dataset import Rows
from fluxtrain.data.layouts.detect import EncodedSource, detect, make_writer, open_encoded
from fluxtrain.data.shard_writer import Sample, row_bytes
from fluxtrain.data.shards import FIELDS
from fluxtrain.errors import ConfigError, DataError, StorageError

Advance = Callable[[int], None]
_ROWS_AT_ONCE = 16
_HASH_BYTES = 16


def convert(
    source: Path,
    target: Path,
    to: Layout,
    layout: Layout | None = None,
    shard_size: int = 1024,
    advance: Advance = lambda samples: None,
) -> int:
    """Write the samples of ``source`` to ``target`` in the layout ``to``; return how many there are.

    ``layout`` None finds out what ``source`` is. What was written is read again and compared, sample by
    sample, before ``target`` takes its name. Megabytes are in memory at once, of ``shards`` one shard.
    Raises DataError for the first sample that cannot be read, ConfigError where source and target do
    not go together, StorageError where what was written differs.
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
        where = error.filename or partial
        raise StorageError(f"{where}: cannot be written ({error.strerror})") from None
    return len(dataset)


def _check(source: Path, target: Path, dataset: EncodedSource, to: Layout) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("TARGET", str(target), "is there already; name a folder that is not")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError("TARGET", str(target), "lies inside the source")
    if dataset.shape.dtype != torch.bfloat16:
        kind = str(dataset.shape.dtype).removeprefix("torch.")
        raise ConfigError("SOURCE", str(source), f"holds {kind}; these layouts hold bfloat16")


def _write(
    dataset: EncodedSource, folder: Path, to: Layout, shard_size: int, advance: Advance
) -> list[bytes]:
    """Write all samples; return their hashes."""
    hashes, timesteps = list[bytes](), dataset.stored_timesteps is not None
    with make_writer(to, folder, len(dataset), shard_size, timesteps) as writer:
        for sample in samples(dataset):
            hashes.append(_hash(sample))
            writer.add(sample)
            advance(1)
    return hashes


def _compare(written: EncodedSource, hashes: list[bytes], target: Path, advance: Advance) -> None:
    if len(written) != len(hashes):
        raise StorageError(f"{target}: {len(written)} samples were written of {len(hashes)}")
    for index, (sample, wanted) in enumerate(zip(samples(written), hashes, strict=True)):
        if _hash(sample) != wanted:
            raise StorageError(f"{target}: sample {index} does not read as it was written")
        advance(1)


def samples(dataset: EncodedSource) -> Iterator[Sample]:
    """Yield every sample of ``dataset`` in order; DataError, naming it, where one cannot be read."""
    stored, count = dataset.stored_timesteps, len(dataset)
    for begin in range(0, count, _ROWS_AT_ONCE):
        indices = np.arange(begin, min(begin + _ROWS_AT_ONCE, count))
        rows = Rows.empty(len(indices), dataset.shape)  # anew: a writer may keep what it is given
        faults = dataset.read(indices, rows, np.zeros(len(indices), dtype=bool))
        for row, (index, fault) in enumerate(zip(indices.tolist(), faults, strict=True)):
            if fault:
                raise DataError(fault)
            yield Sample(
                dataset.key(index),
                dataset.caption(index),
                rows.txt[row],
                rows.vec[row],
                rows.mean[row],
                rows.logvar[row],
                None if stored is None else int(stored[index]),
            )


def _hash(sample: Sample) -> bytes:
    """Return a hash of what every layout keeps: key, timestep, encodings. Captions only ours keeps."""
    digest = blake2b(f"{sample.key}\0{sample.timestep}\0".encode(), digest_size=_HASH_BYTES)
    for field in FIELDS:
        digest.update(row_bytes(getattr(sample, field).unsqueeze(0))[0])
    return digest.digest()
