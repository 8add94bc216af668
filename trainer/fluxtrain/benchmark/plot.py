"""benchmark.png: throughput and memory over the micro batch, and the scaling over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from fluxtrain.benchmark.published import Published
from fluxtrain.benchmark.results import Result
from fluxtrain.benchmark.scaling import Scaling
from fluxtrain.files import atomic_write_by_several
from fluxtrain.setting import Setting

matplotlib.use("Agg")  # needs no display

PLOT_FILE = "benchmark.png"
_GIB = 1 << 30


def save_plot(
    path: Path,
    results: Sequence[Result],
    studies: Sequence[Scaling],
    figures: Sequence[Published],
    limit_bytes: int | None,
) -> None:
    """Draw ``results``, those on all ranks, into a PNG; ``limit_bytes`` is the memory of a device."""
    panels = 3 if studies else 2
    figure, axes = pyplot.subplots(1, panels, figsize=(6.5 * panels, 4.8), dpi=120)
    for number, (setting, found) in enumerate(_by_setting(results).items()):
        color = f"C{number % 10}"
        _draw_throughput(axes[0], setting, found, color)
        _draw_memory(axes[1], found, color)
    for gpu in dict.fromkeys(figure.gpu for figure in figures):
        points = [
            (figure.micro_batch_size, figure.images_per_second_per_gpu)
            for figure in figures
            if figure.gpu == gpu
        ]
        label = f"published, {gpu}"
        axes[0].plot(*zip(*points, strict=True), "*", color="0.3", markersize=11, label=label)
    axes[1].plot([], [], "o-", color="0.3", label="allocated")
    axes[1].plot([], [], ":", color="0.3", label="reserved")
    axes[1].plot([], [], "x", color="0.3", label="out of memory")
    if limit_bytes:
        axes[1].axhline(limit_bytes / _GIB, color="0.4", linestyle="--", label="of the device")
    batches = [result.trial.micro_batch_size for result in results]
    _finish(axes[0], batches, "micro batch per rank", "images/s per rank")
    _finish(axes[1], batches, "micro batch per rank", "memory of rank 0, GiB")
    if studies:
        _draw_scaling(axes[2], studies)
    with atomic_write_by_several(path) as partial:
        figure.savefig(partial, format="png", bbox_inches="tight")
        pyplot.close(figure)


def _by_setting(results: Sequence[Result]) -> dict[Setting, list[Result]]:
    groups = defaultdict[Setting, list[Result]](list)
    for result in sorted(results, key=lambda result: result.trial.micro_batch_size):
        groups[result.trial.setting].append(result)
    return groups


def _draw_throughput(axes: Any, setting: Setting, results: list[Result], color: str) -> None:
    measured = [(r.trial.micro_batch_size, r.measurement) for r in results if r.measurement]
    if not measured:
        return
    rates = [m.images_per_second_per_gpu for _, m in measured]
    below = [m.images_per_second_per_gpu - m.slowest for _, m in measured]
    above = [m.fastest - m.images_per_second_per_gpu for _, m in measured]
    axes.errorbar(
        [batch for batch, _ in measured],
        rates,
        yerr=[below, above],
        fmt="o-",
        color=color,
        capsize=3,
        label=str(setting),
    )
    best = max(range(len(rates)), key=rates.__getitem__)
    point = measured[best][0], rates[best]
    axes.annotate(
        f"{rates[best]:.3g}", point, textcoords="offset points", xytext=(0, 8), ha="center"
    )


def _draw_memory(axes: Any, results: list[Result], color: str) -> None:
    measured = [(r.trial.micro_batch_size, r.measurement) for r in results if r.measurement]
    batches = [batch for batch, _ in measured]
    allocated = [m.memory_allocated_bytes / _GIB for _, m in measured]
    axes.plot(batches, allocated, "o-", color=color)
    reserved = [(b, m.memory_reserved_bytes) for b, m in measured if m.memory_reserved_bytes]
    if reserved:
        axes.plot([b for b, _ in reserved], [m / _GIB for _, m in reserved], ":", color=color)
    out = [r.trial.micro_batch_size for r in results if not r.fits]
    top = max(allocated, default=1.0)
    axes.plot(out, [top] * len(out), "x", color=color, markersize=9)


def _draw_scaling(axes: Any, studies: Sequence[Scaling]) -> None:
    for number, study in enumerate(studies):
        ranks = [result.trial.num_ranks for result in study.results]
        percent = [100 * value for value in study.efficiencies()]
        label = f"{study.kind}: {study.setting}"
        axes.plot(ranks, percent, "o-", color=f"C{number % 10}", label=label)
    axes.axhline(100, color="0.4", linestyle="--")
    counts = [result.trial.num_ranks for study in studies for result in study.results]
    _finish(axes, counts, "ranks", "images/s per rank, % of the fewest ranks")


def _finish(axes: Any, ticks: list[int], x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)), labels=[f"{tick}" for tick in sorted(set(ticks))])
    axes.minorticks_off()
    axes.set_ylim(bottom=0, top=1.12 * axes.get_ylim()[1])
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
