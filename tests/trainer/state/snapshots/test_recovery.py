"""Ranks that crash continue from memory: their node's, or the next node's if a node was replaced or lost.

A node is one or more ranks with a folder of their own. All ranks end at the same step, as if killed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.trainer import ranks
from tests.trainer.outputs import ledger, losses, resumed_steps
from tests.trainer.ranks import CRASHED
from torch import Tensor

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.parallel.distributed import World
from fluxtrain.state.free_memory import Bound
from fluxtrain.state.run_state import RunState
from fluxtrain.state.snapshots import Snapshots

pytestmark = pytest.mark.slow
proof = pytest.mark.proof

STEPS, SHORT, CRASH, INTERVAL, BATCH = 16, 8, 11, 3, 12
RUN: dict[str, Any] = {
    "preset": "micro",
    "schedule": {"steps": STEPS, "global_batch_size": BATCH},
    "checkpoint": {"every_steps": 0, "memory_every_steps": INTERVAL},
    "evaluation": {"every_samples": 4 * BATCH, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}


@dataclass(frozen=True)
class Nodes:
    """The names of the nodes, in rank order, and the ranks of each."""

    names: str
    local_size: int = 1

    @property
    def size(self) -> int:
        return len(self.names) * self.local_size


def train_on(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    *,
    nodes: Nodes,
    crash: int,
    short: str,
) -> None:
    """Train one rank of ``nodes``; all ranks end after step ``crash``, with a whole snapshot before it."""
    node, local_rank = divmod(world.rank, nodes.local_size)
    os.environ |= {"LOCAL_RANK": f"{local_rank}", "LOCAL_WORLD_SIZE": f"{nodes.local_size}"}
    os.environ |= {"GROUP_WORLD_SIZE": f"{len(nodes.names)}"}
    volume = paths.output.parent / f"memory_{nodes.names[node]}"
    volume.mkdir(exist_ok=True)
    ranks.crash_after(crash)
    if nodes.names[node] in short:
        drop_all_after(SHORT)
    ranks.train_together(config, replace(paths, snapshots=volume), world)


def drop_all_after(step: int) -> None:
    """Let this rank drop its snapshots after ``step``, as when the memory is short."""
    after_step = Snapshots.after_step

    def short_after_step(snapshots: Snapshots, run: RunState, bad_step: Tensor) -> None:
        after_step(snapshots, run, bad_step)
        if run.step == step:
            snapshots.finish()
            for _ in range(2):
                snapshots.drop_one(Bound("the memory cgroup", 10, 1, 2))

    Snapshots.after_step = short_after_step  # type: ignore[method-assign]


def run(
    output: Path, nodes: Nodes, crash: int = 0, short: str = "", **changes: Any
) -> list[int | None]:
    """Train on ``nodes``, of which memory gets ``short`` on some; return the exit codes of the ranks."""
    function = partial(train_on, nodes=nodes, crash=crash, short=short)
    config = resolve(merge(RUN, changes))
    return ranks.finish(function, config, RunPaths(output, output, output), nodes.size)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of one rank that was never disturbed."""
    output = tmp_path_factory.mktemp("reference") / "run"
    assert run(output, Nodes("a")) == [0], ranks.output_of(RunPaths(output, output, output))
    return output


def assert_equal(output: Path, reference: Path) -> None:
    """Assert that ``output`` has every step once, with the losses and samples of ``reference``."""
    for key in ("train_loss", "eval_loss"):
        assert losses(output, key) == pytest.approx(losses(reference, key), rel=1e-4)
    assert ledger(output) == ledger(reference)


def texts(output: Path, size: int) -> str:
    paths = RunPaths(output, output, output)
    return "\n".join(ranks.output_of(paths, rank)[-3000:] for rank in range(size))


FROM_MEMORY = [
    pytest.param(Nodes("a"), Nodes("a"), {}, id="one rank"),
    pytest.param(Nodes("a", 3), Nodes("a", 1), {}, id="fewer ranks than before"),
    pytest.param(Nodes("ab"), Nodes("ac"), {}, id="a replaced node"),
    pytest.param(Nodes("ab", 2), Nodes("b", 2), {}, id="a lost node of two ranks"),
    pytest.param(Nodes("ab"), Nodes("acb"), {}, id="a node more"),
    pytest.param(Nodes("ab"), Nodes("b"), {"parallel": {"dp_replicate": 2}}, id="a lost replica"),
    pytest.param(Nodes("a", 2), Nodes("a", 2), {}, id="two ranks of a node", marks=proof),
    pytest.param(Nodes("a", 3), Nodes("a", 3), {}, id="three ranks", marks=proof),
    pytest.param(Nodes("a", 2), Nodes("a", 3), {}, id="more ranks than before", marks=proof),
    pytest.param(Nodes("ab"), Nodes("ab"), {}, id="two nodes", marks=proof),
    pytest.param(Nodes("ab"), Nodes("ba"), {}, id="two nodes in another order", marks=proof),
    pytest.param(Nodes("abc"), Nodes("dbc"), {}, id="the first node is replaced", marks=proof),
    pytest.param(Nodes("ab", 2), Nodes("ac", 2), {}, id="replaced nodes of two ranks", marks=proof),
]


@pytest.mark.parametrize(("before", "after", "changes"), FROM_MEMORY)
def test_the_ranks_continue_from_memory(
    reference: Path, tmp_path: Path, before: Nodes, after: Nodes, changes: dict[str, Any]
) -> None:
    output = tmp_path / "run"
    assert run(output, before, CRASH, **changes) == [CRASHED] * before.size, texts(
        output, before.size
    )
    assert run(output, after, **changes) == [0] * after.size, texts(output, after.size)
    (step,) = resumed_steps(output, BATCH)
    assert step in (6, 9), "the newest, or the one before if the newest was not complete yet"
    printed = ranks.output_of(RunPaths(output, output, output))
    assert f"loaded step {step} from memory" in printed
    assert ("shard groups cross nodes: each node" in printed) == (len(after.names) > 1)
    assert_equal(output, reference)


