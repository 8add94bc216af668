"""The plans of all presets against steps on fake tensors, and the host's time for a step, at up to 512 ranks.

    python -m benchmarks.training.verify [PRESET ...]

Each step is a real one of rank 0, in a process group whose collectives do nothing: memory by torch's
trackers, collectives by bytes and calls. The host's time is that of real steps on the CPU, with as many
blocks as FLUX.1 and layers so narrow that their arithmetic hardly counts; it includes this arithmetic and
the copies of the weights' padding, but neither a GPU's driver nor a network.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.parallel.parallelize import build_model
from fluxtrain.plan.measurement import Step, eager, fake_world
from fluxtrain.plan.verify import Comparison, verify

PRESETS = ("mlperf-schnell", "mlperf-schnell-raw", "dev-finetune", "benchmark", "openmoji", "micro")
SIZES = ((1, 1), (1, 8), (8, 8), (64, 8))
"""Nodes, and ranks of each."""
_VARIANTS: dict[str, dict[str, Any]] = {
    "per-node": {"parallel": {"dp_replicate": "per-node"}},
    "recomputed": {"parallel": {"activation_checkpointing": 1.0}},
}
"""Changes to mlperf-schnell on 8 x 8 ranks."""
_NARROW = {
    "hidden_size": 32,
    "num_heads": 2,
    "axes_dim": (4, 6, 6),
    "in_channels": 16,
    "vec_in_dim": 16,
    "context_in_dim": 16,
}
_STEPS = 7


def configured(preset: str, changes: dict[str, Any]) -> RunConfig:
    """Return ``preset`` as an eager training, with ``changes``."""
    base = {
        "preset": preset,
        "task": "train",
        "seed": 1,
        "logging": {"mlperf": {"division": "open"}},
    }
    config = resolve(merge(base, changes))
    return eager(config)


def host_seconds(num_nodes: int, ranks_per_node: int) -> list[float]:
    """Return the host's time of some steps of FLUX.1's blocks, made narrow, of one sample."""
    config = configured(
        "mlperf-schnell",
        {
            "model": _NARROW,
            "data": {"latent_size": 4, "text_length": 4},
            "schedule": {"global_batch_size": num_nodes * ranks_per_node},
        },
    )
    seconds = list[float]()
    with fake_world(num_nodes, ranks_per_node) as world:
        step = Step(config, world, build_model(config, world))
        for _ in range(_STEPS + 2):
            begin = time.perf_counter()
            step.take()
            seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def comparisons(presets: list[str]) -> Iterator[tuple[str, Comparison]]:
    """Yield a name and the comparison of every preset at every size, and of the variants."""
    for preset in presets:
        for nodes, ranks in SIZES:
            yield f"{preset} {nodes} x {ranks}", verify(configured(preset, {}), nodes, ranks)
    if "mlperf-schnell" in presets:
        for name, changes in _VARIANTS.items():
            config = configured("mlperf-schnell", changes)
            yield f"mlperf-schnell {name} 8 x 8", verify(config, 8, 8)


def row(name: str, found: Comparison) -> str:
    """Return a row of the table: GB of the peak, GB of the collectives, kernels, and what does not hold."""
    rows = {each.name: each for each in found.rows}
    peak = rows["peak memory"]
    assert peak.planned is not None
    assert peak.difference is not None
    traffic = [each for each in found.rows if " in " in each.name]
    content = sum(each.measured for each in traffic) / 1e9
    equal = all(each.difference == 0 for each in traffic)
    wrong = [each.name for each in found.rows if not each.holds]
    return (
        f"| {name} | {peak.planned / 1e9:.3f} | {peak.measured / 1e9:.3f} | {peak.difference:+.2%} "
        f"| {content:.3f} {'equal' if equal else 'DIFFERS'} | {rows['kernels'].measured:,} "
        f"| {', '.join(wrong) or 'holds'} |"
    )


def main() -> None:
    """Print the tables, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("presets", nargs="*", default=list(PRESETS), metavar="PRESET")
    torch.set_num_threads(1)
    presets = parser.parse_args().presets
    print("| ranks | planned GB | measured GB | | in collectives, GB | kernels | |")
    print("|---|---|---|---|---|---|---|")
    for name, found in comparisons(presets):
        print(row(name, found), flush=True)
    print("\n| ranks | host's seconds a step, median | smallest, largest |\n|---|---|---|")
    for nodes, ranks in SIZES:
        seconds = host_seconds(nodes, ranks)
        text = f"{statistics.median(seconds):.3f} | {min(seconds):.3f}, {max(seconds):.3f}"
        print(f"| {nodes * ranks} | {text} |", flush=True)


if __name__ == "__main__":
    main()
