"""Ranks come together, and leave together."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.free_ports import free_port
from tests.trainer import ranks

from fluxtrain import distributed
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.distributed import World, process_group

SECONDS = 3.0


def be_rank(world: World, port: int) -> None:
    """Have the environment that torchrun would give."""
    os.environ |= {"RANK": f"{world.rank}", "WORLD_SIZE": f"{world.size}", "MASTER_PORT": f"{port}"}


def slow_main_rank(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Work for longer than a collective may take, on rank 0 alone."""
    distributed.START_TIMEOUT = timedelta(seconds=SECONDS / 3)
    be_rank(world, port)
    with process_group() as met:
        if met.is_main:
            time.sleep(SECONDS)
            (paths.output / "done").touch()
    assert (paths.output / "done").exists()


def failing_main_rank(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    be_rank(world, port)
    with process_group() as met:
        if met.is_main:
            os._exit(9)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "output", tmp_path, tmp_path)


def test_a_rank_that_has_left_well_means_that_all_have_done_their_work(paths: RunPaths) -> None:
    run = partial(slow_main_rank, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, size=2) == [0, 0]


def test_a_rank_that_fails_is_not_waited_for(paths: RunPaths) -> None:
    run = partial(failing_main_rank, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, size=2) == [9, 1]
