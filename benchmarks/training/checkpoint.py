"""The time that training waits for a checkpoint, compared with torch's synchronous and asynchronous saves.

One gloo rank saves the same state: the weights and AdamW's moments of a model of flux-debug's width. Beside
each save a thread sleeps for a millisecond at a time: its longest gap is how long the interpreter stood
still, and with it the training loop, whatever thread writes. The row without a save shows what other work on
the machine adds.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks.table import print_table, spread
from benchmarks.training.contender import FLUX_DEBUG
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fluxtrain import optim
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.parallel.distributed import process_group
from fluxtrain.parallel.parallelize import build_model
from fluxtrain.state.checkpoint import Checkpoints, training_state
from fluxtrain.state.folder import CheckpointFolder
from fluxtrain.state.run_state import RunState, claim

TARGET = 0.1
Save = Callable[[int], tuple[float, float]]
"""Saves step n; returns the seconds that training waited, and those until the checkpoint was complete."""

SYNCHRONOUS, TORCH, OURS = "dcp.save, synchronous", "dcp.async_save", "fluxtrain"
SAFETENSORS, NOTHING = "dcp.async_save, safetensors", "no save"
IDLE_SECONDS = 3.0


@dataclass
class Times:
    """Seconds of the saves of one contender."""

    waited: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)


@contextmanager
def ticking(gaps: list[float]) -> Iterator[None]:
    """Append the longest time inside for which a thread that sleeps 1 ms at a time did not run."""
    over, longest = threading.Event(), [0.0]

    def tick() -> None:
        last = perf_counter()
        while not over.is_set():
            sleep(0.001)
            last, before = perf_counter(), last
            longest[0] = max(longest[0], last - before)

    ticker = threading.Thread(target=tick)
    ticker.start()
    yield
    over.set()
    ticker.join()
    gaps.append(longest[0])


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


def asynchronous(state: dict[str, torch.Tensor], folder: Path, safetensors: bool = False) -> Save:
    """Return torch's asynchronous save with its defaults, to its own format or to safetensors."""

    def save(step: int) -> tuple[float, float]:
        begin, target = perf_counter(), folder / str(step)
        writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
        future = (
            dcp.async_save(state, storage_writer=writer)
            if safetensors
            else dcp.async_save(state, checkpoint_id=target)
        )
        waited = perf_counter() - begin
        future.result()  # type: ignore[union-attr]
        return waited, perf_counter() - begin

    return save


def nothing(step: int) -> tuple[float, float]:
    """Save nothing, for as long as a save takes."""
    sleep(IDLE_SECONDS)
    return 0.0, IDLE_SECONDS


def ours(checkpoints: Checkpoints) -> Save:
    """Return this project's save."""

    def save(step: int) -> tuple[float, float]:
        begin = perf_counter()
        checkpoints.save(RunState(step=step, samples=step))
        waited = perf_counter() - begin
        checkpoints.finish()
        return waited, perf_counter() - begin

    return save


def race(folder: Path, rounds: int) -> tuple[int, dict[str, Times]]:
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
            SAFETENSORS: asynchronous(state, folder / "asynchronous", safetensors=True),
            OURS: ours(checkpoints),
            NOTHING: nothing,
        }
        times = {name: Times() for name in savers}
        for step in range(1, rounds + 2):
            for name, save in savers.items():
                with ticking(times[name].gap):
                    waited, whole = save(step)
                times[name].waited.append(waited)
                times[name].whole.append(whole)
                for old in ("synchronous", "asynchronous"):
                    shutil.rmtree(folder / old, ignore_errors=True)
        dist.barrier()
    return sum(tensor.nbytes for tensor in state.values()), times


def main(arguments: list[str] | None = None) -> None:
    """Save in a temporary folder and print the times."""
    parser = argparse.ArgumentParser(prog="benchmarks.training.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", help="where to write; the system's temporary folder if left out"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size, times = race(Path(folder), options.rounds)
    synchronous_wait = median(times[SYNCHRONOUS].waited[1:])
    rows = [
        [
            name,
            f"{saves.waited[0]:.2f}",
            spread(saves.waited[1:], digits=2),
            spread(saves.whole[1:], digits=2),
            f"{median(saves.waited[1:]) / synchronous_wait:.1%}",
            spread([gap * 1000 for gap in saves.gap[1:]], digits=0),
        ]
        for name, saves in times.items()
    ]
    print_table(
        f"checkpoint of {size / 1e9:.2f} GB, one rank"
        f" (target: ours waits <= {TARGET:.0%} of a synchronous save)",
        [
            "",
            "first wait, s",
            "later waits, s",
            "until whole, s",
            "of synchronous",
            "longest gap, ms",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
