"""The time that training waits for a checkpoint, compared with torch's synchronous and asynchronous saves.

One gloo rank saves the same state: the weights and AdamW's moments of a model of flux-debug's width.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks.contender import FLUX_DEBUG
from benchmarks.table import print_table, spread

from fluxtrain import optim
from fluxtrain.checkpoint import Checkpoints, training_state
from fluxtrain.checkpoint_folder import CheckpointFolder
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.distributed import process_group
from fluxtrain.fence import claim
from fluxtrain.parallelize import build_model
from fluxtrain.run_state import RunState

TARGET = 0.1
Save = Callable[[int], tuple[float, float]]
"""Saves step n; returns the seconds that training waited, and those until the checkpoint was complete."""

SYNCHRONOUS, TORCH, OURS = "dcp.save, synchronous", "dcp.async_save", "fluxtrain"


def configuration() -> RunConfig:
    """Return the run whose state is saved."""
    model = FLUX_DEBUG.model_dump() | {"depth": 1, "depth_single_blocks": 1}
    return resolve(
        {
            "preset": "mlperf-schnell",
            "model": model,
            "precision": {"compute": "float32"},
            "logging": {"mlperf": {"division": "open"}},  # the closed division has another model
        }
    )


def synchronous(state: dict[str, torch.Tensor], folder: Path) -> Save:
    """Return torch's synchronous save."""

    def save(step: int) -> tuple[float, float]:
        begin = perf_counter()
        dcp.save(state, checkpoint_id=folder / str(step))
        seconds = perf_counter() - begin
        return seconds, seconds

    return save


def asynchronous(state: dict[str, torch.Tensor], folder: Path) -> Save:
    """Return torch's asynchronous save with its defaults."""

    def save(step: int) -> tuple[float, float]:
        begin = perf_counter()
        future = dcp.async_save(state, checkpoint_id=folder / str(step))
        waited = perf_counter() - begin
        future.result()  # type: ignore[union-attr]
        return waited, perf_counter() - begin

    return save


def ours(checkpoints: Checkpoints) -> Save:
    """Return this project's save."""

    def save(step: int) -> tuple[float, float]:
        begin = perf_counter()
        checkpoints.save(RunState(step=step, samples=step))
        waited = perf_counter() - begin
        checkpoints.finish()
        return waited, perf_counter() - begin

    return save


def race(folder: Path, rounds: int) -> tuple[int, dict[str, list[tuple[float, float]]]]:
    """Run all in turn; return the state's bytes and the times of each save."""
    config = configuration()
    with process_group() as world:
        model = build_model(config, world)
        optimizer = optim.make_optimizer(model, config.optim)
        state = training_state(model, optimizer)
        checkpoints = Checkpoints(
            CheckpointFolder(claim(folder / "ours")), state, config, is_main=True
        )
        savers = {
            SYNCHRONOUS: synchronous(state, folder / "synchronous"),
            TORCH: asynchronous(state, folder / "asynchronous"),
            OURS: ours(checkpoints),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in savers}
        for step in range(1, rounds + 2):
            for name, save in savers.items():
                times[name].append(save(step))
                for old in ("synchronous", "asynchronous"):
                    shutil.rmtree(folder / old, ignore_errors=True)
        dist.barrier()
    return sum(tensor.nbytes for tensor in state.values()), times


def main(arguments: list[str] | None = None) -> None:
    """Save in a temporary folder and print the times."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", help="where to write; the system's temporary folder if left out"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size, times = race(Path(folder), options.rounds)
    synchronous_wait = median(waited for waited, _ in times[SYNCHRONOUS][1:])
    rows = []
    for name, saves in times.items():
        waited = [seconds for seconds, _ in saves[1:]]
        rows.append(
            [
                name,
                f"{saves[0][0]:.2f}",
                spread(waited, digits=2),
                spread([seconds for _, seconds in saves[1:]], digits=2),
                f"{median(waited) / synchronous_wait:.1%}",
            ]
        )
    print_table(
        f"checkpoint of {size / 1e9:.2f} GB, one rank"
        f" (target: ours waits <= {TARGET:.0%} of a synchronous save)",
        ["", "first wait, s", "later waits, s", "until whole, s", "of synchronous"],
        rows,
    )


if __name__ == "__main__":
    main()
