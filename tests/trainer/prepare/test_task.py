"""The prepare task: the same bytes as ``fluxtrain prepare``, watched, stopped at once, its fields named."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.prepare.raw_cc12m import write_raw_cc12m
from tests.trainer.prepare.raw_coco import write_raw_coco
from tests.trainer.ranks import made_in

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, ConfigError
from fluxtrain.prepare.cc12m.build import prepare_cc12m
from fluxtrain.prepare.cc12m.source import FolderSource
from fluxtrain.prepare.task import open_task


def run_of(**prepare: Any) -> dict[str, Any]:
    return {
        "preset": "mlperf-schnell-raw",
        "task": "prepare",
        "prepare": {"workers": 2, **prepare},
        "data": {"train": "clean", "validation": "subset"},
        "logging": {"metrics_port": 0},
    }


def job(path: Path, run: dict[str, Any]) -> Path:
    head = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining"}
    path.write_text(json.dumps({**head, "metadata": {"name": "job"}, "spec": {"run": run}}))
    return path


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data root with both raw sets."""
    root = tmp_path_factory.mktemp("data")
    write_raw_cc12m(root / "raw")
    write_raw_coco(root / "coco")
    return root


def fluxtrain(*words: str, **more: str) -> subprocess.Popen[str]:
    """Start the command with ``more`` variables."""
    program = [sys.executable, "-m", "fluxtrain.cli", *words]
    return subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env={**os.environ, **more})


CC12M = {"samples": 0}
COCO = {"dataset": "coco", "input": "coco", "samples": 24}


@pytest.mark.parametrize(
    ("asked", "made", "num_units", "command"),
    [
        (CC12M, "clean", 4, "cc12m --input raw --samples all"),
        (
            COCO,
            "subset",
            24,
            "coco --images coco/val2014 --captions coco/annotations/captions_val2014.json --samples 24",
        ),
    ],
    ids=["cc12m", "coco"],
)
def test_the_task_makes_what_the_command_makes_and_tells_how_far_it_is(
    raw: Path, tmp_path: Path, asked: dict[str, Any], made: str, num_units: int, command: str
) -> None:
    run = run_of(**asked)
    words = tmp_path / "words.json"
    where = ["--data", str(raw), "--output", str(tmp_path / "run")]
    file = str(job(tmp_path / "job.json", run))
    task = fluxtrain("run", file, *where, FLUXTRAIN_LAST_WORDS=str(words))
    _, errors = task.communicate(timeout=120)
    assert task.returncode == EXIT_OK, errors
    subprocess.run(
        [
            *(sys.executable, "-m", "fluxtrain.cli", "prepare", *command.split()),
            *("--output", str(tmp_path / "set"), "--workers", "1"),
        ],
        check=True,
        cwd=raw,
    )
    assert made_in(raw / made) == made_in(tmp_path / "set") != {}
    said = json.loads(words.read_text())
    assert (said["phase"], said["rank"]) == ("complete", 0)
    assert (said["step"], said["steps"]) == (num_units, num_units)
    assert said["firstStepTime"] <= said["lastStepTime"]
    if made == "subset":  # again: all is there
        again = fluxtrain("run", file, *where, FLUXTRAIN_LAST_WORDS=str(words))
        _, errors = again.communicate(timeout=120)
        assert again.returncode == EXIT_OK, errors
        assert json.loads(words.read_text())["step"] == num_units


def test_a_stop_is_heeded_at_once_and_the_same_command_goes_on(raw: Path, tmp_path: Path) -> None:
    run = merge(run_of(**CC12M), {"data": {"train": str(tmp_path / "set")}})
    words = ["run", str(job(tmp_path / "job.json", run)), "--data", str(raw)]
    words += ["--output", str(tmp_path / "run")]
    task = fluxtrain(*words)
    while not list(tmp_path.glob("set.partial/work/*")):
        assert task.poll() is None, task.communicate()
        time.sleep(0.01)
    task.send_signal(signal.SIGTERM)
    _, said = task.communicate(timeout=30)
    assert task.returncode == EXIT_STOPPED, said
    assert "the same command" in said
    again = fluxtrain(*words)
    assert again.communicate(timeout=120)[1].count("samples kept") == 1
    prepare_cc12m(FolderSource(raw / "raw"), tmp_path / "alone", None, stream=io.StringIO())
    assert made_in(tmp_path / "set") == made_in(tmp_path / "alone")


@pytest.mark.parametrize(
    ("asked", "field", "given"),
    [
        ({"input": "nowhere"}, "input", "No such file"),
        ({"input": "coco"}, "input", "it holds no .tar"),
        ({"input": "hf://datasets/nothing"}, "input", "allowed: ORG/NAME"),
        ({"input": "http://127.0.0.1:9/x"}, "input", "ends in .uri or .md5"),
        ({"input": "raw", "problematic": "nowhere.txt"}, "problematic", "No such file"),
        ({"dataset": "coco", "input": "raw"}, "input", "val2014 is not there"),
    ],
)
def test_what_is_not_there_is_told_with_its_field(
    raw: Path, tmp_path: Path, asked: dict[str, Any], field: str, given: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(given)) as raised:
        open_task(resolve(run_of(**asked)), RunPaths(tmp_path, raw, raw))
    assert raised.value.path == f"spec.run.prepare.{field}"
