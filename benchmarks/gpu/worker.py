"""A process that builds one contender and takes steps; it answers in lines of JSON.

``python -m benchmarks.gpu.worker REQUEST``, with a request as `ask` of benchmarks.gpu.processes writes it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from benchmarks.gpu.contenders import CONTENDERS, Step
from benchmarks.gpu.setting import gpu_state, make_setting
from benchmarks.gpu.timing import wait

from fluxtrain.parallel.compile import attention_backend
from fluxtrain.parallel.distributed import World, end_with_parent, process_group


def measure(request: dict[str, Any], depth: tuple[int, int], world: World) -> dict[str, Any]:
    """Return the seconds and losses of the steps at ``depth``, and the peak memory."""
    size = {name: request[name] for name in ("toy", "batch", "latent", "text")}
    setting = make_setting(**size).at(depth)
    contender = CONTENDERS[request["contender"]]
    contender = replace(contender, overrides=contender.overrides | request["overrides"])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin = perf_counter()
    step = contender.step(setting, world)
    wait()
    built = perf_counter()
    losses = [step()]
    wait()
    compiled = perf_counter()
    losses += [step() for _ in range(request["warmup"] - 1)]
    seconds = _timed(step, request["steps"], losses)
    if request.get("profile"):
        from benchmarks.gpu.profile import record

        record(step, request["profile"])
    return {
        "depth": depth,
        "batch": setting.batch,
        "flops_per_sample": setting.flops,
        "build_seconds": built - begin,
        "first_step_seconds": compiled - built,
        "seconds": seconds,
        "losses": [float(loss) for loss in losses],
        **_memory(),
        "state": gpu_state(),
    }


def _timed(step: Step, count: int, losses: list[torch.Tensor]) -> list[float]:
    """Return the seconds of each of ``count`` steps; their losses stay on the device until the end."""
    if not torch.cuda.is_available():
        seconds = []
        for _ in range(count):
            begin = perf_counter()
            losses.append(step())
            seconds.append(perf_counter() - begin)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    wait()
    events[0].record()
    for event in events[1:]:
        losses.append(step())
        event.record()
    wait()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]


def _memory() -> dict[str, int | None]:
    if not torch.cuda.is_available():
        return {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    """Measure at each depth of the request; print one line for each."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for the results only
    end_with_parent()
    request = json.loads(sys.argv[1])
    if request["toy"]:  # the kit is tried, and compiling takes longer than all the rest
        torch.compiler.set_stance("force_eager")
    with process_group() as world, attention_backend(request["attention"]):
        for depth in request["depths"]:
            try:
                result = measure(request, (depth[0], depth[1]), world)
            except torch.OutOfMemoryError:
                result = {"depth": depth, "error": "out of memory"}
            print(json.dumps(result), file=output, flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
