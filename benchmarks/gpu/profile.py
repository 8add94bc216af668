"""Where the time of a step goes: the device's kernels by category, and the gaps between them.

On a CPU, operators stand for kernels, by their own time.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.processes import Request, Task, ask
from benchmarks.gpu.setting import machine
from benchmarks.gpu.timing import wait
from benchmarks.table import print_table
from torch.profiler import ProfilerActivity

NUM_STEPS = 3
TRACE, SUMMARY = "trace.json.gz", "kernels.json"
_MAX_TRACE = 15 << 20
"""Bytes of a trace; of a larger one only what the device did is kept."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OTHER = "element-wise and norms"
CATEGORIES = {  # the first that a name contains decides
    # fused kernels have the names of all that they compute, such as cat
    OTHER: ("triton_", "_write_heads", "_write_gradients"),
    "collective": ("nccl", "rccl", "all_gather", "reduce_scatter", "all_reduce"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa", "aiter"),
    "matrix product": ("gemm", "cutlass", "nvjet", "cublas", "addmm", "aten::mm", "bmm", "cijk_"),
    "optimizer and clipping": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "copy": ("memcpy", "copy_", "cat", "split_with_sizes"),
    "set": ("memset", "fill_"),
}


def record(step: Callable[[], object], folder: str) -> None:
    """Profile a few steps; write the trace and the kernels to ``folder``."""
    target, has_gpu = Path(folder), torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_STEPS):
            step()
        wait()
    profiler.export_chrome_trace(str(target / TRACE))
    events = limit_trace(target / TRACE, _MAX_TRACE)
    kernels = _gpu_kernels(events) if has_gpu else _cpu_operators(profiler.key_averages())
    (target / SUMMARY).write_text(json.dumps(kernels))


def limit_trace(path: Path, most: int) -> list[dict[str, Any]]:
    """Return the events of the trace ``path``; drop the host's from a file of over ``most`` bytes."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events: list[dict[str, Any]] = trace["traceEvents"]
    if path.stat().st_size > most:
        trace["traceEvents"] = [event for event in events if event.get("cat") in _ON_DEVICE]
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
        print(f"{path} has only what the device did: all of it were over {most >> 20} MiB")
    return events


def _gpu_kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": event["name"], "begin": event["ts"] / 1e6, "seconds": event["dur"] / 1e6}
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]


def _cpu_operators(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operators' own seconds, one after the other."""
    operators, begin = [], 0.0
    for average in averages:
        seconds = average.self_cpu_time_total / 1e6
        operators.append({"name": average.key, "begin": begin, "seconds": seconds})
        begin += seconds
    return operators


def category(name: str) -> str:
    """Return the category of the kernel ``name``."""
    lowered = name.lower()
    matches = (kind for kind, parts in CATEGORIES.items() if any(p in lowered for p in parts))
    return next(matches, OTHER)


def summarise(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds per step by category, those with no kernel, and the longest kernels.

    Kernels that overlap, such as collectives, count once in ``busy_seconds``.
    """
    by_category, by_name = defaultdict[str, float](float), defaultdict[str, float](float)
    for kernel in kernels:
        by_category[category(kernel["name"])] += kernel["seconds"] / NUM_STEPS
        by_name[kernel["name"]] += kernel["seconds"] / NUM_STEPS
    begin = min((kernel["begin"] for kernel in kernels), default=0.0)
    end = max((kernel["begin"] + kernel["seconds"] for kernel in kernels), default=0.0)
    busy = _covered((k["begin"], k["begin"] + k["seconds"]) for k in kernels) / NUM_STEPS
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:20]
    return {
        "step_seconds": (end - begin) / NUM_STEPS,
        "busy_seconds": busy,
        "idle_seconds": (end - begin) / NUM_STEPS - busy,
        "num_kernels": len(kernels) / NUM_STEPS,
        "seconds_by_category": dict(by_category),
        "longest": dict(longest),
    }


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``intervals``."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def measure(task: Task) -> dict[str, Any]:
    """Return the profile of ours; the share of the ceiling too if the output folder has that."""
    size, folder = task.size, task.output.resolve()
    depth, counts = task.depths[0], (2, 1) if size["toy"] else (10, 5)
    request = Request("fluxtrain", (depth,), size, *counts, profile=str(folder))
    result = ask(request, task.left, task.errors)[0]
    if "error" in result:
        return {"machine": machine(), "size": size, **result}
    summary = summarise(json.loads((folder / SUMMARY).read_text()))
    ceiling = _ceiling(folder / "ceiling.json", list(depth), result["batch"])
    return {"machine": machine(), "size": size, **result, **summary, "ceiling_seconds": ceiling}


def _ceiling(path: Path, depth: list[int], batch: int) -> float | None:
    if not path.exists():
        return None
    ceiling = json.loads(path.read_text())
    if ceiling["depth"] != depth or ceiling["setting"]["batch"] != batch:
        return None
    return float(ceiling["step_seconds"]["bf16"])


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    if "error" in result:
        print(f"profile: {result['error']}")
        return
    step = result["step_seconds"]
    parts = sorted(result["seconds_by_category"].items(), key=lambda item: -item[1])
    rows = [
        [name, f"{1e3 * seconds:.2f}", f"{seconds / step:.1%}"]
        for name, seconds in (*parts, ("no kernel", result["idle_seconds"]))
    ]
    double, single = result["depth"]
    title = f"a step of {1e3 * step:.1f} ms, {double}+{single} blocks"
    print_table(f"{title}, {result['num_kernels']:.0f} kernels", ["", "ms", "of the step"], rows)
    longest = [[name[:90], f"{1e3 * seconds:.2f}"] for name, seconds in result["longest"].items()]
    print_table("kernels that take longest", ["", "ms per step"], longest[:12])
    if result["ceiling_seconds"] is not None:
        print(f"  the ceiling's lower bound is {result['ceiling_seconds'] / step:.0%} of the step")
