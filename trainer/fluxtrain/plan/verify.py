"""Verify a plan: one real step on fake tensors, in a process group of any size that does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.data.order import BatchShares
from fluxtrain.model.clip import recomputed_clip_flops
from fluxtrain.model.cost import recomputed_flops
from fluxtrain.model.parameters import norm_flops, run_flops
from fluxtrain.parallel.compile import missing_compiler
from fluxtrain.parallel.traffic import Collective, collectives
from fluxtrain.plan.measurement import Measured, compiled_kernels, eager, encodes, measure
from fluxtrain.runtime.devices import Gpu
from fluxtrain.runtime.progress import binary, decimal
from fluxtrain.train.memory import Memory, memory, settle_resharding
from fluxtrain.train.micro_batch import Room, settle_micro_batch

MEMORY_TOLERANCE = 0.05
"""Largest allowed difference of the peak, as a fraction of what was measured."""
_KINDS = {
    "Sharded Param": "weights",
    "Parameter": "weights",
    "OptState": "optimizer",
    "Optstate": "optimizer",
    "Sharded Grad": "gradients",
    "Unsharded Param": "gathered",
    "All Gather": "gathered",
    "Reduce Scatter": "gathered",
}
"""The tracker's kinds by the plan's; all others are activations, or what a backward pass computes of them."""
_NOTHING = Collective("dp_shard", "all_gather", calls=0, content_bytes=0)


@dataclass(frozen=True)
class Row:
    """One quantity, as planned and as measured."""

    name: str
    unit: Literal["B", "FLOP", ""]
    planned: int | None
    """None if a plan has no such figure."""
    measured: int
    tolerance: float | None = None
    """Largest allowed difference, as a fraction of what was measured; None: any."""

    @property
    def difference(self) -> float | None:
        """Return the difference of the plan as a fraction of what was measured."""
        if self.planned is None:
            return None
        if self.measured == 0:
            return 0.0 if self.planned == 0 else float("inf")
        return self.planned / self.measured - 1

    @property
    def holds(self) -> bool:
        if self.tolerance is None or self.difference is None:
            return True
        return abs(self.difference) <= self.tolerance


class Comparison(BaseModel):
    """A plan beside the step that was measured."""

    model_config = ConfigDict(frozen=True)

    num_ranks: int
    """Ranks of the fake process group."""
    micro_batch_size: int
    """Samples of a micro batch."""
    micro_batches: int
    """Micro batches that were measured."""
    accumulation_steps: int
    """Micro batches of a whole step."""
    compiles: bool
    """Whether the config compiles blocks; both columns are without it."""
    rows: list[Row]

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)


def verify(
    config: RunConfig, num_nodes: int, ranks_per_node: int, gpu: Gpu | None = None
) -> Comparison:
    """Measure one step of ``config`` on as many fake ranks, without compilation; compare it with its plan.

    ``gpu`` is that of the ranks of the job, None for CPUs. By default blocks are compiled on GPUs, and
    weights stay gathered where its memory allows it.
    """
    has_gpu = gpu is not None
    memory_bytes = gpu.memory_bytes if gpu else None
    num_ranks = num_nodes * ranks_per_node
    room = Room.of(memory_bytes, ranks_per_node)
    config = settle_micro_batch(config, num_ranks, ranks_per_node, room)
    config = settle_resharding(config, num_ranks, ranks_per_node, memory_bytes)
    measured = measure(config, num_nodes, ranks_per_node, has_gpu)
    sharding = Sharding.of(config, num_ranks, ranks_per_node)
    shares = BatchShares.of(config, num_ranks)
    size, accumulates = shares.micro_batch_size, shares.accumulation_steps > 1
    planned = memory(eager(config), sharding, size, accumulates, copies_ahead=has_gpu)
    products = None if encodes(config) else measured.micro_batches * _flops(config, size)
    return Comparison(
        num_ranks=num_ranks,
        micro_batch_size=size,
        micro_batches=measured.micro_batches,
        accumulation_steps=shares.accumulation_steps,
        compiles=config.parallel.compiles(has_gpu),
        rows=[
            *_memory_rows(planned, measured),
            *_traffic_rows(config, sharding, measured),
            Row("products", "FLOP", products, measured.flops),
            Row("kernels", "", None, measured.kernels),
            *_compiled_rows(config, has_gpu),
            Row("host syncs", "", 0, len(measured.host_syncs), tolerance=0),
        ],
    )


def _memory_rows(planned: Memory, measured: Measured) -> list[Row]:
    found = dict.fromkeys(("weights", "optimizer", "gradients", "gathered", "activations"), 0)
    for kind, used in measured.memory.items():
        found[_KINDS.get(kind, "activations")] += used
    beside = {
        "encoders": measured.encoder_bytes,
        "copied_ahead": measured.ahead_bytes,
        "offload_buffers": measured.buffer_bytes,
    }
    found["activations"] -= sum(beside.values())
    found |= {kind: used for kind, used in beside.items() if used or getattr(planned, kind)}
    return [
        Row("peak memory", "B", planned.total, measured.peak_bytes, MEMORY_TOLERANCE),
        *(
            Row(f"  {kind.replace('_', ' ')}", "B", getattr(planned, kind), used)
            for kind, used in found.items()
        ),
    ]


def _traffic_rows(config: RunConfig, sharding: Sharding, measured: Measured) -> list[Row]:
    """Return bytes and calls of each collective that is planned or was measured."""
    planned = {
        (each.axis, each.operation): each
        for each in collectives(config, sharding, measured.micro_batches)
    }
    found = {(each.axis, each.operation): each for each in measured.collectives}
    rows = list[Row]()
    for axis, operation in dict.fromkeys((*planned, *found)):
        expected, counted = (each.get((axis, operation), _NOTHING) for each in (planned, found))
        rows += [
            Row(f"{operation} in {axis}", "B", expected.content_bytes, counted.content_bytes, 0),
            Row("  calls", "", expected.calls, counted.calls, 0),
        ]
    return rows


def _compiled_rows(config: RunConfig, has_gpu: bool) -> list[Row]:
    """Return the kernels of compiled blocks, if the job compiles them and this machine can."""
    if not config.parallel.compiles(has_gpu) or missing_compiler(torch.device("cpu")) is not None:
        return []
    return [
        Row(f"  of a compiled {kind} block", "", None, count)
        for kind, count in compiled_kernels(config).items()
    ]


def _flops(config: RunConfig, micro_batch: int) -> int:
    """Return the FLOPs of the products of ``micro_batch`` samples as torch counts them.

    They include recomputed blocks, and the scores of attention, which its backward pass computes again unless
    they are kept.
    """
    sizes = config.model, config.image_tokens, config.data.text_length
    fraction = config.parallel.activation_checkpointing
    keeps_scores = config.parallel.attention == "math"
    again = recomputed_flops(*sizes, fraction, keeps_scores) + recomputed_clip_flops(config)
    of_sample = run_flops(config) + again
    return micro_batch * of_sample + norm_flops(config)


# Formats a comparison as a table for a terminal.


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
    allowed = f"memory may differ by {MEMORY_TOLERANCE:.0%}, traffic not at all"
    return [*lines, f"The plan {verdict}: {allowed}."]


def _compiled(comparison: Comparison) -> str:
    if comparison.compiles:
        return (
            ", although the run compiles its blocks: they then save less for the backward pass,\n"
            "and launch the fewer kernels that are counted in the compiler's code for the CPU."
        )
    return "."
