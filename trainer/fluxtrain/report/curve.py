"""loss.png: training and evaluation loss over samples."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

from fluxtrain.report.records import Record, losses, smoothed
from fluxtrain.runtime.files import atomic_write_by_several

matplotlib.use("Agg")  # needs no display


def save_loss_curve(
    path: Path,
    records: list[Record],
    target: float | None,
    band: tuple[float, float] | None = None,
) -> None:
    """Draw training loss (raw and smoothed) and evaluation loss over samples into a PNG.

    ``band``: the samples between which MLPerf's reference runs reach the target.
    """
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    draw_losses(axes, records, target, band)
    axes.set_title(f"Loss of {path.absolute().parent.name}", parse_math=False)
    with atomic_write_by_several(path) as partial:
        figure.savefig(partial, format="png", bbox_inches="tight")
        pyplot.close(figure)


def draw_losses(
    axes: Axes, records: list[Record], target: float | None, band: tuple[float, float] | None
) -> None:
    """Draw the losses into ``axes``, as for `save_loss_curve`."""
    train, evals = losses(records, "train_loss"), losses(records, "eval_loss")
    if train:
        label = "training, each logged step"
        axes.plot(*zip(*train, strict=True), color="0.8", linewidth=0.8, label=label)
        smooth, marker = zip(*smoothed(train), strict=True), "o" if len(train) == 1 else None
        axes.plot(*smooth, marker=marker, color="C0", label="training, smoothed")
    if evals:
        axes.plot(*zip(*evals, strict=True), "o-", color="C3", markersize=4, label="evaluation")
        text, above = f"{evals[-1][1]:.4f}", (0, 6)
        place = evals[-1]  # at the right end: the text goes to the left, inside the frame
        axes.annotate(text, place, textcoords="offset points", xytext=above, ha="right")
    if target is not None:
        axes.axhline(target, color="C2", linestyle="--", linewidth=1, label=f"target {target}")
    if band is not None:
        label = "MLPerf's reference reaches the target (95 %)"
        axes.axvspan(*band, color="C2", alpha=0.15, linewidth=0, label=label)
    axes.set(xlabel="training samples", ylabel="velocity loss")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_plain)
    low, high = axes.get_ylim()
    if high < 10 * low:  # powers of ten alone would be one number or none
        axes.yaxis.set_minor_formatter(_plain)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)


def _plain(value: float, _: object) -> str:
    return f"{value:g}"
