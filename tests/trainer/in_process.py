"""Ranks that start without importing: a single one in the test's process, several as forks of it.

A fork inherits the encoders that are loaded. It cannot compute gradients: autograd's threads are not forked.
"""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkProcess

import torch
from tests.trainer.ranks import CPU, Run

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.errors import FluxtrainError

FORK = multiprocessing.get_context("fork")


def start(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[ForkProcess]:
    """Start all ranks of ``run`` as processes; ``ranks.output_of`` returns their output."""
    started = [
        FORK.Process(
            target=lambda rank: sys.exit(_run(run, config, paths, rank, size)), args=(rank,)
        )
        for rank in range(size)
    ]
    for process in started:
        process.start()
    return started


def finish(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[int | None]:
    """Run all ranks; return their exit codes."""
    if size == 1:
        return [_run(run, config, paths, 0, 1)]
    started = start(run, config, paths, size)
    for process in started:
        process.join(300)
    return [process.exitcode for process in started]


def _run(run: Run, config: RunConfig, paths: RunPaths, rank: int, size: int) -> int:
    paths.output.mkdir(parents=True, exist_ok=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process of several: the numbers depend on it
    try:
        with (
            (paths.output / f"rank_{rank}.txt").open("w") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            world = World(rank, rank, size, CPU)
            try:
                with world.exit_stack:
                    run(config, paths, world)
            except FluxtrainError as error:
                print(error, file=log)
                return error.exit_code
    finally:
        torch.set_num_threads(num_threads)
    return 0