@pytest.mark.parametrize(
    ("names", "short", "step"),
    [
        ("a", "a", 0),
        ("ab", "a", 6),
        pytest.param("ab", "b", 6, marks=proof),
        pytest.param("ab", "ab", 0, marks=proof),
        pytest.param("abc", "b", 6, marks=proof),
        ("abc", "bc", 0),
    ],
)
def test_what_one_node_dropped_its_partner_still_has(
    reference: Path, tmp_path: Path, names: str, short: str, step: int
) -> None:
    output, nodes = tmp_path / "run", Nodes(names)
    assert run(output, nodes, CRASH, short) == [CRASHED] * nodes.size, texts(output, nodes.size)
    assert texts(output, nodes.size).count("snapshots in memory are paused") == 1
    assert run(output, nodes) == [0] * nodes.size, texts(output, nodes.size)
    assert resumed_steps(output, BATCH) == [step]
    assert_equal(output, reference)


PER_NODE = {"parallel": {"dp_replicate": "per-node"}}
WORLDS = [Nodes("ab", 2), Nodes("acb", 2), Nodes("cb", 2), Nodes("c", 2)]
"""A node joins between the others, the first one is lost, and then all but the one that joined."""
SOURCES = [
    ("memory", {"every_steps": 0, "memory_every_steps": 2}),
    ("storage", {"every_steps": 2, "memory_every_steps": 0, "asynchronous": False}),
]


@pytest.mark.parametrize(("source", "saved"), SOURCES, ids=[row[0] for row in SOURCES])
def test_replicas_of_one_node_each_continue_on_any_number_of_nodes(
    reference: Path, tmp_path: Path, source: str, saved: dict[str, Any]
) -> None:
    output, paths = tmp_path / "run", RunPaths(tmp_path / "run", tmp_path, tmp_path)
    for nodes, crash in zip(WORLDS, (5, 9, 13, 0), strict=True):
        ended = [CRASHED if crash else 0] * nodes.size
        assert run(output, nodes, crash, checkpoint=saved, **PER_NODE) == ended, texts(output, 6)
        assert "cross nodes" not in ranks.output_of(paths)
    first, second, third = resumed_steps(output, BATCH)
    assert first in (2, 4)
    assert second in (6, 8)
    assert third in (10, 12)
    loaded = f"loaded step {third} from memory" in ranks.output_of(paths)
    assert loaded == (source == "memory")
    assert_equal(output, reference)


def test_storage_is_used_if_two_neighbouring_nodes_are_lost(
    reference: Path, tmp_path: Path
) -> None:
    output, saved = tmp_path / "run", {"checkpoint": {"every_steps": 4}}
    assert run(output, Nodes("abc"), CRASH, **saved) == [CRASHED] * 3
    assert run(output, Nodes("a"), **saved) == [0], texts(output, 1)
    assert resumed_steps(output, BATCH)[0] in (4, 8)
    assert_equal(output, reference)


def test_a_newer_checkpoint_is_preferred(reference: Path, tmp_path: Path) -> None:
    output, saved = tmp_path / "run", {"checkpoint": {"every_steps": 5, "asynchronous": False}}
    assert run(output, Nodes("a"), CRASH, **saved) == [CRASHED]
    assert run(output, Nodes("a"), **saved) == [0], texts(output, 1)
    assert resumed_steps(output, BATCH) == [10]
    assert_equal(output, reference)


def test_a_damaged_image_is_not_used(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert run(output, Nodes("a", 2), CRASH) == [CRASHED] * 2
    whole = max(resumable(tmp_path / "memory_a"))
    (damaged,) = (tmp_path / "memory_a").glob(f"start_*/rank_00001_{whole[1]}.image")
    with damaged.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    assert run(output, Nodes("a", 2)) == [0] * 2, texts(output, 2)
    assert resumed_steps(output, BATCH) == ([6] if whole[0] == 9 else [])
    assert_equal(output, reference)


def resumable(volume: Path) -> set[tuple[int, str]]:
    """Return the step and the slot of the snapshots in ``volume`` that rank 1 has."""
    records = volume.glob("start_*/rank_00001_*.json")
    return {(json.loads(path.read_text())["step"], path.stem[-1]) for path in records}


def test_ranks_that_crash_twice_before_a_snapshot_continue_from_the_same(
    reference: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    assert run(output, Nodes("ab"), CRASH) == [CRASHED] * 2
    assert run(output, Nodes("ab"), CRASH) == [CRASHED] * 2
    assert run(output, Nodes("cb")) == [0] * 2, texts(output, 2)
    first, second = resumed_steps(output, BATCH)
    assert second >= first
    assert_equal(output, reference)


def test_the_memory_of_a_deleted_output_is_not_used(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert run(output, Nodes("a"), CRASH) == [CRASHED]
    output.rename(tmp_path / "deleted")
    assert run(output, Nodes("a")) == [0], texts(output, 1)
    assert resumed_steps(output, BATCH) == []
    assert_equal(output, reference)


def test_without_an_interval_nothing_is_written(tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert run(output, Nodes("a"), checkpoint={"memory_every_steps": 0}) == [0]
    assert list((tmp_path / "memory_a").iterdir()) == []
    assert not (output / ".snapshots.json").exists()
