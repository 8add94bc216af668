"""Runs a single rank in the test's process, which has imported everything; several ranks as processes.

Nothing is forked from the test's process: a fork of its threads' locks may wait forever.
"""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import torch
from tests.trainer import ranks
from tests.trainer.ranks import CPU, Run

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import FluxtrainError
from fluxtrain.parallel.distributed import World


def finish(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[int | None]:
    """Run all ranks; return their exit codes."""
    if size > 1:
        return ranks.finish(run, config, paths, size)
    return [_run(run, config, paths)]


def train(config: RunConfig, paths: RunPaths, size: int = 1, crash: int = 0) -> None:
    """Train on ``size`` ranks, which crash after step ``crash`` and must end as expected."""
    if size == 1 and not crash:
        codes = finish(ranks.train_alone, config, paths)
    else:
        codes = ranks.finish(partial(_train, crash=crash), config, paths, size)
    assert codes == [ranks.CRASHED if crash else 0] * size, ranks.output_of(paths)


def _train(config: RunConfig, paths: RunPaths, world: World, *, crash: int) -> None:
    ranks.crash_after(crash)
    ranks.train_together(config, paths, world)


def _run(run: Run, config: RunConfig, paths: RunPaths) -> int:
    paths.output.mkdir(parents=True, exist_ok=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process of several: the numbers depend on it
    try:
        with (
            (paths.output / "rank_0.txt").open("w") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            world = World(0, 0, 1, CPU)
            try:
                with world.exit_stack, ranks.without_curve():
                    run(config, paths, world)
            except FluxtrainError as error:
                print(error, file=log)
                return error.exit_code
    finally:
        torch.set_num_threads(num_threads)
    return 0
