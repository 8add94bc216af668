"""What each switch of ours costs or saves: one changed at a time, each in a process of its own.

The base is measured first and last; the difference of the two is the machine's drift.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.gpu.processes import Request, ask
from benchmarks.gpu.setting import Depth, machine
from benchmarks.table import print_table, spread

DEPTH: Depth = (4, 8)
TOY_DEPTH: Depth = (1, 1)


@dataclass(frozen=True)
class Switch:
    """One change of the base."""

    overrides: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    batch_factor: float = 1.0


BASE = "base"
SWITCHES = {
    "not compiled": Switch({"parallel.compile": False}),
    "recompute all blocks": Switch({"parallel.activation_checkpointing": 1.0}),
    "recompute half of the blocks": Switch({"parallel.activation_checkpointing": 0.5}),
    "keep gathered weights": Switch({"parallel.reshard_after_forward": False}),
    "reduce in bfloat16": Switch({"precision.reduce": "bfloat16"}),
    "float32, not sharded": Switch({"precision.compute": "float32"}),
    "attention: flash": Switch(attention="flash"),
    "attention: cudnn": Switch(attention="cudnn"),
    "attention: efficient": Switch(attention="efficient"),
    "half the micro batch": Switch(batch_factor=0.5),
    "twice the micro batch": Switch(batch_factor=2),
}
TOY_SWITCHES = ("not compiled", "recompute half of the blocks", "attention: flash")
"""Those of a tiny model, one of each kind: each takes the start of a process."""


def measure(size: dict[str, Any], batch: int, seconds: float) -> dict[str, Any]:
    """Return the result of every switch that fits into ``seconds``; the others are named as left out."""
    end, results, left_out = monotonic() + seconds, dict[str, Any](), list[str]()
    results[BASE] = _result(Switch(), size, batch, end)
    took = seconds - (end - monotonic())
    for name in TOY_SWITCHES if size["toy"] else SWITCHES:
        switch = SWITCHES[name]
        if monotonic() + 2 * took > end:  # the base follows
            left_out.append(name)
            continue
        results[name] = _result(switch, size, batch, end)
    results[f"{BASE} again"] = _result(Switch(), size, batch, end)
    return {"machine": machine(), "size": size, "results": results, "left_out": left_out}


def _result(switch: Switch, size: dict[str, Any], batch: int, end: float) -> dict[str, Any]:
    depth, counts = (TOY_DEPTH, (2, 2)) if size["toy"] else (DEPTH, (10, 10))
    size = size | {"batch": max(1, round(batch * switch.batch_factor))}
    request = Request("fluxtrain", (depth,), size, *counts, switch.overrides, switch.attention)
    return ask(request, max(1.0, end - monotonic()))[0]


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
