"""The table of a benchmark's measurements, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fluxtrain.benchmark.scaling import Scaling
from fluxtrain.setting import Setting

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
