"""What a run with buckets needs of its other fields: errors before anything is loaded."""

from __future__ import annotations

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError


def require_buckets(config: RunConfig, at: str) -> None:
    """Raise ConfigError, with the path below ``at``, if ``config`` has buckets that it cannot train on."""
    data, buckets = config.data, config.data.buckets
    if buckets is None:
        return
    side = data.image_size
    if data.source == "images":
        text = "must be encoded or synthetic with data.buckets: other images are squares"
        raise ConfigError(f"{at}.data.source", data.source, text)
    if config.task == "benchmark":
        text = "must not be benchmark with data.buckets: it measures squares"
        raise ConfigError(f"{at}.task", config.task, text)
    if not buckets.resolutions:
        lowest = max(buckets.step, buckets.min_side or 0)
        if not lowest <= side <= (buckets.max_side or side):
            text = (
                "must be neither below step or min_side of data.buckets nor above its max_side, "
                "if it has no resolutions"
            )
            raise ConfigError(f"{at}.data.image_size", side, text)
