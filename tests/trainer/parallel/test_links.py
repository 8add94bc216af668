"""Real processes exchange data in pairs: a node with a slow or dead link ends the start, its partners do not.

A slow rank, or the ends of a slow link, sleep before they send. So other processes on the machine change
nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster.free_ports import free_port
from tests.trainer import ranks
from torch.distributed import ProcessGroup

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_UNFIT
from fluxtrain.parallel import preflight as check
from fluxtrain.parallel import preflight as links
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.preflight import run_preflight

FAST, SLOW, NEVER = 0.1, 1.5, 3600.0
FACTOR = 3.0


@dataclass(frozen=True)
class Slow:
    """Ranks and links whose exchanges take longer."""

    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    seconds: float = SLOW

    def replace_exchange(self) -> None:
        """Let this process exchange a small message after a sleep."""
        exchange = links.exchange
        vars(links)["_BYTES"] = {"cpu": 8}
        vars(links)["_REPEATS"] = 2

        def slowed(device: torch.device, peer: int, group: ProcessGroup) -> Callable[[], None]:
            own, run = int(os.environ["RANK"]), exchange(device, peer, group)
            is_slow = own in self.ranks or tuple(sorted((own, peer))) in self.links

            def sleep_and_run() -> None:
                time.sleep(self.seconds if is_slow else FAST)
                run()

            return sleep_and_run

        vars(links)["exchange"] = slowed


def check_rank(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    *,
    port: int,
    slow: Slow | None,
    local_size: int,
) -> None:
    ranks.set_environment(world, port)
    os.environ |= {
        "LOCAL_RANK": str(world.rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_WORLD_SIZE": str(world.size // local_size),
    }
    vars(check)["_matrix_product"] = lambda device: lambda: time.sleep(FAST)
    if slow is not None:
        slow.replace_exchange()
    with process_group() as joined:
        run_preflight(config.preflight, joined, paths.output, lambda: None)


def run(
    output: Path,
    num_nodes: int,
    slow: Slow | None,
    *,
    local_size: int = 1,
    seconds: float = 60.0,
    factor: float = FACTOR,
) -> tuple[list[int | None], str]:
    """Return the exit codes of a preflight's ranks, and what rank 0 printed."""
    paths = RunPaths(output, output, output)
    preflight = {"factor": factor, "seconds": seconds}
    config = resolve({"preset": "micro", "preflight": preflight})
    target = partial(check_rank, port=free_port(), slow=slow, local_size=local_size)
    codes = ranks.finish(target, config, paths, num_nodes * local_size)
    return codes, ranks.output_of(paths)


def only(unfit: int, size: int) -> list[int | None]:
    """The exit codes if one rank is unfit: the others lose their peer."""
    return [EXIT_UNFIT if rank == unfit else EXIT_ERROR for rank in range(size)]


@pytest.mark.parametrize(
    ("num_nodes", "slow"), [(3, 1), pytest.param(5, 4, marks=pytest.mark.slow)]
)
def test_the_node_with_the_slow_link_is_unfit(tmp_path: Path, num_nodes: int, slow: int) -> None:
    codes, said = run(tmp_path, num_nodes, Slow((slow,)))
    assert codes == only(slow, num_nodes), said
    assert f"preflight: rank {slow} on " in said
    assert said.count("is unfit") == 1
    error = ranks.output_of(RunPaths(tmp_path, tmp_path, tmp_path), slow)
    assert "is unfit: an exchange with each of " in error
    assert " times the median of all ranks (0." in error
    assert (tmp_path / ".preflight").read_text() == "1\n"


def test_of_a_node_with_two_ranks_the_one_with_the_slow_link_is_named(tmp_path: Path) -> None:
    codes, said = run(tmp_path, 3, Slow((3,)), local_size=2)
    assert codes == only(3, 6), said
    assert "is unfit: an exchange with each of 2 other nodes takes at least 1." in said


def test_two_nodes_blame_nobody(tmp_path: Path) -> None:
    codes, said = run(tmp_path, 2, Slow((1,)))
    assert codes == [0, 0]
    assert "2 nodes: exchange with another node 1." in said
    assert "with fewer than 3 nodes the slow end of a link cannot be told" in said
    assert "unfit" not in said


def test_ranks_of_one_node_exchange_nothing(tmp_path: Path) -> None:
    codes, said = run(tmp_path, 1, Slow((1,)), local_size=2)
    assert codes == [0, 0]
    assert "1 node: no links to other nodes" in said


def test_a_slow_link_between_good_nodes_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    codes, said = run(tmp_path, 3, Slow(links=((0, 2),)))
    assert codes == [0, 0, 0], said
    assert "preflight: an exchange between rank 0 on " in said
    assert "; no node is at fault for certain" in said


@pytest.mark.slow
def test_a_node_that_exchanges_with_nobody_is_unfit(tmp_path: Path) -> None:
    codes, said = run(tmp_path, 5, Slow((1,), seconds=NEVER), seconds=6.0)
    assert codes == only(1, 5), said
    assert "is unfit: no exchange with ranks of 3 other nodes ended in time" in said
    assert "all-reduce not run" in said


@pytest.mark.slow
def test_a_dead_link_names_both_ends_and_blames_none(tmp_path: Path) -> None:
    codes, said = run(tmp_path, 3, Slow(links=((1, 2),), seconds=NEVER), seconds=6.0)
    assert codes == [0, 0, 0], said
    assert "an exchange between rank 1 on " in said
    assert "did not end in time; no node is at fault for certain" in said


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_if_nobody_exchanges_with_anybody_nobody_is_blamed(tmp_path: Path, num_nodes: int) -> None:
    codes, said = run(tmp_path, num_nodes, Slow(tuple(range(3)), seconds=NEVER), seconds=6.0)
    assert codes == [0] * num_nodes, said
    assert f"{num_nodes} nodes: most ranks cannot exchange with any other node" in said


@pytest.mark.parametrize(("num_nodes", "local_size"), [(2, 1), (2, 2), (3, 1)])
def test_real_exchanges_are_timed(tmp_path: Path, num_nodes: int, local_size: int) -> None:
    codes, said = run(tmp_path, num_nodes, None, local_size=local_size, factor=100.0)
    assert codes == [0] * num_nodes * local_size, said
    assert f"{num_nodes} nodes: exchange with another node " in said
    assert "all-reduce not run" not in said
