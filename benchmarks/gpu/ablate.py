"""What each switch of ours costs or saves: one changed at a time, each in a process of its own.

The base is measured first and last; the difference of the two is the machine's drift.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.gpu.contenders import FP8
from benchmarks.gpu.processes import Request, Task, ask
from benchmarks.gpu.setting import machine
from benchmarks.table import print_table, spread


@dataclass(frozen=True)
class Switch:
    """One change of the base."""

    overrides: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    batch_factor: float = 1.0
    needs_fsdp: bool = False
    """Changes nothing where FSDP2 does not divide the model."""


BASE = "base"
SWITCHES = {  # those that may become a default first
    "fp8 tensorwise": Switch(FP8),
    "torch's kernels only": Switch({"parallel.kernels": []}),
    "our kernel of AdamW only": Switch({"parallel.kernels": ["optimizer"]}),
    "attention: flash": Switch(attention="flash"),
    "attention: cudnn": Switch(attention="cudnn"),
    "not compiled": Switch({"parallel.compile": False}),
    "fp8 rowwise": Switch({"precision.fp8": "rowwise"}),
    "weights in bfloat16": Switch({"precision.weights": "bfloat16"}),
    "half the micro batch": Switch(batch_factor=0.5),
    "twice the micro batch": Switch(batch_factor=2),
    "recompute all blocks": Switch({"parallel.activation_checkpointing": 1.0}),
    "recompute half of the blocks": Switch({"parallel.activation_checkpointing": 0.5}),
    "attention: efficient": Switch(attention="efficient"),
    "float32": Switch({"precision.compute": "float32"}),
    "keep gathered weights": Switch({"parallel.reshard_after_forward": False}, needs_fsdp=True),
    "reduce in bfloat16": Switch({"precision.reduce": "bfloat16"}, needs_fsdp=True),
}
TOY_SWITCHES = ("fp8 tensorwise", "attention: flash", "half the micro batch")
"""Those of a tiny model, one of each kind: each takes the start of a process."""
_CAP = 2.0
"""A switch may take as many times the seconds of the base, with its start and compilation."""


def measure(task: Task, batch: int, switches: list[str]) -> dict[str, Any]:
    """Return the result of each of ``switches`` that fits into the time; the others are named as left out."""
    begin, results, left_out = monotonic(), dict[str, Any](), list[str]()
    results[BASE] = _result(Switch(), task, batch, task.left / 3)
    took = monotonic() - begin
    for name in switches:
        if 2 * took > task.left:  # the base follows
            left_out.append(name)
            continue
        seconds = min(_CAP * took, task.left - took)
        results[name] = _result(SWITCHES[name], task, batch, seconds)
    results[f"{BASE} again"] = _result(Switch(), task, batch, task.left)
    return {"machine": machine(), "size": task.size, "results": results, "left_out": left_out}


def _result(switch: Switch, task: Task, batch: int, seconds: float) -> dict[str, Any]:
    counts = (2, 2) if task.size["toy"] else (10, 10)
    size = task.size | {"batch": max(1, round(batch * switch.batch_factor))}
    request = Request(
        "fluxtrain", task.depths[:1], size, *counts, switch.overrides, switch.attention
    )
    return ask(request, seconds, task.errors)[0]


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    results, peak = result["results"], result["machine"]["peak_bf16_flops"]
    base = _seconds_per_sample(results[BASE])
    rows = []
    for name, values in results.items():
        if "error" in values:
            rows.append([name, values["error"][:60], *["-"] * 5])
            continue
        seconds = _seconds_per_sample(values) or 0.0
        memory = values["peak_reserved_bytes"]
        rate = values["flops_per_sample"] / seconds
        rows.append(
            [
                name,
                spread(values["seconds"], 1000, 1),
                f"{1 / seconds:.2f}",
                f"{base / seconds:.3f}" if base else "-",
                f"{rate / peak:.1%}" if peak else "-",
                f"{memory / 2**30:.1f}" if memory else "-",
                f"{values['losses'][-1]:.4f}",
            ]
        )
    double, single = results[BASE]["depth"]
    head = ["", "ms per step", "samples/s", "x base", "MFU", "GiB reserved", "last loss"]
    print_table(f"one switch at a time, {double}+{single} blocks", head, rows)
    if result["left_out"]:
        print(f"  no time for: {', '.join(result['left_out'])}; see --minutes")


def _seconds_per_sample(values: dict[str, Any]) -> float | None:
    return median(values["seconds"]) / values["batch"] if "error" not in values else None
