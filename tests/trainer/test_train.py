"""The whole way: ``fluxtrain run`` under torchrun on any number of ranks, stopped, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.paths import MICRO

from fluxtrain.errors import EXIT_STOPPED

QUIET = ["--logging.metrics_port=0", "--logging.every_steps=1", "--logging.ledger=true"]
Losses = dict[int, float]


def command(output: Path, *more: str, processes: int = 1) -> list[str]:
    base = [sys.executable, "-m", "fluxtrain.cli", "run", str(MICRO)]
    return [*base, "--output", str(output), "--processes", str(processes), *QUIET, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(output: Path, *more: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(output, *more, processes=processes),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )


def finish(output: Path, *more: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    done = run(output, *more, processes=processes)
    assert done.returncode == 0, done.stderr
    return done


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
        command(output, *more, processes=processes),
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of 30 steps on one rank, which every other run is compared with."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(output, "--schedule.steps=30", "--evaluation.every_samples=160")
    return output


THIRTY = ("--schedule.steps=30", "--evaluation.every_samples=160")


@pytest.mark.parametrize("processes", [2, 3, 4, 5, 7])
def test_any_number_of_ranks_walks_the_same_trajectory(
    undisturbed: Path, tmp_path: Path, processes: int
) -> None:
    finish(tmp_path / "run", *THIRTY, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), rel=1e-4)
    assert eval_losses(tmp_path / "run") == pytest.approx(eval_losses(undisturbed), rel=1e-4)
    assert ledger(tmp_path / "run") == ledger(undisturbed)


@pytest.mark.parametrize(("batch", "processes"), [(1, 2), (2, 5)])
def test_ranks_without_a_sample_of_their_own_change_nothing(
    tmp_path: Path, batch: int, processes: int
) -> None:
    flags = (f"--schedule.global_batch_size={batch}", "--schedule.steps=8")
    finish(tmp_path / "one", *flags)
    finish(tmp_path / "many", *flags, processes=processes)
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
def test_how_the_work_is_divided_does_not_change_what_is_computed(
    undisturbed: Path, tmp_path: Path, flags: list[str], processes: int, tolerance: float
) -> None:
    finish(tmp_path / "run", *THIRTY, *flags, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), rel=tolerance, abs=0)


@pytest.mark.parametrize("later", [(1, 4), (3, 1)])
def test_two_ranks_killed_and_resumed_on_other_numbers(
    undisturbed: Path, tmp_path: Path, later: tuple[int, int]
) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY, "--checkpoint.every_steps=4")
    process = start_and_wait_for(output, 9, *cadence, processes=2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for processes, until in zip(later, (18, 30), strict=True):
        finish(output, *cadence, f"--schedule.steps={until}", processes=processes)
    assert losses(output) == pytest.approx(losses(undisturbed), rel=1e-4)
    assert ledger(output) == ledger(undisturbed)


def test_kill_9_and_the_same_command_end_at_the_same_digits(
    undisturbed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY, "--checkpoint.every_steps=3")
    process = start_and_wait_for(output, 10, *cadence)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(output, *cadence)
    assert losses(output) == losses(undisturbed)
    assert eval_losses(output) == eval_losses(undisturbed)


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_leaves_a_checkpoint_and_the_agreed_code(
    undisturbed: Path, tmp_path: Path, processes: int
) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY, "--checkpoint.every_steps=0")
    process = start_and_wait_for(output, 5, *cadence, processes=processes)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, words
    assert "the same command resumes" in words
    assert "Traceback" not in words
    reached = max(losses(output))
    finish(output, *cadence, processes=processes)
    assert reached < 30
    assert losses(output) == pytest.approx(losses(undisturbed), rel=1e-4)


def test_a_finished_run_says_so_and_more_steps_go_on(undisturbed: Path) -> None:
    again = finish(undisturbed, *THIRTY)
    assert "this run is over (success at step 30)" in again.stdout
    assert len(losses(undisturbed)) == 30


def test_another_configuration_is_not_mixed_in(undisturbed: Path) -> None:
    refused = run(undisturbed, *THIRTY[1:], "--schedule.steps=40", "--optim.learning_rate=0.5")
    assert refused.returncode == 2
    assert "spec.run.optim.learning_rate: got 0.5" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_log_on_stdout_is_whole_after_a_restart(tmp_path: Path) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY, "--checkpoint.every_steps=5")
    process = start_and_wait_for(output, 12, *cadence)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = finish(output, *cadence)
    lines = [line for line in done.stdout.splitlines() if line.startswith(":::MLLOG")]
    assert "\n".join(lines) + "\n" == (output / "mlperf.log").read_text()
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]
    assert keys.count("init_start") == keys.count("run_start") == keys.count("run_stop") == 1
