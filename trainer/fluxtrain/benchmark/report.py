"""What a benchmark leaves for people: the table, the published figures, the scaling, and the plot."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from fluxtrain.benchmark.results import CSV_FILE, JSON_FILE, Result
from fluxtrain.contract.process import GPU_VARIABLES
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.setting import Setting
from fluxtrain.runtime.devices import find_peak
from fluxtrain.runtime.files import atomic_write_by_several


def write_report(config: RunConfig, output: Path, num_ranks: int, results: Sequence[Result]) -> str:
    """Draw the plot of ``results`` into ``output``; return the tables. All ranks are ``num_ranks``."""
    on_all = [
        result
        for result in results
        if result.trial.num_ranks == num_ranks and result.trial.has_equal_batches
    ]
    studies = _wanted(config, results)
    settings = dict.fromkeys(result.trial.setting for result in on_all)
    figures = [figure for setting in settings for figure in published(config, setting)]
    sizes = [r.measurement.device_memory_bytes for r in on_all if r.measurement]
    save_plot(output / PLOT_FILE, on_all, studies, figures, next(iter(sizes), None))
    parts = [render([result.row() for result in on_all])]
    parts += [f"published: {_compared(figure, on_all)}" for figure in figures]
    if any(sizes):
        parts.append(render_environment(os.environ))
    parts += [render_scaling(study) for study in studies]
    parts.append(f"{output}: {CSV_FILE}, {JSON_FILE}, {PLOT_FILE}")
    return "\n".join(parts)


@dataclass(frozen=True)
class Scaling:
    """The measurements of one study, by rising number of ranks."""

    kind: str
    """weak or strong."""
    setting: Setting
    results: Sequence[Result]

    def rates(self) -> list[float]:
        """Return images/s per rank of each result."""
        return [r.measurement.images_per_second_per_gpu for r in self.results if r.measurement]

    def efficiencies(self) -> list[float]:
        """Return images/s per rank relative to the fewest ranks, of each result."""
        rates = self.rates()
        return [rate / rates[0] for rate in rates]


def _wanted(config: RunConfig, results: Sequence[Result]) -> list[Scaling]:
    batch = config.schedule.global_batch_size
    return [
        study
        for study in scalings(results)
        if study.kind in config.benchmark.scaling
        and (study.kind == "weak" or study.results[0].trial.global_batch_size == batch)
    ]


def scalings(results: Sequence[Result]) -> Iterator[Scaling]:
    """Yield the studies in ``results``: measurements that differ in the number of ranks only."""
    groups = defaultdict[tuple[str, Setting, int], dict[int, Result]](dict)
    for result in results:
        if result.measurement is not None:
            trial = result.trial
            if trial.has_equal_batches:
                key = "weak", trial.setting, trial.micro_batch_size
                groups[key][trial.num_ranks] = result
            key = "strong", trial.setting, trial.global_batch_size
            groups[key].setdefault(trial.num_ranks, result)
    for (kind, setting, _), found in groups.items():
        if len(found) > 1:
            yield Scaling(kind, setting, [found[ranks] for ranks in sorted(found)])


def _compared(figure: Published, results: Sequence[Result]) -> str:
    """Return ``figure``, and ours as a ratio to it if it is of the same GPU and batch."""
    for result in results:
        trial, measured = result.trial, result.measurement
        if measured is None or trial.micro_batch_size != figure.micro_batch_size:
            continue
        peak = find_peak(measured.device, "bfloat16")
        if peak and peak.gpu == figure.gpu and _shapes(trial.setting) == figure.shapes:
            ratio = measured.images_per_second_per_gpu / figure.images_per_second_per_gpu
            return f"{figure}; here {ratio:.2f} times as many"
    return str(figure)


_GIB = 1 << 30
_HEADINGS = (
    "image",
    "text",
    "precision",
    "recomputed",
    "compiled",
    "ranks",
    "batch",
    "images/s/rank",
    "slowest-fastest",
    "TFLOP/s/rank",
    "MFU",
    "GiB",
    "of reserved",
    "data wait",
)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `Result.row` as an aligned table, with the device and the peak of MFU below."""
    text = _aligned([_HEADINGS, *map(_cells, rows)])
    devices = {(row["device"], row["mfu_peak"]) for row in rows if row["device"]}
    text += [f"on {device}; peak of MFU: {peak}" for device, peak in sorted(devices)]
    failed = [row for row in rows if row["status"] == "failed"]
    text += [f"failed at batch {row['micro_batch_size']}: {row['reason']}" for row in failed]
    return "\n".join(text)


