"""What a run with buckets needs of its other fields: errors before anything is loaded."""

from __future__ import annotations

from fluxtrain.contract.run.buckets import BucketsConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError


def require_buckets(config: RunConfig, at: str) -> None:
    """Raise ConfigError, with the path below ``at``, if ``config`` has buckets that it cannot train on."""
    data, buckets = config.data, config.data.buckets
    if buckets is None:
        return
    if data.source == "images":
        text = (
            "must be encoded or synthetic with data.buckets: the sizes of other images are known once "
            "all are read; name their folder in data.images, which encodes them before the first step"
        )
        raise ConfigError(f"{at}.data.source", data.source, text)
    swept = config.benchmark.image_sizes if config.task == "benchmark" else []
    if buckets.resolutions and swept:
        text = "must be empty if data.buckets has resolutions, which are the sizes"
        raise ConfigError(f"{at}.benchmark.image_sizes", swept, text)
    if not buckets.resolutions:
        _require_side(buckets, data.image_size, f"{at}.data.image_size")
        for number, side in enumerate(swept):
            _require_side(buckets, side, f"{at}.benchmark.image_sizes[{number}]")


def _require_side(buckets: BucketsConfig, side: int, path: str) -> None:
    lowest = max(buckets.step, buckets.min_side or 0)
    if not lowest <= side <= (buckets.max_side or side):
        text = (
            "must be neither below step or min_side of data.buckets nor above its max_side, "
            "if it has no resolutions"
        )
        raise ConfigError(path, side, text)
