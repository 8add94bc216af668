"""What ``fluxtrain run`` says at the end of a training: the files that it made, and none that it did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.cli.run import print_summary
from fluxtrain.contract.process import MLPERF_FILE
from fluxtrain.contract.run.resolve import resolve

ADAPTER = {
    "preset": "micro",
    "initial_weights": "base",
    "adapter": {},
    "adapter_file": {"name": "a"},
}


def summary(output: Path, run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    (output / MLPERF_FILE).write_text("no MLPerf line\n")
    print_summary(output, resolve(run))
    return capsys.readouterr().out


def test_an_adapter_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapters").mkdir()
    for name in ("a.safetensors", "a-000010.safetensors"):
        (tmp_path / "adapters" / name).touch()
    (tmp_path / "gallery.html").touch()
    lines = [line.split()[-1] for line in summary(tmp_path, ADAPTER, capsys).splitlines()]
    names = ["adapters/a.safetensors", "gallery.html", MLPERF_FILE]
    assert lines == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize(
    ("run", "is_checked"),
    [
        (ADAPTER, False),
        ({"preset": "micro"}, False),
        ({"preset": "openmoji"}, False),
        ({"preset": "micro", "logging": {"mlperf": {"division": "auto"}}}, False),
        ({"preset": "mlperf-schnell"}, True),
        ({"preset": "mlperf-schnell-raw", "logging": {"mlperf": {"division": "open"}}}, True),
    ],
)
def test_only_a_run_of_the_benchmark_is_checked_for_mlperf(
    run: dict[str, Any], is_checked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = summary(tmp_path, run, capsys)
    assert ("MLPerf check" in text) == is_checked
    assert str(tmp_path / MLPERF_FILE) in text


def test_a_single_evaluation_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "samples": 320, "eval_loss": 1.8259}\n')
    first = summary(tmp_path, {"preset": "micro"}, capsys).splitlines()[0]
    assert first == "evaluation loss 1.8259 (step 20)"
