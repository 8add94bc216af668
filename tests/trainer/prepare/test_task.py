"""The prepare task: the bytes that ``fluxtrain prepare`` writes, progress, SIGTERM, and errors by field."""

from __future__ import annotations

import io
import json
import re
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.trainer import in_process, ranks
from tests.trainer.prepare.raw_sets.raw_cc12m import write_raw_cc12m
from tests.trainer.prepare.raw_sets.raw_coco import CAPTIONS, write_raw_coco
from tests.trainer.ranks import made_in

from fluxtrain.cli import main
from fluxtrain.contract.process import ENV_TERMINATION_MESSAGE, RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, ConfigError
from fluxtrain.prepare.cc12m import prepare_cc12m
from fluxtrain.prepare.download import FolderSource
from fluxtrain.prepare.task import open_task, prepare
from fluxtrain.runtime import progress_bar as progress
from fluxtrain.runtime.progress_bar import ProgressBar


def run_config(**options: Any) -> dict[str, Any]:
    return {
        "preset": "mlperf-schnell-raw",
        "task": "prepare",
        "prepare": {"workers": 2, **options},
        "data": {"train": "clean", "validation": "subset"},
        "logging": {"metrics_port": 0},
    }


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data root with both raw sets."""
    root = tmp_path_factory.mktemp("data")
    write_raw_cc12m(root / "raw")
    write_raw_coco(root / "coco")
    return root


CC12M = {"samples": 0}
COCO = {"dataset": "coco", "input": "coco", "samples": 24}


@pytest.mark.parametrize(
    ("options", "output", "num_units", "inputs"),
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
    raw: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    output: str,
    num_units: int,
    inputs: str,
) -> None:
    monkeypatch.setenv(ENV_TERMINATION_MESSAGE, str(tmp_path / "message.json"))
    paths = RunPaths(tmp_path / "run", raw, raw)

    def run_task() -> dict[str, Any]:
        """Run the task; return its termination message."""
        assert in_process.finish(prepare, resolve(run_config(**options)), paths) == [0]
        content: dict[str, Any] = json.loads((tmp_path / "message.json").read_text())
        return content

    message = run_task()
    where = ["--output", str(tmp_path / "set"), "--workers", "1"]
    assert main(["prepare", *inputs.format(raw).split(), *where]) == 0
    assert made_in(raw / output) == made_in(tmp_path / "set") != {}
    assert (message["phase"], message["rank"]) == ("finish", 0)
    assert (message["step"], message["steps"]) == (num_units, num_units)
    assert message["firstStepTime"] <= message["lastStepTime"]
    if options is COCO:  # the data set is complete already
        assert run_task()["step"] == num_units


@pytest.mark.slow
def test_sigterm_stops_the_task_at_once_and_the_same_task_resumes(
    raw: Path, tmp_path: Path
) -> None:
    run = resolve(merge(run_config(**CC12M), {"data": {"train": str(tmp_path / "set")}}))
    paths = RunPaths(tmp_path / "run", raw, raw)
    (task,) = ranks.start(prepare, run, paths)
    while not list(tmp_path.glob("set.partial/work/*")):
        assert task.is_alive(), ranks.output_of(paths)
        time.sleep(0.01)
    task.terminate()
    task.join(30)
    assert task.exitcode == EXIT_STOPPED, ranks.output_of(paths)
    assert "the same command resumes" in ranks.output_of(paths)
    assert ranks.finish(prepare, run, paths) == [EXIT_OK]
    assert ranks.output_of(paths).count("samples kept") == 1
    expected = tmp_path / "uninterrupted"
    prepare_cc12m(FolderSource(raw / "raw"), expected, None, stream=io.StringIO())
    assert made_in(tmp_path / "set") == made_in(expected)


@pytest.mark.parametrize(
    ("options", "field", "message"),
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
    raw: Path, tmp_path: Path, options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        open_task(resolve(run_config(**options)), RunPaths(tmp_path, raw, raw))
    assert raised.value.path == f"spec.run.prepare.{field}"


@pytest.mark.parametrize(
    ("times", "total", "counts", "line"),
    [
        ([0, 1, 12, 12.5, 13], 2000, [500] * 3, "clean 1,000/2,000  80.0/s  12 s left\n"),
        ([0, 12, 12], 100, [120], "clean 120/100  10.0/s  0 s left\n"),  # more than was expected
    ],
)
def test_without_a_terminal_a_line_is_logged_every_ten_seconds(
    times: list[float],
    total: int,
    counts: list[int],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(times)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream, reported = io.StringIO(), list[tuple[int, int]]()
    with ProgressBar("clean", total, stream, on_progress=lambda *at: reported.append(at)) as bar:
        for count in counts:
            bar.advance(count)
    assert stream.getvalue() == line
    assert reported == [(done, total) for done in accumulate(counts)]
