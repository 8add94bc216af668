"""The prepare task: the bytes that ``fluxtrain prepare`` writes, progress, SIGTERM, and errors by field."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.prepare.cli_process import command, require_success
from tests.trainer.prepare.raw_cc12m import write_raw_cc12m
from tests.trainer.prepare.raw_coco import CAPTIONS, write_raw_coco
from tests.trainer.ranks import made_in

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, ConfigError
from fluxtrain.prepare.cc12m.build import prepare_cc12m
from fluxtrain.prepare.cc12m.source import FolderSource
from fluxtrain.prepare.task import open_task

pytestmark = pytest.mark.slow


def run_config(**prepare: Any) -> dict[str, Any]:
    return {
        "preset": "mlperf-schnell-raw",
        "task": "prepare",
        "prepare": {"workers": 2, **prepare},
        "data": {"train": "clean", "validation": "subset"},
        "logging": {"metrics_port": 0},
    }


def write_job(path: Path, run: dict[str, Any]) -> Path:
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


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    program = command(*arguments)
    return subprocess.Popen(
        program, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


CC12M = {"samples": 0}
COCO = {"dataset": "coco", "input": "coco", "samples": 24}


@pytest.mark.parametrize(
    ("prepare", "output", "num_units", "inputs"),
    [
        (CC12M, "clean", 4, "cc12m --input {0}/raw --samples all"),
        (
            COCO,
            "subset",
            24,
            f"coco --images {{0}}/coco/val2014 --captions {{0}}/coco/{CAPTIONS} --samples 24",
        ),
    ],
    ids=["cc12m", "coco"],
)
def test_the_task_writes_what_the_command_writes_and_reports_its_progress(
    raw: Path, tmp_path: Path, prepare: dict[str, Any], output: str, num_units: int, inputs: str
) -> None:
    job = write_job(tmp_path / "job.json", run_config(**prepare))

    def run_task() -> dict[str, Any]:
        """Run the task; return its termination message."""
        message = tmp_path / "message.json"
        folders = ["--data", raw, "--output", tmp_path / "run"]
        require_success("run", job, *folders, FLUXTRAIN_LAST_WORDS=str(message))
        content: dict[str, Any] = json.loads(message.read_text())
        return content

    message = run_task()
    options = ["--output", tmp_path / "set", "--workers", 1]
    require_success("prepare", *inputs.format(raw).split(), *options)
    assert made_in(raw / output) == made_in(tmp_path / "set") != {}
    assert (message["phase"], message["rank"]) == ("complete", 0)
    assert (message["step"], message["steps"]) == (num_units, num_units)
    assert message["firstStepTime"] <= message["lastStepTime"]
    if prepare is COCO:  # the data set is complete already
        assert run_task()["step"] == num_units


def test_sigterm_stops_the_task_at_once_and_the_same_command_resumes(
    raw: Path, tmp_path: Path
) -> None:
    run = merge(run_config(**CC12M), {"data": {"train": str(tmp_path / "set")}})
    job = write_job(tmp_path / "job.json", run)
    arguments = ["run", job, "--data", raw, "--output", tmp_path / "run"]
    task = start(*arguments)
    while not list(tmp_path.glob("set.partial/work/*")):
        assert task.poll() is None, task.communicate()
        time.sleep(0.01)
    task.send_signal(signal.SIGTERM)
    _, errors = task.communicate(timeout=30)
    assert task.returncode == EXIT_STOPPED, errors
    assert "the same command" in errors
    resumed = start(*arguments)
    assert resumed.communicate(timeout=120)[1].count("samples kept") == 1
    assert resumed.returncode == EXIT_OK
    expected = tmp_path / "uninterrupted"
    prepare_cc12m(FolderSource(raw / "raw"), expected, None, stream=io.StringIO())
    assert made_in(tmp_path / "set") == made_in(expected)


@pytest.mark.parametrize(
    ("prepare", "field", "message"),
    [
        ({"input": "missing"}, "input", "No such file"),
        ({"input": "coco"}, "input", "it holds no .tar"),
        ({"input": "hf://datasets/nothing"}, "input", "allowed: ORG/NAME"),
        ({"input": "http://127.0.0.1:9/x"}, "input", "ends in .uri or .md5"),
        ({"input": "raw", "problematic": "missing.txt"}, "problematic", "No such file"),
        ({"dataset": "coco", "input": "raw"}, "input", "val2014 is missing"),
    ],
)
def test_a_missing_input_is_an_error_that_names_the_field(
    raw: Path, tmp_path: Path, prepare: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        open_task(resolve(run_config(**prepare)), RunPaths(tmp_path, raw, raw))
    assert raised.value.path == f"spec.run.prepare.{field}"
