"""``fluxtrain run`` under torchrun on any number of ranks: stopped, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import command, environment, fluxtrain

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_STOPPED

pytestmark = pytest.mark.slow

LOGGING = ["--logging.metrics_port=0", "--logging.every_steps=1", "--logging.ledger=true"]
THIRTY_STEPS = ("--schedule.steps=30", "--evaluation.every_samples=160")
Losses = dict[int, float]


def arguments(output: Path, *more: str, processes: int = 1) -> list[str]:
    paths = ["--output", str(output), "--processes", str(processes)]
    return ["run", str(MICRO), *paths, *LOGGING, *more]


def run(output: Path, *more: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    return fluxtrain(*arguments(output, *more, processes=processes))


def finish(output: Path, *more: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    done = run(output, *more, processes=processes)
    assert done.returncode == 0, done.stderr
    return done


def train(output: Path, *more: str, processes: int = 1) -> None:
    """Train to the end on ranks that are forked from one process, without torchrun."""
    run = load_job(MICRO).spec.run
    config = resolve(merge(run, parse_overrides([*LOGGING, *more])))
    paths = RunPaths(output, output, output)
    joined = partial(ranks.train_together, port=free_port())
    assert ranks.finish(joined, config, paths, processes) == [0] * processes, ranks.output_of(paths)


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> Losses:
    return {r["step"]: r["train_loss"] for r in records(output) if "train_loss" in r}


def eval_losses(output: Path) -> Losses:
    return {r["step"]: r["eval_loss"] for r in records(output) if "eval_loss" in r}


def ledger(output: Path) -> dict[int, list[int]]:
    """Return the samples of each step, sorted, over all ranks."""
    used: dict[int, list[int]] = {}
    for path in (output / "ledger").glob("rank_*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            used.setdefault(record["step"], []).extend(record["indices"])
    return {step: sorted(indices) for step, indices in sorted(used.items())}


def start_and_wait_for(
    output: Path, step: int, *more: str, processes: int = 1
) -> subprocess.Popen[str]:
    """Return a run that has logged ``step``."""
    process = subprocess.Popen(
        command(*arguments(output, *more, processes=processes)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = output / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return process
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of 30 steps on one rank, the reference of every other run."""
    output = tmp_path_factory.mktemp("reference") / "run"
    finish(output, *THIRTY_STEPS)
    return output


@pytest.mark.parametrize("processes", [2, 3, 4, 5, 7])
def test_losses_and_samples_do_not_depend_on_the_number_of_ranks(
    reference: Path, tmp_path: Path, processes: int
) -> None:
    train(tmp_path / "run", *THIRTY_STEPS, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=1e-4)
    assert eval_losses(tmp_path / "run") == pytest.approx(eval_losses(reference), rel=1e-4)
    assert ledger(tmp_path / "run") == ledger(reference)


@pytest.mark.parametrize(("batch", "processes"), [(1, 2), (2, 5)])
def test_ranks_without_samples_change_nothing(tmp_path: Path, batch: int, processes: int) -> None:
    flags = (f"--schedule.global_batch_size={batch}", "--schedule.steps=8")
    train(tmp_path / "one", *flags)
    train(tmp_path / "many", *flags, processes=processes)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert ledger(tmp_path / "many") == ledger(tmp_path / "one")
    assert all(len(used) == batch for used in ledger(tmp_path / "many").values())


@pytest.mark.parametrize(
    ("flags", "processes", "tolerance"),
    [
        (["--parallel.micro_batch_size=4"], 1, 1e-5),
        (["--parallel.activation_checkpointing=0.5"], 1, 1e-5),
        (["--parallel.compile=true"], 1, 1e-4),
        (["--parallel.micro_batch_size=4"], 3, 1e-4),
        (["--parallel.micro_batch_size=3", "--parallel.activation_checkpointing=1.0"], 5, 1e-4),
        (["--parallel.dp_replicate=2", "--parallel.reshard_after_forward=false"], 4, 1e-4),
        (["--checkpoint.asynchronous=false", "--data.num_workers=2"], 1, 0.0),
        (["--precision.compute=bfloat16", "--precision.reduce=bfloat16"], 2, 0.02),
    ],
)
def test_losses_do_not_depend_on_parallelism_and_batching(
    reference: Path, tmp_path: Path, flags: list[str], processes: int, tolerance: float
) -> None:
    train(tmp_path / "run", *THIRTY_STEPS, *flags, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=tolerance, abs=0)


@pytest.mark.parametrize("later", [(1, 4), (3, 1)])
def test_two_ranks_are_killed_and_resumed_on_other_numbers_of_ranks(
    reference: Path, tmp_path: Path, later: tuple[int, int]
) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=4")
    process = start_and_wait_for(output, 9, *cadence, processes=2)
    kill(process)
    for processes, until in zip(later, (18, 30), strict=True):
        train(output, *cadence, f"--schedule.steps={until}", processes=processes)
    assert losses(output) == pytest.approx(losses(reference), rel=1e-4)
    assert ledger(output) == ledger(reference)


def test_a_killed_and_resumed_run_has_bit_equal_losses(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=3")
    process = start_and_wait_for(output, 10, *cadence)
    kill(process)
    finish(output, *cadence)
    assert losses(output) == losses(reference)
    assert eval_losses(output) == eval_losses(reference)


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_a_checkpoint_and_returns_its_exit_code(
    reference: Path, tmp_path: Path, processes: int
) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=0")
    process = start_and_wait_for(output, 5, *cadence, processes=processes)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, errors
    assert "the same command resumes" in errors
    assert "Traceback" not in errors
    reached = max(losses(output))
    finish(output, *cadence, processes=processes)
    assert reached < 30
    assert losses(output) == pytest.approx(losses(reference), rel=1e-4)


def test_a_finished_run_is_not_repeated(reference: Path) -> None:
    again = finish(reference, *THIRTY_STEPS)
    assert "this run is over (success at step 30)" in again.stdout
    assert len(losses(reference)) == 30


def test_a_different_configuration_is_refused(reference: Path) -> None:
    refused = run(reference, *THIRTY_STEPS[1:], "--schedule.steps=40", "--optim.learning_rate=0.5")
    assert refused.returncode == 2
    assert "spec.run.optim.learning_rate: got 0.5" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_log_on_stdout_is_complete_after_a_restart(tmp_path: Path) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=5")
    process = start_and_wait_for(output, 12, *cadence)
    kill(process)
    done = finish(output, *cadence)
    lines = [line for line in done.stdout.splitlines() if line.startswith(":::MLLOG")]
    assert "\n".join(lines) + "\n" == (output / "mlperf.log").read_text()
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]
    assert keys.count("init_start") == keys.count("run_start") == keys.count("run_stop") == 1
