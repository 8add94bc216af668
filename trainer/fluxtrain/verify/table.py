"""Formats a comparison as a table for a terminal."""

from __future__ import annotations

from fluxtrain.plan.units import binary, decimal
from fluxtrain.verify.comparison import MEMORY_TOLERANCE, Comparison, Row

_HEADINGS = ("measured on fake tensors", "planned", "measured", "difference")


def render(comparison: Comparison) -> str:
    """Return ``comparison`` as aligned rows, what was compared, and whether it holds."""
    rows = [_HEADINGS, *map(_cells, comparison.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        f"{name:<{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in pairs)
        for name, *cells in rows
        for pairs in [list(zip(cells, widths[1:], strict=True))]
    ]
    return "\n".join([*(line.rstrip() for line in lines), "", *_notes(comparison)])


def _cells(row: Row) -> tuple[str, str, str, str]:
    planned = "" if row.planned is None else _amount(row.planned, row)
    return row.name, planned, _amount(row.measured, row), _difference(row)


def _amount(value: int, row: Row) -> str:
    if row.unit == "FLOP":
        return decimal(value, "FLOP")
    if row.unit == "":
        return f"{value:,}"
    return f"{value:,}" if row.tolerance == 0 else binary(value)


def _difference(row: Row) -> str:
    if row.difference is None:
        return ""
    text = "equal" if row.difference == 0 else f"{row.difference:+.2%}"
    return text if row.holds else f"{text} FAILS"


def _notes(comparison: Comparison) -> list[str]:
    step = f"{comparison.micro_batch_size} samples on one of {comparison.num_ranks} ranks"
    if comparison.accumulation_steps > comparison.micro_batches:
        part = f"{comparison.micro_batches} of its {comparison.accumulation_steps} micro batches"
    else:
        part = f"all of its micro batches ({comparison.micro_batches})"
    lines = [f"Compared: one optimizer step, {part}, each of {step}."]
    lines.append("Both columns are without compilation" + _compiled(comparison))
    verdict = "holds" if comparison.holds else "DOES NOT HOLD"
    return [
        *lines,
        f"The plan {verdict}: memory may differ by {MEMORY_TOLERANCE:.0%}, traffic not at all.",
    ]


def _compiled(comparison: Comparison) -> str:
    if comparison.compiles:
        return (
            ", although the run compiles its blocks: they then save less for the backward pass,\n"
            "and launch the fewer kernels that are counted in the compiler's code for the CPU."
        )
    return "."
