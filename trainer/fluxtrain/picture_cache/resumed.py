"""Whether a run that goes on has all its encodings: then its source is neither listed nor fetched again."""

from __future__ import annotations

from fluxtrain.contract.launch import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.pictures.subset import list_subsets, remote_sources
from fluxtrain.data.pictures.training_set import read_training_set
from fluxtrain.encode.encoders import check_files
from fluxtrain.picture_cache.fetching import is_configured_alike, pinned_sources
from fluxtrain.picture_cache.work import CachedPictures, open_cache
from fluxtrain.run_state import latest


def encoded_work(config: RunConfig, paths: RunPaths, is_new: bool) -> CachedPictures | None:
    """Return the samples of a run that is not ``is_new``, if all of them are in its cache; else None.

    None too if its pictures are files of a folder, which cost little to list, or its ``data`` or data set
    config name other sources, repeats or captions than those that it began with.
    """
    if is_new or not remote_sources(config.data, paths.data):
        return None
    stored = read_training_set(paths.output)
    if stored is None or not is_configured_alike(config.data, paths):
        return None
    check_files(config.encoders, paths.models)
    cache = open_cache(config, paths)
    wanted = {f"texts/{cache.text_path('').name}"}
    for sample in stored.every:
        wanted |= {f"latents/{cache.latents_path(each).name}" for each in sample.latents}
        wanted |= {f"masks/{cache.mask_path(each).name}" for each in sample.masks}
        wanted |= {f"texts/{cache.text_path(each).name}" for each in sample.captions}
    if not cache.existing().issuperset(wanted):
        return None
    return CachedPictures(cache, [], {}, [], [], stored)


def is_encoded(config: RunConfig, paths: RunPaths) -> bool:
    """Return whether the run in the output goes on from a checkpoint, and `encoded_work` finds all."""
    is_new = latest(paths.output / CHECKPOINTS_FOLDER) is None
    return not is_new and encoded_work(config, paths, is_new) is not None


def check_pictures(config: RunConfig, paths: RunPaths) -> None:
    """Raise an error if the run's pictures or encoders are missing; nothing is fetched or decoded."""
    if not is_encoded(config, paths):
        list_subsets(config.data, paths.data)
        pinned_sources(config.data, paths)
    check_files(config.encoders, paths.models)
