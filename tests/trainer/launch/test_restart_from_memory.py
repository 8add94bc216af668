"""Processes that crash in the launcher continue from memory; the launcher leaves nothing there."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer.commands import Forked, Job, children, fluxtrain
from tests.trainer.outputs import losses, resumed_steps

from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE
from fluxtrain.launch.environment import emptied, local_volume
from fluxtrain.state.free_memory import SHARED_MEMORY

slow = pytest.mark.slow
STEPS, PAUSE = 40, 0.05


def arguments(output: Path, *more: str, steps: int = STEPS, port: int = 0) -> list[str]:
    flags = (
        f"--schedule.steps={steps}",
        "--checkpoint.every_steps=0",
        "--checkpoint.memory_every_steps=5",
        "--evaluation.every_samples=0",
        "--logging.every_steps=1",
        f"--logging.metrics_port={port}",
    )
    return ["run", str(MICRO), f"--output={output}", *flags, *more]


def volume_of(output: Path) -> Path:
    """Return the folder in memory of the run in ``output``."""
    digest = hashlib.sha256(os.fsencode(output)).hexdigest()[:16]
    return SHARED_MEMORY / f"fluxtrain-{os.getuid()}-{digest}"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.kill()


def start(job: Job, *more: str, steps: int = STEPS) -> Forked:
    return job.start(*arguments(job.output, *more, steps=steps), pause=PAUSE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference") / "run"
    done = fluxtrain(*arguments(output))
    assert done.returncode == EXIT_OK, done.stderr
    return output


@pytest.mark.torch_range
@slow
@pytest.mark.parametrize("processes", [1, 2, pytest.param(3, marks=pytest.mark.proof)])
def test_a_killed_process_costs_at_most_two_intervals(
    reference: Path, job: Job, processes: int
) -> None:
    run = start(job, f"--processes={processes}")
    job.wait_for_step(20)
    before = job.step()
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    job.wait_for_ends([run], EXIT_OK)
    (resumed,) = resumed_steps(job.output)
    assert before - 10 <= resumed
    assert losses(job.output) == pytest.approx(losses(reference), rel=1e-4)
    assert not volume_of(job.output).exists()


@pytest.mark.torch_range
@slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_leaves_nothing_in_memory(job: Job, signum: signal.Signals) -> None:
    run = start(job, steps=100_000)  # it must not be done before the signal
    job.wait_for_step(10)
    assert any(volume_of(job.output).iterdir())
    run.send_signal(signum)
    job.wait_for_ends([run], EXIT_STOPPED, seconds=120)
    assert not volume_of(job.output).exists()


@slow
def test_the_next_run_removes_what_a_killed_launcher_left(job: Job) -> None:
    run = start(job)
    job.wait_for_step(10)
    run.kill()
    assert any(volume_of(job.output).iterdir())
    done = fluxtrain(*arguments(job.output, steps=12))
    assert done.returncode == EXIT_OK, done.stderr
    assert "from memory" not in done.stderr, "no checkpoint, so the next command starts over"
    assert len(losses(job.output)) == 12
    assert not volume_of(job.output).exists()


@slow
def test_an_error_that_a_restart_only_repeats_ends_the_run_at_once(tmp_path: Path) -> None:
    output = tmp_path / "run"
    started = time.monotonic()
    done = fluxtrain(*arguments(output, "--data.source=encoded", port=1))
    assert done.returncode == EXIT_USAGE
    assert time.monotonic() - started < 60
    assert not volume_of(output).exists()


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    with local_volume(output, tmp_path) as volume:
        assert volume is not None
        assert volume.stat().st_mode & 0o777 == 0o700
        name = volume.name
    (tmp_path / name).symlink_to(tmp_path)  # which rmtree does not follow
    with local_volume(output, tmp_path) as volume:
        assert volume is None
    assert f"{name} cannot be created" in capsys.readouterr().err
    assert (tmp_path / name).is_symlink()


def test_what_killed_launchers_left_is_removed_and_what_others_use_is_not(tmp_path: Path) -> None:
    volumes = tmp_path / "memory"
    volumes.mkdir()
    with local_volume(tmp_path / "a", volumes) as first:
        assert first is not None
        names = [volumes / f"fluxtrain-{os.getuid()}-{n:016x}" for n in range(3)]
        for left in names[:2]:  # the launchers of these were killed
            (left / "start_000001").mkdir(parents=True)
        names[2].symlink_to(tmp_path)
        with local_volume(tmp_path / "b", volumes) as second:
            assert second is not None
            assert first.is_dir()
            assert second.is_dir()
            assert not any(left.exists() for left in names[:2])
            assert names[2].is_symlink()
    assert [path.name for path in volumes.iterdir()] == [names[2].name]


def test_without_shared_memory_there_are_no_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_volume(tmp_path, tmp_path / "nowhere") as volume:
        assert volume is None
    assert "no snapshots in memory" in capsys.readouterr().err


def test_the_volume_of_a_pod_is_emptied(tmp_path: Path) -> None:
    with emptied(tmp_path):
        (tmp_path / "start_000001").mkdir()
    assert list(tmp_path.iterdir()) == []
    with emptied(None), emptied(tmp_path / "nowhere"):
        pass
