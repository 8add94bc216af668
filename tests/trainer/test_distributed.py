"""All ranks leave the process group together."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from cluster.free_ports import free_port
from tests.trainer import ranks

from fluxtrain import distributed
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.distributed import World, process_group

SECONDS = 3.0


def slow_main_rank(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Run rank 0 longer than the timeout of collectives."""
    distributed.START_TIMEOUT = timedelta(seconds=SECONDS / 3)
    ranks.set_environment(world, port)
    with process_group() as joined:
        if joined.is_main:
            time.sleep(SECONDS)
            (paths.output / "done").touch()
    assert (paths.output / "done").exists()


def failing_main_rank(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    ranks.set_environment(world, port)
    with process_group() as joined:
        if joined.is_main:
            os._exit(9)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "output", tmp_path, tmp_path)


def test_a_rank_succeeds_only_after_all_ranks_are_done(paths: RunPaths) -> None:
    run = partial(slow_main_rank, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, size=2) == [0, 0]


def test_a_failed_rank_is_not_waited_for(paths: RunPaths) -> None:
    run = partial(failing_main_rank, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, size=2) == [9, 1]
