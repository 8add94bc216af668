"""The model of a training as it begins, or goes on: its weights, and adapters that it begins with."""

from __future__ import annotations

import sys

from fluxtrain.adapter.initial import initial_parameters
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.model.clip import ClipWeights
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import build_model
from fluxtrain.progress import Alive
from fluxtrain.weights.base import settle_base
from fluxtrain.weights.reader import published_weights


def initial_model(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    is_new: bool,
    clip: ClipWeights | None,
    alive: Alive,
) -> Flux:
    """Return the model of a run that begins if ``is_new``; else without what its checkpoint has.

    ``clip`` is the encoder whose adapters are trained. Raises DataError if weights or adapters are missing,
    do not fit, or are others than those that the run began with.
    """

    def tell(text: str) -> None:
        if world.is_main:
            print(f"fluxtrain: {text}", file=sys.stderr, flush=True)

    settle_base(config, paths, world, is_new)
    published = None
    if is_new or config.adapter is not None:  # adapters' checkpoints have no weights
        published = published_weights(config, paths.models, world, alive)
    adapters = initial_parameters(config, paths.models, tell) if is_new else {}
    return build_model(config, world, published, alive, adapters, clip)
