"""A rank whose device is slow ends the start, a few times; the others are not at fault.

Instead of matrix products ranks sleep, so that other processes on the machine change nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cluster.free_ports import free_port
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import Forked, environment, run_command

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import PreflightConfig, RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_UNFIT
from fluxtrain.parallel import preflight
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.preflight import MAX_UNFIT, run_preflight

FAST, SLOW = 0.02, 1.0
CONFIG = PreflightConfig(factor=4.0, seconds=2.0)
ALONE = World(0, 0, 1, torch.device("cpu"))


def replace_product(slow: tuple[int, ...]) -> None:
    """Let the ranks in ``slow`` of this process and its forks take SLOW seconds, the others FAST."""

    def product(device: object) -> Callable[[], None]:
        is_slow = int(os.environ["RANK"]) in slow
        return lambda: time.sleep(SLOW if is_slow else FAST)

    vars(preflight)["_matrix_product"] = product


def check_rank(
    config: RunConfig, paths: RunPaths, world: World, *, port: int, slow: tuple[int, ...]
) -> None:
    ranks.set_environment(world, port)
    replace_product(slow)
    with process_group() as joined:
        run_preflight(config.preflight, joined, paths.output, lambda: None)


def exit_codes(output: Path, size: int, *slow: int) -> list[int | None]:
    """Return the exit codes of the ranks of a preflight."""
    paths = RunPaths(output, output, output)
    config = resolve({"preset": "micro", "preflight": CONFIG.model_dump()})
    return ranks.finish(partial(check_rank, port=free_port(), slow=slow), config, paths, size)


@pytest.mark.parametrize(("size", "slow"), [(1, 0), (2, 1), (3, 0), (5, 3)])
def test_only_the_slow_rank_is_at_fault(tmp_path: Path, size: int, slow: int) -> None:
    codes = exit_codes(tmp_path, size, slow)
    expected = [EXIT_ERROR] * size if size > 1 else [0]
    if size > 1:
        expected[slow] = EXIT_UNFIT
    assert codes == expected
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    said = ranks.output_of(paths)
    assert (f"preflight: rank {slow} on " in said) == (size > 1)
    assert ("1 rank, nothing to compare with" in said) == (size == 1)
    if size > 1:
        error = ranks.output_of(paths, slow)
        assert "is unfit: a matrix product takes 1" in error  # a second and its own
        assert "spec.run.preflight.factor is 4" in error


@pytest.mark.parametrize("slow", [(), (0, 1, 2)], ids=["none is slow", "all are"])
def test_equal_ranks_pass(tmp_path: Path, slow: tuple[int, ...]) -> None:
    assert exit_codes(tmp_path, 3, *slow) == [0, 0, 0]


def test_after_some_starts_in_a_row_the_run_goes_on_and_a_good_one_counts_anew(
    tmp_path: Path,
) -> None:
    counter = tmp_path / ".preflight"
    counter.write_text(f"{MAX_UNFIT - 1}\n")
    assert EXIT_UNFIT in exit_codes(tmp_path, 2, 1)
    for _ in range(2):
        assert exit_codes(tmp_path, 2, 1) == [0, 0]
        said = ranks.output_of(RunPaths(tmp_path, tmp_path, tmp_path))
        assert f"an unfit node at {MAX_UNFIT} starts before; training continues with it" in said
    assert exit_codes(tmp_path, 2) == [0, 0]
    assert counter.read_text() == "0\n"
    assert EXIT_UNFIT in exit_codes(tmp_path, 2, 1)


@pytest.mark.parametrize("content", ["", "three", "-1", "9" * 5000])
def test_a_damaged_counter_does_no_harm(tmp_path: Path, content: str) -> None:
    (tmp_path / ".preflight").write_text(content)
    run_preflight(PreflightConfig(seconds=0.1), ALONE, tmp_path, lambda: None)
    assert preflight._read(tmp_path / ".preflight") == 0


@pytest.mark.parametrize(
    ("limit", "seconds", "calls"),
    [(0.01, 0.1, 2), (60.0, 0.0, 21)],  # one loads kernels
    ids=["at least one is timed", "at most twenty are"],
)
def test_the_limit_of_time_bounds_the_repetitions(limit: float, seconds: float, calls: int) -> None:
    called = list[int]()

    def work() -> None:
        called.append(1)
        time.sleep(seconds)

    alive = list[int]()
    preflight._typical_seconds(work, ALONE.device, limit, lambda: alive.append(1))
    assert len(called) == calls
    assert len(alive) == calls - 1, "the watchdog sees each repetition"


class CountingWorld(World):
    """One rank that counts its all-reduces, each of which takes a tenth of a second."""

    calls: ClassVar[list[float]] = []

    def all_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.calls.append(0.1)
        time.sleep(0.1)
        return values


@pytest.mark.parametrize(("limit", "calls"), [(0.01, {2}), (0.45, {2, 3, 4, 5}), (60.0, {21})])
def test_the_limit_of_time_bounds_the_all_reduces(limit: float, calls: set[int]) -> None:
    """The first one connects the ranks; the second tells how many follow."""
    CountingWorld.calls.clear()
    world = CountingWorld(0, 0, 1, torch.device("cpu"))
    preflight._all_reduce_seconds(world, limit, lambda: None)
    assert len(CountingWorld.calls) in calls


def test_without_the_field_nothing_runs(tmp_path: Path) -> None:
    assert resolve({"preset": "micro"}).preflight is None
    run_preflight(None, ALONE, tmp_path, lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_real_matrix_products_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_preflight(PreflightConfig(seconds=0.5), ALONE, tmp_path, lambda: None)
    assert "nothing to compare with: matrix product " in capsys.readouterr().err


def run_unfit(arguments: tuple[str, ...], log: Path) -> None:
    """Run ``fluxtrain ARGUMENTS`` in this process, rank 1 of which is slow."""
    replace_product((1,))
    run_command(arguments, environment(), log, log)


@pytest.mark.torch_range
@pytest.mark.slow
def test_torchrun_ends_with_the_code_and_names_the_rank(tmp_path: Path) -> None:
    arguments: Any = ("run", str(MICRO), "--output", str(tmp_path / "run"), "--processes", "2")
    flags = ("--preflight.factor=4", "--preflight.seconds=2", "--logging.metrics_port=0")
    log = tmp_path / "log"
    process = Forked(run_unfit, (*arguments, *flags), log)
    assert process.wait(300) == EXIT_UNFIT, log.read_text()
    assert "fluxtrain: rank 1 on " in log.read_text()
    assert not (tmp_path / "run" / "checkpoints").exists()
