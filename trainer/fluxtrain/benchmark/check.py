"""The errors of a benchmark that can be found before anything is started."""

from __future__ import annotations

from fluxtrain.benchmark.results import Results
from fluxtrain.benchmark.sweep import Trial, settings
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.sources import open_sources
from fluxtrain.random_seed import with_any_seed


def check_benchmark(config: RunConfig, paths: RunPaths) -> None:
    """Raise ConfigError or DataError if a trial could not start, or the output is of another benchmark."""
    config = with_any_seed(config)
    Results(paths.output, config)
    if config.data.source == "synthetic":
        return
    for setting in settings(config):
        open_sources(Trial(setting, 1, 1, 1, is_measured=False).config(config), paths.data)
