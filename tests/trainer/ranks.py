"""Ranks as processes that start fast: a fork server imports everything once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cluster.free_ports import free_port

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import FluxtrainError
from fluxtrain.launch.torchrun import MALLOC_SETTINGS
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.report.observer import Observer
from fluxtrain.train.loop import train

Run = Callable[[RunConfig, RunPaths, World], object]
CPU = torch.device("cpu")
CRASHED = 9
"""Exit code of a rank that `crash_after` ends."""
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.trainer.preloaded"])


def _run_rank(
    run: Run, config: RunConfig, paths: RunPaths, rank: int, size: int, port: int
) -> None:
    """Run one rank in a child process; its stdout and stderr go to a file in the output folder."""
    world = World(rank, rank, size, CPU)
    if size > 1:
        set_environment(world, port)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for loader processes, as under torchrun
    paths.output.mkdir(parents=True, exist_ok=True)
    log = paths.output / f"rank_{rank}.txt"
    redirect(log, log)
    try:
        with without_curve():
            run(config, paths, world)
    except FluxtrainError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def without_curve() -> AbstractContextManager[object]:
    """Let runs draw no loss curve, which takes a third of their time; those of `commands` draw theirs."""
    return mock.patch("fluxtrain.report.curve.save_loss_curve")


def start(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[ForkServerProcess]:
    """Start all ranks, which join one process group if they join any."""
    port = free_port()
    ranks = [
        FORKED.Process(target=_run_rank, args=(run, config, paths, rank, size, port))
        for rank in range(size)
    ]
    for process in ranks:
        start_process(process)
    return ranks


def start_process(process: ForkServerProcess) -> None:
    """Start ``process``; the first one starts the fork server, with the variables of a trainer."""
    with mock.patch.dict(os.environ, MALLOC_SETTINGS, OMP_NUM_THREADS="1"):
        process.start()


def redirect(log: Path, errors: Path) -> None:
    """Write this process's stdout to ``log`` and its stderr to ``errors``."""
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out if errors == log else os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)


def finish(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[int | None]:
    """Run all ranks; return their exit codes."""
    ranks = start(run, config, paths, size)
    for process in ranks:
        process.join(300)
    return [process.exitcode for process in ranks]


def finish_all(
    rank: Any, output: Path, size: int = 1, config: RunConfig | None = None, **options: Any
) -> RunPaths:
    """Run ``rank`` with a free port and ``options`` in all ranks, which must end well; return their paths."""
    paths = RunPaths(output, output, output)
    run = partial(rank, port=free_port(), **options)
    codes = finish(run, config or resolve({"preset": "micro"}), paths, size)
    assert codes == [0] * size, output_of(paths)
    return paths


def set_environment(world: World, port: int) -> None:
    """Set the environment variables that torchrun gives this rank."""
    os.environ |= {"RANK": f"{world.rank}", "WORLD_SIZE": f"{world.size}", "MASTER_PORT": f"{port}"}


def interpret_triton(patch: pytest.MonkeyPatch) -> None:
    """Let kernels of modules that are imported now run in Triton's interpreter, with its own functions."""
    import triton
    import triton.language

    patch.setenv("TRITON_INTERPRET", "1")
    for module in (triton.language, triton.language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                patch.setattr(module, name, triton.jit(value.fn))


def train_alone(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Train in a process group of one."""
    with process_group() as joined:
        train(config, paths, joined)


def train_together(config: RunConfig, paths: RunPaths, world: World, *, port: int = 0) -> None:
    """Train in the process group of the ranks that were started together, or with a store on ``port``."""
    if port:
        set_environment(world, port)
    with process_group() as joined:
        train(config, paths, joined)


def crash_after(step: int) -> None:
    """Let this rank end, as if killed, after optimizer step ``step``."""
    on_step_end = Observer.on_step_end

    def end(observer: Observer, done: int) -> None:
        on_step_end(observer, done)
        if done == step:
            os._exit(CRASHED)

    Observer.on_step_end = end  # type: ignore[method-assign]


def pause_after_steps(seconds: float) -> None:
    """Let this rank, and those forked from this process, sleep after each optimizer step."""
    on_step_end = Observer.on_step_end

    def end(observer: Observer, done: int) -> None:
        on_step_end(observer, done)
        time.sleep(seconds)

    Observer.on_step_end = end  # type: ignore[method-assign]


def output_of(paths: RunPaths, rank: int = 0) -> str:
    return (paths.output / f"rank_{rank}.txt").read_text()


def made_in(root: Path) -> dict[str, bytes]:
    """Return every file below ``root`` except the indices, which contain modification times."""
    files = contents(root).items()
    return {name: content for name, content in files if not name.endswith(".index.json")}


def contents(root: Path) -> dict[str, bytes]:
    """Return every file below ``root``."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
