"""Weights of our checkpoints are verified before they are exported, sampled with, or trained on."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import in_process, ranks

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime import files
from fluxtrain.runtime.files import FileSums
from fluxtrain.runtime.safetensors import read_header
from fluxtrain.sample import task
from fluxtrain.state.run_state import DONE, latest, read_checksums
from fluxtrain.weights import open_weights

CHANGES: dict[str, Any] = {
    "preset": "micro",
    "schedule": {"steps": 1},
    "evaluation": {"every_samples": 1 << 20, "at_end": False},
    "sampling": {"at_end": False},
    "logging": {"metrics_port": 0},
}


def train(output: Path, size: int = 1, **changes: Any) -> list[int | None]:
    run = ranks.train_alone if size == 1 else partial(ranks.train_together, port=free_port())
    config = resolve(merge(CHANGES, changes))
    return in_process.finish(run, config, RunPaths(output, output, output), size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two ranks, whose checksums are of blocks of 1 KiB."""
    output = tmp_path_factory.mktemp("saved") / "run"
    assert train(output, 2) == [EXIT_OK] * 2
    checkpoint = latest(output / "checkpoints")
    assert checkpoint is not None
    sums = {name: FileSums(block_bytes=1 << 10) for name in read_checksums(checkpoint)}
    for name, own in sums.items():
        own.add(memoryview((checkpoint / name).read_bytes()))
    (checkpoint / DONE).write_text(files.encode(sums))
    return checkpoint


def damaged(saved: Path, folder: Path, kind: str) -> tuple[Path, str]:
    """Return a copy with a flipped byte in a large tensor of ``kind``, and the name of its file."""
    checkpoint = folder / saved.name
    shutil.copytree(saved, checkpoint)
    file = max(checkpoint.glob("*.safetensors"))
    spans = [span for name, span in read_header(file).items() if name.startswith(kind)]
    span = max(spans, key=lambda span: span.num_bytes)
    assert span.num_bytes > 1 << 12, "it fills some blocks"
    content = bytearray(file.read_bytes())
    content[span.offset + span.num_bytes // 2] ^= 1
    file.write_bytes(content)
    return checkpoint, file.name


def export(checkpoint: Path, output: Path) -> int:
    return main(["export", str(checkpoint), "--output", str(output), "--dtype", "float32"])


def test_damaged_weights_are_not_exported(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, file = damaged(saved, tmp_path, "model.")
    assert export(checkpoint, tmp_path / "out.safetensors") == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"{checkpoint}: damaged ({file}: wrong checksum of bytes " in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("*out*"))


def test_whole_weights_are_exported_whatever_the_optimizer_state_is(
    saved: Path, tmp_path: Path
) -> None:
    checkpoint, _ = damaged(saved, tmp_path, "optimizer.")
    for number, source in enumerate((saved, checkpoint)):
        assert export(source, tmp_path / f"{number}.safetensors") == EXIT_OK
    first, second = ((tmp_path / f"{n}.safetensors").read_bytes() for n in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["cut", "header", "config.json"])
def test_other_damages_are_named(saved: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / saved.name
    shutil.copytree(saved, checkpoint)
    file = min(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    if name == "cut":
        file.write_bytes(content[:-1])
    elif name == "header":
        content[100] ^= 1
        file.write_bytes(content)
    else:
        file = checkpoint / name
        file.write_text(file.read_text().replace("micro", "macro"))
    with pytest.raises(DataError, match=file.name):
        open_weights(checkpoint).verify(World.alone(), lambda: None)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_run_starts_from_damaged_weights(saved: Path, tmp_path: Path, size: int) -> None:
    checkpoint, file = damaged(saved, tmp_path, "model.")
    output = tmp_path / "run"
    assert train(output, size, initial_weights=str(checkpoint)) == [EXIT_USAGE] * size
    for rank in range(size):
        text = ranks.output_of(RunPaths(output, output, output), rank)
        assert f"damaged ({file}: wrong checksum" in text
    assert train(output, size, initial_weights=str(saved)) == [EXIT_OK] * size


def test_no_image_is_sampled_with_damaged_weights(saved: Path, tmp_path: Path) -> None:
    checkpoint, file = damaged(saved, tmp_path, "model.")
    config = resolve(merge(CHANGES, {"initial_weights": str(checkpoint)}))
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    with pytest.raises(DataError, match=f"damaged .{file}: wrong checksum"):
        task._load_model(config, paths, World.alone(), lambda: None)
    whole = resolve(merge(CHANGES, {"initial_weights": str(saved)}))
    task._load_model(whole, paths, World.alone(), lambda: None)
