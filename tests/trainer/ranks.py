"""Ranks as processes of their own that start in no time: one process imports everything, then it forks."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World, process_group
from fluxtrain.errors import FluxtrainError
from fluxtrain.train import train

Run = Callable[[RunConfig, RunPaths, World], object]
CPU = torch.device("cpu")
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "fluxtrain.launch.rank",
        "matplotlib.pyplot",
        "transformers.models.t5.modeling_t5",
        "transformers.models.clip.modeling_clip",
    ]
)


def _live(run: Run, config: RunConfig, paths: RunPaths, rank: int, size: int) -> None:
    """Run one rank; the child's whole life. What it says stays beside the output."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as under torchrun
    paths.output.mkdir(parents=True, exist_ok=True)
    log = os.open(paths.output / f"rank_{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        run(config, paths, World(rank, rank, size, CPU))
    except FluxtrainError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def start(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[ForkServerProcess]:
    """Start all ranks of ``run``."""
    ranks = [
        FORKED.Process(target=_live, args=(run, config, paths, rank, size)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


def finish(run: Run, config: RunConfig, paths: RunPaths, size: int = 1) -> list[int | None]:
    """Run all ranks to their end; return their exit codes."""
    ranks = start(run, config, paths, size)
    for process in ranks:
        process.join(300)
    return [process.exitcode for process in ranks]


def train_alone(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Train in a process group of one."""
    with process_group() as alone:
        train(config, paths, alone)


def train_together(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Train in one process group, which meets at ``port`` of this machine."""
    os.environ |= {"RANK": f"{world.rank}", "WORLD_SIZE": f"{world.size}", "MASTER_PORT": f"{port}"}
    with process_group() as met:
        train(config, paths, met)


def said(paths: RunPaths, rank: int = 0) -> str:
    """Return what ``rank`` said."""
    return (paths.output / f"rank_{rank}.txt").read_text()


def made_in(root: Path) -> dict[str, bytes]:
    """Return every file below ``root`` but the indices, which hold the tars' time of change."""
    found = contents(root).items()
    return {name: content for name, content in found if not name.endswith(".index.json")}


def contents(root: Path) -> dict[str, bytes]:
    """Return every file below ``root``."""
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}
