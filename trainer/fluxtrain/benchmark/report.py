"""What a benchmark leaves for people: the table, the published figures, the scaling, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fluxtrain.benchmark.plot import PLOT_FILE, save_plot
from fluxtrain.benchmark.published import Published, published
from fluxtrain.benchmark.results import CSV_FILE, JSON_FILE, Result
from fluxtrain.benchmark.scaling import Scaling, scalings
from fluxtrain.benchmark.table import render, render_scaling
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.gpus import find_peak


def write_report(config: RunConfig, output: Path, num_ranks: int, results: Sequence[Result]) -> str:
    """Draw the plot of ``results`` into ``output``; return the tables. All ranks are ``num_ranks``."""
    on_all = [
        result
        for result in results
        if result.trial.num_ranks == num_ranks and result.trial.has_equal_batches
    ]
    studies = _wanted(config, results)
    figures = _published(config, on_all)
    sizes = [r.measurement.device_memory_bytes for r in on_all if r.measurement]
    save_plot(output / PLOT_FILE, on_all, studies, figures, next(iter(sizes), None))
    parts = [render([result.row() for result in on_all])]
    parts += [f"published: {_compared(figure, on_all)}" for figure in figures]
    parts += [render_scaling(study) for study in studies]
    parts.append(f"{output}: {CSV_FILE}, {JSON_FILE}, {PLOT_FILE}")
    return "\n".join(parts)


def _wanted(config: RunConfig, results: Sequence[Result]) -> list[Scaling]:
    """Return the studies that ``config`` asks for."""
    batch = config.schedule.global_batch_size
    return [
        study
        for study in scalings(results)
        if study.kind in config.benchmark.scaling
        and (study.kind == "weak" or study.results[0].trial.global_batch_size == batch)
    ]


def _published(config: RunConfig, results: Sequence[Result]) -> list[Published]:
    settings = dict.fromkeys(result.trial.setting for result in results)
    return [figure for setting in settings for figure in published(config, setting)]


def _compared(figure: Published, results: Sequence[Result]) -> str:
    """Return ``figure``, and ours as a ratio to it if it is of the same GPU and batch."""
    for result in results:
        trial, measured = result.trial, result.measurement
        if measured is None or trial.micro_batch_size != figure.micro_batch_size:
            continue
        shapes = trial.setting.image_size, trial.setting.text_length, trial.setting.compute
        peak = find_peak(measured.device, "bfloat16")
        if peak and peak.gpu == figure.gpu and shapes == figure.shapes:
            ratio = measured.images_per_second_per_gpu / figure.images_per_second_per_gpu
            return f"{figure}; here {ratio:.2f} times as many"
    return str(figure)
