"""Ranks that are made slow are found, and nothing else changes.

A rank is slow by much more than what other processes on the machine can cause.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import Forked, environment, run_command
from tests.trainer.outputs import losses
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fluxtrain.train.loop
from fluxtrain.contract.process import ENV_POD_UID, ENV_TERMINATION_MESSAGE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.loader import training_batches
from fluxtrain.errors import EXIT_STOPPED
from fluxtrain.model.flux import Flux
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import build_model

pytestmark = pytest.mark.slow
proof = pytest.mark.proof

SECONDS = 0.5
CHANGES: dict[str, Any] = {
    "preset": "micro",
    "schedule": {"steps": 10, "global_batch_size": 10},
    "data": {"num_workers": 0},
    "evaluation": {"every_samples": 20, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0, "straggler_factor": 1.5},
}
ENDLESS = {"steps": 10_000, "global_batch_size": 10}
Slow = dict[int, str]
"""Slow ranks, and what they are slow in."""


class Sleeper:
    """Sleeps where this rank is to be slow."""

    def __init__(self, slow: Slow, only_step: int | None) -> None:
        self._slow, self._only_step, self._num_called = slow, only_step, 0

    def sleep(self, kind: str) -> None:
        if kind == self._slow.get(int(os.environ["RANK"])):
            self._num_called += 1
            if self._only_step in (None, self._num_called):
                time.sleep(SECONDS)

    def before_forward(self, module: object, inputs: object) -> None:
        if isinstance(module, Flux) and module.training:
            self.sleep("compute")

    def after_forward(self, module: object, inputs: object, outputs: object) -> None:
        if isinstance(module, Flux) and module.training:
            self.sleep("compute at the end")

    def make_model(self, *arguments: Any, **options: Any) -> Flux:
        model = build_model(*arguments, **options)
        block = model.single_blocks[0]
        block.register_full_backward_hook(lambda *_: self.sleep("backward"))
        return model

    def late_batches(self, *arguments: Any, **options: Any) -> Iterator[object]:
        for batch in training_batches(*arguments, **options):
            self.sleep("data")
            yield batch


def make_slow(slow: Slow, only_step: int | None = None) -> None:
    """Make the ranks in ``slow`` sleep in passes, optimizer steps or before batches; in this process."""
    sleeper = Sleeper(slow, only_step)
    register_module_forward_pre_hook(sleeper.before_forward)
    register_module_forward_hook(sleeper.after_forward)
    register_optimizer_step_pre_hook(lambda *_: sleeper.sleep("optimizer"))
    vars(fluxtrain.train.loop)["training_batches"] = sleeper.late_batches
    vars(fluxtrain.train.loop)["build_model"] = sleeper.make_model


def train_slowly(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    *,
    port: int,
    slow: Slow,
    only_step: int | None = None,
) -> None:
    """Train in a process group as rank ``world.rank``; its last progress is in a file."""
    os.environ[ENV_TERMINATION_MESSAGE] = str(paths.output / f"progress_{world.rank}.json")
    os.environ[ENV_POD_UID] = f"uid-{world.rank}"
    os.environ["RANK"] = str(world.rank)
    make_slow(slow, only_step)
    ranks.train_together(config, paths, world, port=port)


def start(
    output: Path, size: int, slow: Slow, only_step: int | None = None, **changes: object
) -> list[ForkServerProcess]:
    """Start a run on ``size`` ranks."""
    run = partial(train_slowly, port=free_port(), slow=slow, only_step=only_step)
    config = resolve(merge(CHANGES, changes))
    return ranks.start(run, config, RunPaths(output, output, output), size)


def join(processes: list[ForkServerProcess]) -> list[int | None]:
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def straggler_in(output: Path) -> dict[str, Any] | None:
    """Return the straggler in the last progress of a run."""
    found: dict[str, Any] | None = json.loads((output / "progress_0.json").read_text())["straggler"]
    return found


def wait_for_line(log: Path, text: str) -> None:
    """Wait until ``log`` contains ``text``: on a busy machine more steps than needed may pass."""
    deadline = time.monotonic() + 240
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("size", "slow"),
    [
        (3, {0: "compute"}),
        (2, {1: "compute at the end"}),
        (2, {0: "data"}),
        (3, {2: "backward"}),
        (3, {1: "optimizer"}),
        pytest.param(2, {1: "compute"}, marks=proof),
        pytest.param(5, {3: "compute"}, marks=proof),
        pytest.param(3, {1: "data"}, marks=proof),
        pytest.param(2, {0: "backward"}, marks=proof),
        pytest.param(3, {0: "backward"}, marks=proof),
        pytest.param(3, {0: "optimizer"}, marks=proof),
    ],
)
def test_a_slow_rank_is_named_with_its_pod_and_the_cause(
    tmp_path: Path, size: int, slow: Slow
) -> None:
    ((rank, kind),) = slow.items()
    processes = start(tmp_path, size, slow, schedule=ENDLESS)
    try:
        wait_for_line(tmp_path / "rank_0.txt", f"straggler: rank {rank} on ")
    finally:
        for process in processes:
            process.terminate()
    assert join(processes) == [EXIT_STOPPED] * size
    found = straggler_in(tmp_path)
    assert found is not None
    cause = kind.partition(" ")[0]
    assert (found["rank"], found["pod"], found["cause"]) == (rank, f"uid-{rank}", cause)
    assert found["slowdown"] > 1.5


@pytest.mark.parametrize(
    ("size", "slow", "only_step"),
    [
        (1, {0: "compute"}, None),  # nothing to compare with
        (2, {0: "compute", 1: "compute"}, None),
        (3, {0: "backward", 1: "backward", 2: "backward"}, None),
        (3, {}, None),
        (2, {1: "compute"}, 5),  # one slow step
        pytest.param(3, {0: "data", 1: "data", 2: "data"}, None, marks=proof),
        pytest.param(3, {0: "optimizer", 1: "optimizer", 2: "optimizer"}, None, marks=proof),
        pytest.param(3, {1: "backward"}, 5, marks=proof),
        pytest.param(3, {1: "optimizer"}, 5, marks=proof),
    ],
)
def test_nobody_is_named(tmp_path: Path, size: int, slow: Slow, only_step: int | None) -> None:
    assert join(start(tmp_path, size, slow, only_step)) == [0] * size
    assert "straggler" not in (tmp_path / "rank_0.txt").read_text()


@pytest.mark.proof
def test_losses_do_not_change_and_the_search_can_be_turned_off(tmp_path: Path) -> None:
    off = {"logging": {"straggler_factor": None}}
    for output, changes in ((tmp_path / "on", {}), (tmp_path / "off", off)):
        assert join(start(output, 2, {1: "compute"}, **changes)) == [0, 0]
    assert "straggler" not in (tmp_path / "off" / "rank_0.txt").read_text()
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    assert losses(tmp_path / "on", "eval_loss") == losses(tmp_path / "off", "eval_loss")


def run_slowly(arguments: tuple[str, ...], log: Path, slow: Slow) -> None:
    """Run ``fluxtrain ARGUMENTS`` with slow ranks in this process."""
    make_slow(slow)
    run_command(arguments, environment(), log, log)


def test_torchruns_slow_rank_is_printed(tmp_path: Path) -> None:
    flags = ("--schedule.steps=10000", "--logging.every_steps=1", "--logging.metrics_port=0")
    arguments = ("run", str(MICRO), "--output", str(tmp_path / "run"), "--processes", "2")
    log = tmp_path / "log"
    process = Forked(run_slowly, (*arguments, *flags), log, {1: "compute"})
    try:
        wait_for_line(log, "straggler: rank 1 on ")
    finally:
        process.kill()
