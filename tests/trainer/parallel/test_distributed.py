"""The groups of ranks of a mesh; all ranks leave the process group together."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster.free_ports import free_port
from tests.trainer import ranks

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.parallel import distributed
from fluxtrain.parallel.distributed import World, connects_at_start, process_group

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


def tell_groups(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Write the ranks of this rank's two groups of a mesh with a replica per node of two ranks."""
    ranks.set_environment(world, port)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}
    with process_group() as joined:
        mesh = joined.mesh(Sharding.of(config, joined.size, joined.local_size).dp_replicate)
        groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in (0, 1)]
        (paths.output / f"groups_{joined.rank}").write_text(json.dumps(groups))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "output", tmp_path, tmp_path)


def test_a_rank_succeeds_only_after_all_ranks_are_done(paths: RunPaths) -> None:
    run = partial(slow_main_rank, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, size=2) == [0, 0]


def test_a_failed_rank_is_not_waited_for(paths: RunPaths) -> None:
    run = partial(failing_main_rank, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, size=2) == [9, 1]


class _JoinedError(Exception):
    """Ends a test where the process group would be joined."""


@pytest.mark.parametrize(
    ("gpus", "size", "run", "bound"),
    [
        (True, 8, {}, torch.device("cuda", 3)),
        (True, 1, {}, None),
        (False, 8, {}, None),
        (True, 8, {"preflight": {}}, None),
        (True, 8, {"parallel": {"dp_replicate": 2}}, None),
        (True, 8, {"parallel": {"dp_replicate": "per-node"}}, None),
        (True, 8, {"task": "sample"}, None),
    ],
)
def test_the_gpus_of_a_plain_training_are_connected_when_its_ranks_join(
    monkeypatch: pytest.MonkeyPatch,
    gpus: bool,
    size: int,
    run: dict[str, Any],
    bound: torch.device | None,
) -> None:
    given = dict[str, Any]()

    def join(backend: str, **arguments: Any) -> None:
        given.update(arguments, backend=backend)
        raise _JoinedError

    for name, value in (("RANK", 0), ("LOCAL_RANK", 3), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    config = resolve({"preset": "micro", **run})
    with pytest.raises(_JoinedError), process_group(connects=connects_at_start(config)):
        pass
    assert given["device_id"] == bound
    assert given["backend"] == ("cpu:gloo,cuda:nccl" if gpus else "gloo")


def test_the_ranks_of_a_node_are_one_replica(paths: RunPaths) -> None:
    config = resolve({"preset": "micro", "parallel": {"dp_replicate": "per-node"}})
    assert ranks.finish(partial(tell_groups, port=free_port()), config, paths, size=6) == [0] * 6
    for rank in range(6):
        node, local_rank = divmod(rank, 2)
        groups = json.loads((paths.output / f"groups_{rank}").read_text())
        assert groups == [[local_rank, 2 + local_rank, 4 + local_rank], [2 * node, 2 * node + 1]]
