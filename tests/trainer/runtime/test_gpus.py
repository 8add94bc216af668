"""A pod that requests GPUs trains on all of them or fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.trainer.commands import fluxtrain

from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.runtime.devices import require_gpus

FILE = """apiVersion: fluxtrain.dev/v1alpha1
kind: FluxTraining
metadata: {name: micro}
spec:
  gpusPerNode: 8
  run: {preset: micro}
"""
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(("expected", "visible"), [(0, 0), (1, 1), (8, 8), (2, 8)])
def test_enough_gpus_are_accepted(
    monkeypatch: pytest.MonkeyPatch, expected: int, visible: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    require_gpus(expected, {})


@pytest.mark.parametrize(("expected", "visible"), [(1, 0), (8, 0), (8, 7)])
def test_too_few_gpus_are_refused_with_likely_causes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: int, visible: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(
        ConfigError, match=f"spec.gpusPerNode: got {expected}; torch sees {visible}"
    ) as e:
        require_gpus(expected, {"HIP_VISIBLE_DEVICES": "0"}, tmp_path)
    assert e.value.exit_code == EXIT_USAGE
    message = str(e.value)
    for clue in ("HIP_VISIBLE_DEVICES='0'", "video and render", torch.__version__, "none of"):
        assert clue in message
    assert len(message.encode()) < 1500, "longer termination messages are truncated"


def test_device_files_are_named_with_their_access(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("kfd", "dri/renderD128", "dri/card0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("fluxtrain.runtime.devices._opens", lambda path: path.name == "kfd")
    with pytest.raises(ConfigError) as raised:
        require_gpus(1, {}, tmp_path)
    expected = f"mounts: {tmp_path}/kfd, {tmp_path}/dri/renderD128 (no access); "
    assert expected in str(raised.value)


def test_a_file_for_gpus_logs_that_it_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in NO_GPUS.items():
        monkeypatch.setitem(os.environ, name, value)
    file = tmp_path / "job.yaml"
    file.write_text(FILE)
    flags = ["--schedule.steps=1", "--logging.metrics_port=0", "--evaluation.at_end=false"]
    done = fluxtrain("run", str(file), "--output", str(tmp_path / "run"), *flags)
    assert done.returncode == EXIT_OK, done.stderr
    lines = [line for line in done.stderr.splitlines() if "spec.gpusPerNode is 8" in line]
    assert lines == [
        "fluxtrain: spec.gpusPerNode is 8, but torch sees no GPU here: this runs on the CPU"
    ]