def render_scaling(study: Scaling) -> str:
    """Return a study as an aligned table: images/s per rank relative to the fewest ranks."""
    headings = ("ranks", "batch", "of all", "images/s", "images/s/rank", "efficiency")
    rows = [
        [
            f"{result.trial.num_ranks}",
            f"{result.trial.micro_batch_size}",
            f"{result.trial.global_batch_size}",
            f"{rate * result.trial.num_ranks:.4g}",
            f"{rate:.4g}",
            f"{efficiency:.1%}",
        ]
        for result, rate, efficiency in zip(
            study.results, study.rates(), study.efficiencies(), strict=True
        )
    ]
    return "\n".join([f"{study.kind} scaling: {study.setting}", *_aligned([headings, *rows])])


def render_environment(own: Mapping[str, str]) -> str:
    """Return the variables for GPUs as an aligned table: here, by default, and in AMD's recipes."""
    rows: list[Sequence[str]] = [
        ("environment", "here", "ours", "MLPerf v6.0", "Primus", "FluxBenchmark", "effect")
    ]
    for each in GPU_VARIABLES:
        values = own.get(each.name), each.ours, each.entry, each.primus, each.fluxbenchmark
        rows.append(
            (each.name, *("-" if value is None else value for value in values), each.effect)
        )
    return "\n".join(_aligned(rows))


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [
        Setting(**{field.name: row[field.name] for field in fields(Setting)}).shape,
        f"{row['text_length']}",
        row["compute"] if row["fp8"] == "none" else f"fp8 {row['fp8']}",
        f"{row['activation_checkpointing']:.0%}",
        {True: "yes", False: "no", None: "-"}[row["compiled"]],
        f"{row['num_ranks']}",
        f"{row['micro_batch_size']}",
    ]
    if row["images_per_second_per_gpu"] is None:
        return [*cells, row["status"], *[""] * (len(_HEADINGS) - len(cells) - 1)]
    reserved = row["memory_reserved_bytes"]
    return [
        *cells,
        f"{row['images_per_second_per_gpu']:.4g}",
        f"{row['slowest']:.4g}-{row['fastest']:.4g}",
        f"{row['tflops_per_gpu']:.3g}",
        "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{row['memory_allocated_bytes'] / _GIB:.1f}",
        "-" if reserved is None else f"{reserved / _GIB:.1f}",
        f"{row['data_wait_fraction']:.0%}",
    ]


matplotlib.use("Agg")  # needs no display

PLOT_FILE = "benchmark.png"


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
    figure.suptitle(f"Benchmark {path.absolute().parent.name}", parse_math=False)
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


@dataclass(frozen=True)
class Published:
    """A figure that others published."""

    source: str
    gpu: str
    micro_batch_size: int
    images_per_second_per_gpu: float
    shapes: tuple[int, int, str] = (512, 512, "bfloat16")
    """The image size, the text length and the data type."""

    def __str__(self) -> str:
        rate, batch = self.images_per_second_per_gpu, self.micro_batch_size
        return f"{rate} images/s per GPU at batch {batch} on {self.gpu} ({self.source})"


_DEV = ModelConfig(guidance_embed=True)
_FLUXBENCHMARK = "AMD FluxBenchmark"
FIGURES = (
    Published(f"{_FLUXBENCHMARK}, its README", "MI300X", 1, 2.03),
    Published(f"{_FLUXBENCHMARK}, its README", "MI300X", 10, 4.34),
    Published(f"{_FLUXBENCHMARK}, ROCm's container v25.2", "MI300X", 10, 4.51),
)
"""FLUX.1 dev, all weights trained with FSDP on eight GPUs from encodings; nothing recomputed or compiled."""


def published(config: RunConfig, setting: Setting) -> list[Published]:
    """Return the figures of the same model, shapes, precision and recomputation as ``setting``."""
    is_dev = config.model == _DEV and config.adapter is None
    if not is_dev or setting.activation_checkpointing or setting.fp8 != "none" or setting.largest:
        return []
    return [figure for figure in FIGURES if figure.shapes == _shapes(setting)]


def _shapes(setting: Setting) -> tuple[int, int, str]:
    return setting.image_size, setting.text_length, setting.compute
