"""Training steps of ours, torchtitan and diffusers on one GPU, in turn, each in a process of its own.

A round measures every contender at three depths; rounds repeat while there is time, so that each one meets
the same clocks. Seconds of a step at full depth follow from t = a double + b single + c.
"""

from __future__ import annotations

import math
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.gpu.contenders import CONTENDERS, EQUAL, FP8
from benchmarks.gpu.processes import Request, Task, ask
from benchmarks.gpu.setting import Depth, Setting, machine
from benchmarks.table import print_table, spread

FULL: Depth = (19, 38)
LOSS_TOLERANCE, FP8_LOSS_TOLERANCE = 0.02, 0.04
"""Relative differences of losses that rounding to bfloat16 or fp8 explains, after some steps."""


def measure(task: Task, setting: Setting, contenders: list[str]) -> dict[str, Any]:
    """Return all rounds that fit into the time; at least one, and one only of a toy.

    A contender has its share of the time that is left. One that measured nothing is not asked again.
    """
    rounds, longest, asked = list[dict[str, Any]](), 0.0, contenders
    while not rounds or (asked and longest < task.left and len(rounds) < _most_rounds(task)):
        begin, results = monotonic(), dict[str, Any]()
        for position, name in enumerate(asked):
            share = task.left / (len(asked) - position)
            results[name] = ask(_request(name, task), share, task.errors)
        rounds.append(results)
        longest = max(longest, monotonic() - begin)
        asked = [name for name in asked[::-1] if any("error" not in r for r in results[name])]
    summary = {name: _summary(setting, rounds, name) for name in contenders}
    return {"machine": machine(), "size": task.size, "rounds": rounds, "summary": summary}


def _most_rounds(task: Task) -> int:
    return 1 if task.size["toy"] else 5


def _request(name: str, task: Task) -> Request:
    return Request(name, task.depths, task.size, *((2, 2) if task.size["toy"] else (10, 10)))


def _summary(setting: Setting, rounds: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the medians over all rounds, and the fit."""
    results = [result for round_ in rounds for result in round_.get(name, [])]
    errors = [result["error"] for result in results if "error" in result]
    good = [result for result in results if "error" not in result]
    if not good:
        return {"error": errors[0]}
    depth = good[0]["depth"]
    compared = [result for result in good if result["depth"] == depth]
    steps = [seconds for result in compared for seconds in result["seconds"]]
    first = compared[0]
    summary = {
        "depth": depth,
        "seconds": steps,
        "median_seconds": median(steps),
        "samples_per_second": first["batch"] / median(steps),
        "flops_per_second": first["batch"] * first["flops_per_sample"] / median(steps),
        "peak_allocated_bytes": first["peak_allocated_bytes"],
        "peak_reserved_bytes": first["peak_reserved_bytes"],
        "first_step_seconds": first["first_step_seconds"],
        "last_loss": first["losses"][-1],
        "errors": errors,
    }
    by_depth = {
        tuple(d): median(s for r in good if r["depth"] == d for s in r["seconds"])
        for d in (result["depth"] for result in good)
    }
    fit = fit_depths(by_depth)
    if fit is not None:
        double, single, rest = fit
        full = FULL[0] * double + FULL[1] * single + rest
        summary |= {
            "seconds_per_double_block": double,
            "seconds_per_single_block": single,
            "seconds_of_rest": rest,
            "full_depth_seconds": full,
            "full_depth_samples_per_second": first["batch"] / full,
            "full_depth_flops_per_second": first["batch"] * setting.at(FULL).flops / full,
        }
    return summary


def fit_depths(seconds: dict[tuple[int, ...], float]) -> tuple[float, float, float] | None:
    """Return seconds per double block, per single block and of the rest; None without three depths.

    Exact for three depths, of which the first differs from the others in one number of blocks each.
    """
    if len(seconds) != 3:
        return None
    (d0, s0), (d1, s1), (d2, s2) = seconds
    t0, t1, t2 = seconds.values()
    if s1 != s0 or d2 != d0 or d1 == d0 or s2 == s0:
        return None
    double, single = (t0 - t1) / (d0 - d1), (t0 - t2) / (s0 - s2)
    return double, single, t0 - d0 * double - s0 * single


def report(result: dict[str, Any]) -> None:
    """Print both tables: equal settings, and each at its best."""
    names = list(result["summary"])
    _table("equal settings", [name for name in names if name in EQUAL], result)
    _table("as shipped, and each at its best", names, result)
    for name in names:
        print(f"  {name}: {CONTENDERS[name].says}")
    _check_losses(result)


def _table(title: str, names: list[str], result: dict[str, Any]) -> None:
    summary, peak = result["summary"], result["machine"]["peak_bf16_flops"]
    own = summary.get("fluxtrain", {}).get("median_seconds")
    rows = []
    for name in names:
        values = summary[name]
        if "error" in values:
            rows.append([name, values["error"][:40], *["-"] * 7])
            continue
        memory = values["peak_reserved_bytes"]
        full = values.get("full_depth_flops_per_second")
        rows.append(
            [
                name,
                spread(values["seconds"], 1000, 1),
                f"{values['samples_per_second']:.2f}",
                f"{values['median_seconds'] / own:.2f}" if own else "-",
                f"{values['flops_per_second'] / peak:.1%}" if peak else "-",
                f"{memory / 2**30:.1f}" if memory else "-",
                f"{values['first_step_seconds']:.1f}",
                f"{values['last_loss']:.4f}",
                f"{values['full_depth_samples_per_second']:.2f}"
                + (f" ({full / peak:.1%})" if full and peak else "")
                if full
                else "-",
            ]
        )
    head = [
        *("", "ms per step", "samples/s", "x ours", "MFU", "GiB reserved", "first step s"),
        *("last loss", "full depth samples/s (MFU)"),
    ]
    print_table(title, head, rows)


def _check_losses(result: dict[str, Any]) -> None:
    losses = {n: s["last_loss"] for n, s in result["summary"].items() if "error" not in s}
    bad = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        print(f"  the losses of {', '.join(bad)} are not finite: their times mean nothing")
        return
    wide = [loss for name, loss in losses.items() if CONTENDERS[name].overrides != FP8]
    compared = [("", wide, LOSS_TOLERANCE)]
    if len(wide) < len(losses):
        compared += [(", with those of fp8", list(losses.values()), FP8_LOSS_TOLERANCE)]
    for which, each, tolerance in compared:
        if each:
            worst = max(each) / min(each) - 1
            verdict = "as rounding explains" if worst <= tolerance else "MORE THAN ROUNDING"
            print(f"  the last losses{which} differ by {worst:.1e}: {verdict}")
