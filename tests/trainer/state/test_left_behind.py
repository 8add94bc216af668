"""Ranks that are frozen, or killed, at each point of a save while others continue their run.

A frozen rank continues when the others are done: it must change nothing. There is no lock, as in pods.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from tests.trainer import ranks
from tests.trainer.outputs import ledger, losses, mlperf_events

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_ERROR
from fluxtrain.parallel.distributed import World
from fluxtrain.state.run_state import latest, step_of

STEPS, KEEP = 12, 2
CONFIG = resolve(
    {
        "preset": "micro",
        "schedule": {"steps": STEPS},
        "checkpoint": {"every_steps": 3, "keep": KEEP},
        "evaluation": {"every_samples": 4 * 16, "at_end": False},
        "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
    }
)
slow = pytest.mark.slow
OBSERVER = "fluxtrain.report.observer:Observer"
FOLDER = "fluxtrain.state.folder:CheckpointFolder"
# the owner of a function of rank 0, its name, the call before which the signal comes, the checkpoint by then
POINTS: list[Any] = [
    pytest.param(OBSERVER, "open_logs", 1, 0, id="loaded", marks=slow),
    pytest.param(OBSERVER, "on_step_end", 8, 3, id="steps", marks=slow),
    pytest.param(FOLDER, "begin", 2, 3, id="before it is written", marks=slow),
    pytest.param("torch.distributed.checkpoint", "save", 2, 3, id="half written", marks=slow),
    pytest.param(FOLDER, "commit", 2, 3, id="written"),
    pytest.param("fluxtrain.state.folder", "_renamed", 2, 3, id="checked"),
    pytest.param(FOLDER, "keep_newest", 3, 9, id="committed", marks=slow),
    pytest.param("shutil", "rmtree", 1, 9, id="before it is removed", marks=slow),
]


def train_until(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    *,
    point: tuple[str, str, int],
    signum: int,
) -> None:
    """Train; before a call of a function, this process gets a signal."""
    owner, name, call = point
    target, calls = resolve_name(owner), count(1)
    function = getattr(target, name)

    def signalled(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call and world.is_main:
            os.kill(os.getpid(), signum)
        return function(*arguments, **options)

    setattr(target, name, signalled)
    ranks.train_together(config, paths, world)


def start(
    output: Path, size: int, point: tuple[str, str, int], signum: int
) -> list[ForkServerProcess]:
    """Start ranks; return when rank 0 has got the signal."""
    run = partial(train_until, point=point, signum=signum)
    processes = ranks.start(run, CONFIG, RunPaths(output, output, output), size)
    deadline = time.monotonic() + 240
    while not has_got_it(processes[0], signum):
        assert time.monotonic() < deadline, text(output)
        time.sleep(0.02)
    for process in processes[1:]:
        os.kill(process_id(process), signum)
    return processes


def has_got_it(process: ForkServerProcess, signum: int) -> bool:
    if signum == signal.SIGKILL:
        return process.exitcode == -signal.SIGKILL
    stat = Path(f"/proc/{process_id(process)}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def process_id(process: ForkServerProcess) -> int:
    assert process.pid is not None
    return process.pid


def finish(output: Path, size: int = 1) -> None:
    paths = RunPaths(output, output, output)
    codes = ranks.finish(ranks.train_together, CONFIG, paths, size)
    assert codes == [0] * size, text(output)


def text(output: Path) -> str:
    return ranks.output_of(RunPaths(output, output, output))[-3000:]


def files(output: Path) -> dict[str, bytes]:
    """Return all files but the output of the processes, which both runs write to."""
    found = ranks.contents(output).items()
    return {name: content for name, content in found if not name.startswith("rank_")}


def newest(output: Path) -> int:
    found = latest(output / "checkpoints")
    return step_of(found) if found else 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a run that was never disturbed."""
    output = tmp_path_factory.mktemp("reference") / "run"
    finish(output)
    return output


def assert_equal(output: Path, reference: Path) -> None:
    """Assert that ``output`` has all of ``reference`` once, and its checkpoints only."""
    for key in ("train_loss", "eval_loss"):
        assert losses(output, key) == pytest.approx(losses(reference, key), rel=1e-4)
    assert ledger(output) == ledger(reference)
    keys = [[event["key"] for event in mlperf_events(run)] for run in (output, reference)]
    assert [key for key in keys[0] if key != "run_resumed"] == keys[1]
    names = {path.name for path in (output / "checkpoints").iterdir()}
    assert {name for name in names if not name.startswith(".")} == {
        "step_0000000009",
        "step_0000000012",
    }


@pytest.mark.parametrize(("owner", "name", "call", "saved"), POINTS)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_frozen_ranks_that_continue_change_nothing(
    reference: Path, tmp_path: Path, owner: str, name: str, call: int, saved: int, size: int
) -> None:
    output = tmp_path / "run"
    frozen = start(output, size, (owner, name, call), signal.SIGSTOP)
    try:
        assert newest(output) >= saved
        finish(output)
        assert_equal(output, reference)
        before = files(output)
        for process in frozen:
            os.kill(process_id(process), signal.SIGCONT)
        frozen[0].join(120)
        assert frozen[0].exitcode == EXIT_ERROR, text(output)
        assert "a newer start of this run writes here" in text(output)
    finally:
        for process in frozen:
            process.kill()
            process.join()
    assert files(output) == before


@pytest.mark.parametrize(("owner", "name", "call", "saved"), POINTS)
def test_ranks_that_are_killed_leave_the_checkpoint_before(
    reference: Path, tmp_path: Path, owner: str, name: str, call: int, saved: int
) -> None:
    output = tmp_path / "run"
    start(output, 1, (owner, name, call), signal.SIGKILL)
    assert newest(output) >= saved
    finish(output)
    assert_equal(output, reference)
