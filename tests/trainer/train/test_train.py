"""``fluxtrain run`` on any number of ranks, under torchrun or forked: stopped, killed, resumed."""

from __future__ import annotations

import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import Forked, command, environment, fluxtrain, start
from tests.trainer.outputs import ledger, losses, mlperf_events, mlperf_values

from fluxtrain.contract.process import LOSS_FILE, RunPaths
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_STOPPED
from fluxtrain.parallel.distributed import World

pytestmark = pytest.mark.slow

LOGGING = ["--logging.metrics_port=0", "--logging.every_steps=1", "--logging.ledger=true"]
THIRTY_STEPS = ("--schedule.steps=30", "--evaluation.every_samples=160")
FEW = 12
FEW_STEPS = (f"--schedule.steps={FEW}", *THIRTY_STEPS[1:], "--evaluation.at_end=false")


def arguments(output: Path, *more: str, processes: int = 1) -> list[str]:
    paths = ["--output", str(output), "--processes", str(processes)]
    return ["run", str(MICRO), *paths, *LOGGING, *more]


def finish(output: Path, *more: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    done = fluxtrain(*arguments(output, *more, processes=processes))
    assert done.returncode == 0, done.stderr
    return done


def train_and_crash(config: RunConfig, paths: RunPaths, world: World, *, crash: int) -> None:
    """Train one rank, which ends after step ``crash``."""
    ranks.crash_after(crash)
    ranks.train_together(config, paths, world)


def train(output: Path, *more: str, processes: int = 1, crash: int = 0) -> None:
    """Train on ranks that are forked from one process, without torchrun, to the end or step ``crash``."""
    run = load_job(MICRO).spec.run
    config = resolve(merge(run, parse_overrides([*LOGGING, *more])))
    paths = RunPaths(output, output, output)
    joined = partial(train_and_crash, crash=crash)
    codes = [ranks.CRASHED if crash else 0] * processes
    assert ranks.finish(joined, config, paths, processes) == codes, ranks.output_of(paths)


def start_and_wait_for(output: Path, step: int, *more: str, processes: int = 1) -> Forked:
    """Return a run that has logged ``step``."""
    log = output.with_suffix(".log")
    process = start(*arguments(output, *more, processes=processes), log=log)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = output / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {log.read_text()}")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of 30 steps of the command as users start it, the reference of every other run."""
    output = tmp_path_factory.mktemp("reference") / "run"
    subprocess.run(command(*arguments(output, *THIRTY_STEPS)), check=True, env=environment())
    return output


def assert_first_steps(output: Path, reference: Path, tolerance: float) -> None:
    """Assert that ``output`` has the losses of the first steps of ``reference``, and their samples."""
    assert len(losses(output)) == FEW
    for key in ("train_loss", "eval_loss"):
        found, expected = losses(output, key), losses(reference, key)
        assert found == pytest.approx(
            {step: expected[step] for step in found}, rel=tolerance, abs=0
        )
    assert ledger(output) == {step: ledger(reference)[step] for step in losses(output)}


WORLD_SIZES = (1, 8, 3, 7, 2, 6, 5, 1)


def test_losses_and_samples_do_not_depend_on_the_numbers_of_ranks_of_a_run(
    reference: Path, tmp_path: Path
) -> None:
    """All ranks crash one step after a checkpoint; the next ones are more or fewer."""
    output, every = tmp_path / "run", 4
    flags = (*THIRTY_STEPS, f"--checkpoint.every_steps={every}", "--checkpoint.asynchronous=false")
    for number, processes in enumerate(WORLD_SIZES, start=1):
        crash = number * every + 1 if number < len(WORLD_SIZES) else 0
        train(output, *flags, processes=processes, crash=crash)
    starts = [value["num_ranks"] for value in mlperf_values(output, "run_resumed")]
    assert tuple(starts) == WORLD_SIZES[1:]
    for key in ("train_loss", "eval_loss"):
        assert losses(output, key) == pytest.approx(losses(reference, key), rel=1e-4)
    assert ledger(output) == ledger(reference)


@pytest.mark.parametrize(("batch", "processes"), [(1, 2), (2, 5)])
def test_ranks_without_samples_change_nothing(tmp_path: Path, batch: int, processes: int) -> None:
    flags = (f"--schedule.global_batch_size={batch}", "--schedule.steps=4")
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
    train(tmp_path / "run", *FEW_STEPS, *flags, processes=processes)
    assert_first_steps(tmp_path / "run", reference, tolerance)


@pytest.mark.torch_range
def test_a_killed_and_resumed_run_has_bit_equal_losses(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=3")
    start_and_wait_for(output, 10, *cadence).kill()
    finish(output, *cadence)
    assert losses(output) == losses(reference)
    assert losses(output, "eval_loss") == losses(reference, "eval_loss")


@pytest.mark.parametrize(
    ("processes", "signum"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGINT)]
)
def test_a_stop_saves_a_checkpoint_and_returns_its_exit_code(
    reference: Path, tmp_path: Path, processes: int, signum: signal.Signals
) -> None:
    """Also if it is repeated; then all that is printed is one line."""
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=0")
    process = start_and_wait_for(output, 5, *cadence, processes=processes)
    for _ in range(2):
        process.send_signal(signum)
        time.sleep(0.05)
    code = process.wait(120)
    errors = output.with_suffix(".log").read_text()
    assert code == EXIT_STOPPED, errors
    assert "the same command resumes" in errors
    assert not any(text in errors for text in ("Traceback", "death signal"))
    reached = max(losses(output))
    finish(output, *cadence, processes=processes)
    assert reached < 30
    assert losses(output) == pytest.approx(losses(reference), rel=1e-4)


def test_a_finished_run_is_not_repeated(reference: Path) -> None:
    again = finish(reference, *THIRTY_STEPS)
    assert "this run is over (success at step 30)" in again.stdout
    assert len(losses(reference)) == 30
    assert (reference / LOSS_FILE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [30, 40])
def test_a_different_configuration_is_refused(reference: Path, steps: int) -> None:
    """Also if the run is over."""
    changes = (f"--schedule.steps={steps}", "--optim.learning_rate=0.5")
    refused = fluxtrain(*arguments(reference, *THIRTY_STEPS[1:], *changes))
    assert refused.returncode == 2
    assert "spec.run.optim.learning_rate: got 0.5" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_log_is_complete_after_a_restart_and_in_its_file_alone(tmp_path: Path) -> None:
    output = tmp_path / "run"
    cadence = (*THIRTY_STEPS, "--checkpoint.every_steps=5")
    start_and_wait_for(output, 12, *cadence).kill()
    done = finish(output, *cadence)
    assert "MLLOG" not in done.stdout + done.stderr + output.with_suffix(".log").read_text()
    keys = [event["key"] for event in mlperf_events(output)]
    assert keys.count("init_start") == keys.count("run_start") == keys.count("run_stop") == 1
