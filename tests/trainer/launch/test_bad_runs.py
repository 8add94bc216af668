"""Runs that fail: one clear message, the documented exit code, and checkpoints are kept."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.paths import MICRO
from tests.trainer import in_process
from tests.trainer.commands import fluxtrain
from tests.trainer.outputs import losses

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import write_empty_text
from fluxtrain.errors import EXIT_DIVERGED, EXIT_STORAGE, EXIT_USAGE
from fluxtrain.launch import torchrun
from fluxtrain.runtime.safetensors import read_header
from fluxtrain.state import run_state

pytestmark = pytest.mark.slow


def run(
    tmp_path: Path, *flags: str, output: Path | None = None
) -> subprocess.CompletedProcess[str]:
    paths = ["--output", str(output or tmp_path / "run"), "--data", str(tmp_path / "data")]
    port = [] if any("metrics_port" in flag for flag in flags) else ["--logging.metrics_port=0"]
    return fluxtrain("run", str(MICRO), *paths, *port, *flags)


def write_data(
    root: Path, width: int = 16, value: float = 0.5, count: int = 32, pooled: float = 1.0
) -> None:
    """Write encoded data sets, which fit the micro preset if ``width`` is 16."""
    for part in ("train", "validation"):
        with ShardWriter(root / part, shard_size=16, dtype=torch.float32) as writer:
            for index in range(count):
                txt, vec = torch.randn(4, width), pooled * torch.randn(16)
                mean, logvar = torch.full((4, 4, 4), value), torch.full((4, 4, 4), -9.0)
                writer.add(Sample(f"key{index}", f"caption {index}", txt, vec, mean, logvar))
    write_empty_text(root / "empty.safetensors", torch.zeros(4, width), torch.zeros(16))


ENCODED = "--data.source=encoded"
Damage = Callable[[Path], object]
BAD_DATA: list[tuple[str, Damage, list[str]]] = [
    ("no folder", lambda data: shutil.rmtree(data / "train"), ["train", "dataset.json is missing"]),
    (
        "no validation set",
        lambda data: shutil.rmtree(data / "validation"),
        ["validation", "dataset.json is missing"],
    ),
    (
        "a shard is missing",
        lambda data: (data / "train" / "shard_000001.safetensors").unlink(),
        ["shard_000001.safetensors", "missing"],
    ),
    (
        "a shard is cut off",
        lambda data: os.truncate(data / "train" / "shard_000000.safetensors", 3000),
        ["shard_000000.safetensors", "cut off"],
    ),
    (
        "a shard is something else",
        lambda data: (data / "train" / "shard_000000.safetensors").write_text("hello" * 100),
        ["shard_000000.safetensors", "not a whole safetensors file"],
    ),
    (
        "the listing is torn",
        lambda data: (data / "train" / "dataset.json").write_text('{"format": 1, "sha'),
        ["dataset.json", "not the listing"],
    ),
    (
        "a shard outside the folder",
        lambda data: (data / "train" / "dataset.json").write_text(
            '{"format": 1, "shards": [{"file": "../x.safetensors", "samples": 1}]}'
        ),
        ["is outside the folder"],
    ),
    (
        "no empty prompt",
        lambda data: (data / "empty.safetensors").unlink(),
        ["empty.safetensors", "missing"],
    ),
    (
        "the wrong text encoder's width",
        lambda data: write_data(data, width=24),
        ["spec.run.model.context_in_dim: got 16", "has 24"],
    ),
]


@pytest.mark.parametrize(
    ("damage", "messages"), [row[1:] for row in BAD_DATA], ids=[r[0] for r in BAD_DATA]
)
def test_bad_data_is_named_before_anything_starts(
    tmp_path: Path, damage: Damage, messages: list[str]
) -> None:
    write_data(tmp_path / "data")
    damage(tmp_path / "data")
    done = run(tmp_path, ENCODED)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert all(message in done.stderr for message in messages), done.stderr
    paths, error = done.stderr.strip().splitlines()
    assert paths.startswith("data ")  # the resolved paths
    assert error.startswith("fluxtrain: ")
    assert not (tmp_path / "run").exists()


BAD_FLAGS = [
    (["--parallel.dp_replicate=3", "--processes=2"], "spec.run.parallel.dp_replicate: got 3"),
    (["--processes=0"], "--processes: got 0"),
    (["--nonsense"], "--nonsense: no such field"),
    (["--schedule.steps=-5"], "spec.run.schedule.steps: got -5"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_named_before_anything_starts(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    done = run(tmp_path, *flags)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, f"--logging.metrics_port={port}")
    assert done.returncode == EXIT_USAGE
    assert f"spec.run.logging.metrics_port: got {port}; cannot listen" in done.stderr


def test_an_unwritable_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    done = run(tmp_path, output=tmp_path / "file" / "run")
    assert done.returncode == EXIT_STORAGE
    assert "file/run: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_do_not_write_to_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "_LOCK_TIMEOUT_SECONDS", 0.3)
    command = ["run", str(MICRO), "--output", str(tmp_path), "--logging.metrics_port=0"]
    with torchrun.lock_output(tmp_path):
        assert main(command) == EXIT_STORAGE
    assert f"--output {tmp_path}: another run is writing there" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    flags = [ENCODED, "--checkpoint.every_steps=2", "--evaluation.every_samples=0"]
    assert run(tmp_path, *flags, "--schedule.steps=4").returncode == 0
    write_data(tmp_path / "data", value=1e30)  # finite, but its square is not
    done = run(tmp_path, *flags, "--schedule.steps=50")
    assert done.returncode == EXIT_DIVERGED, done.stderr
    assert "the training loss is" in done.stderr
    assert "the checkpoint of step 4 is kept" in done.stderr
    assert "Traceback" not in done.stderr
    newest = run_state.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert run_state.read_state(newest).step == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_a_gradient_that_is_not_finite_fails_the_run_with_a_finite_loss(
    tmp_path: Path, processes: int
) -> None:
    """Modulations start at zero, so large pooled vectors affect the second step's gradient, not its loss."""
    write_data(tmp_path / "data", pooled=1e30)
    done = run(tmp_path, ENCODED, "--checkpoint.every_steps=1", f"--processes={processes}")
    assert done.returncode == EXIT_DIVERGED, done.stderr
    assert "the gradient norm is not finite at step 2; the checkpoint of step 1 is" in done.stderr
    assert "the training loss" not in done.stderr
    assert "Traceback" not in done.stderr
    newest = run_state.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert run_state.read_state(newest).step == 1


