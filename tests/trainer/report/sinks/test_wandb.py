"""Offline runs, read with the library's own reader, hold what metrics.jsonl holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from PIL import Image
from tests.trainer import ranks
from tests.trainer.report.sinks.runs import CRASH_STEP, points, train

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.parallel.distributed import World
from fluxtrain.report import sinks

pytestmark = pytest.mark.slow
OFFLINE = {"wandb": {"project": "tests", "name": "one", "mode": "offline"}}
SECRET = "0123456789abcdef0123456789abcdef01234567"


def files(output: Path) -> list[Path]:
    """Return the files of offline runs."""
    return sorted((output / "wandb").glob("offline-run-*/run-*.wandb"))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file ``path``."""
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line["history"]["item"] for line in lines if line["type"] == "history"]


def test_a_crash_neither_repeats_nor_loses_steps_and_the_run_stays_the_same(tmp_path: Path) -> None:
    train(tmp_path, OFFLINE, crash=CRASH_STEP)
    (first,) = files(tmp_path)
    train(tmp_path, OFFLINE, size=2)
    (last,) = files(tmp_path)  # with everything, so the first is gone
    assert (first != last, first.name) == (True, last.name), "the name is that of the run"
    rows = read(last)
    assert [row["_step"] for row in rows] == [16 * step for step in range(21)]
    for name, expected in points(tmp_path).items():
        found = [(row["_step"], row[name]) for row in rows if name in row]
        assert found == expected, name
    text = ranks.output_of(RunPaths(tmp_path, tmp_path, tmp_path))
    assert f"Weights & Biases: `wandb sync {last.parent}` sends" in text
    assert "wandb:" not in text, "stderr is not the library's"


def write_without_a_connection(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Write a record and an image with ``config``, first without a key, then without a server."""
    sinks.CONNECT_SECONDS = 1.0
    os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{free_port()}"
    image = paths.output / "step.png"
    Image.new("RGB", (6, 4)).save(image)
    for name, key in (("without_key", ""), ("without_server", SECRET)):
        os.environ["WANDB_API_KEY"] = key
        folder = paths.output / name
        folder.mkdir()
        sink = sinks.WandbSink(config, folder, lambda text: print(text, flush=True))
        sink.write({"step": 2, "samples": 32, "train_loss": 0.5})
        sink.show(32, image)
        sink.close()


def test_without_a_key_or_a_connection_the_run_is_written_to_files(tmp_path: Path) -> None:
    config = resolve({"preset": "micro", "logging": {"wandb": {}}})
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert ranks.finish(write_without_a_connection, config, paths) == [0], ranks.output_of(paths)
    for name in ("without_key", "without_server"):
        (path,) = files(tmp_path / name)
        (row,) = read(path)
        assert (row["_step"], row["loss/train_loss"]) == (32, 0.5)
        assert row["sample_images._type"] == "image-file"
        assert (path.parent / "files" / row["sample_images.path"]).is_file()
    text = ranks.output_of(paths)
    assert "Weights & Biases: WANDB_API_KEY is not set; `wandb sync " in text
    assert "connection refused; `wandb sync " in text
    assert not [
        name for name, content in ranks.contents(tmp_path).items() if SECRET.encode() in content
    ]
