"""The samples of a trial with buckets: sizes in turn, by the shares of the training set if there is one.

They are synthetic, so that every part of a measurement has the same batches, and the largest size is in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fluxtrain.contract.run.buckets import Size
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.images.dataset import ImageDataset
from fluxtrain.data.sources import Sources, open_source
from fluxtrain.data.synthetic import SyntheticDataset


def mixed_sources(config: RunConfig, data_root: Path, turns: int) -> Sources | None:
    """Return the data of a trial of ``config``: ``turns`` global batches, again and again; 0: the largest.

    None without buckets: the run's own.
    """
    if config.data.buckets is None:
        return None
    largest = config.data.largest_latent
    sizes = in_turn(_counts(config, data_root), turns) if turns else [largest]
    train = SyntheticDataset(config, len(sizes) * config.schedule.global_batch_size, sizes)
    return Sources(train, None, train.empty_text())


def _counts(config: RunConfig, data_root: Path) -> Mapping[Size, int]:
    """Return the samples of each size in the training set; of a synthetic one the sizes, equally many."""
    if config.data.source == "synthetic":
        return dict.fromkeys(config.data.latent_sizes, 1)
    train = open_source(config, data_root, "train")
    assert not isinstance(train, ImageDataset), "images have no buckets"
    sizes, counts = np.unique(train.latent_sizes, axis=0, return_counts=True)
    return {
        (height, width): count
        for (height, width), count in zip(sizes.tolist(), counts.tolist(), strict=True)
    }


def in_turn(counts: Mapping[Size, int], turns: int) -> Sequence[Size]:
    """Return ``turns`` sizes with the shares of ``counts``, by largest remainders; the largest is in it."""
    largest = max(counts, key=lambda size: size[0] * size[1])
    total = sum(counts.values())
    exact = {size: turns * count / total for size, count in counts.items()}
    whole = {size: int(share) for size, share in exact.items()}
    whole[largest] = max(1, whole[largest])
    by_rest = sorted(exact, key=lambda size: (whole[size] - exact[size], size))
    for size in by_rest[: turns - sum(whole.values())]:
        whole[size] += 1
    return [size for size in sorted(whole) for _ in range(whole[size])]