@pytest.mark.parametrize("limit", [1e-300, 1e12])
def test_gradients_are_clipped_to_any_valid_norm(tmp_path: Path, limit: float) -> None:
    schedule, logging = {"steps": 3}, {"metrics_port": 0}
    values = {"schedule": schedule, "optim": {"max_grad_norm": limit}, "logging": logging}
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    in_process.train(resolve({"preset": "micro", **values}), paths)


def test_unreadable_samples_are_skipped_counted_and_logged(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    damage_one_latent(tmp_path / "data" / "train" / "shard_000000.safetensors")
    done = run(tmp_path, ENCODED, "--schedule.steps=4", "--data.max_bad_fraction=0.5")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "skipped an unreadable sample" in line]
    assert len(lines) == 2  # two epochs
    assert "(key 'key3')" in lines[0]
    refused = run(tmp_path, ENCODED, "--schedule.steps=40", "--data.max_bad_fraction=0.0001")
    assert refused.returncode == EXIT_USAGE
    assert "spec.run.data.max_bad_fraction" in refused.stderr


def test_fillers_are_not_counted_as_unreadable_samples(tmp_path: Path) -> None:
    """Fillers have no sample, not even the first one, which is unreadable here."""
    write_data(tmp_path / "data")
    damage_one_latent(tmp_path / "data" / "train" / "shard_000000.safetensors", row=0)
    flags = [
        ENCODED,
        "--schedule.steps=4",
        "--data.max_bad_fraction=0.5",
        "--logging.every_steps=1",
    ]
    messages, found = list[list[str]](), list[dict[int, float]]()
    for number in (1, 3, 7):
        output = tmp_path / f"run_{number}"
        done = run(tmp_path, *flags, f"--processes={number}", output=output)
        assert done.returncode == 0, done.stderr
        # ranks share one stderr, so another message may follow on the same line
        messages.append(re.findall(r"skipped an unreadable sample: .*?: not finite", done.stderr))
        found.append(losses(output))
    assert messages == [messages[0]] * 3
    assert len(messages[0]) == 2  # two epochs
    for several in found[1:]:
        assert several == pytest.approx(found[0], rel=1e-4)


def damage_one_latent(shard: Path, row: int = 3) -> None:
    span = read_header(shard)["mean"]
    with shard.open("r+b") as file:
        file.seek(span.offset + row * span.row_bytes)
        file.write(b"\xff" * 4)  # a NaN


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_saved_checkpoints_stay_complete(
    tmp_path: Path, small_disk: Path
) -> None:
    output = small_disk / "run"
    small = ["--schedule.steps=2", "--model.depth=0", "--evaluation.every_samples=0"]
    first = run(tmp_path, *small, "--checkpoint.keep=5", output=output)
    assert first.returncode == 0, first.stderr
    more = ["--schedule.steps=60", "--checkpoint.every_steps=1", "--checkpoint.keep=50"]
    done = run(tmp_path, *small[1:], *more, output=output)
    assert done.returncode == EXIT_STORAGE, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    newest = run_state.latest(output / "checkpoints")
    assert newest is not None
    assert run_state.read_state(newest).step >= 2
