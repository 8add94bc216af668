"""A pod that asked for GPUs trains on them or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.trainer.launch.test_bad_runs import fluxtrain

from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.gpus import require_gpus

FILE = """apiVersion: fluxtrain.dev/v1alpha1
kind: FluxTraining
metadata: {name: micro}
spec:
  gpusPerNode: 8
  run: {preset: micro}
"""
BLIND = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(("wanted", "seen"), [(0, 0), (1, 1), (8, 8), (2, 8)])
def test_enough_gpus_are_enough(monkeypatch: pytest.MonkeyPatch, wanted: int, seen: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    require_gpus(wanted, {})


@pytest.mark.parametrize(("wanted", "seen"), [(1, 0), (8, 0), (8, 7)])
def test_too_few_are_refused_with_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: int, seen: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    with pytest.raises(
        ConfigError, match=f"spec.gpusPerNode: got {wanted}; torch sees {seen}"
    ) as e:
        require_gpus(wanted, {"HIP_VISIBLE_DEVICES": "0"}, tmp_path)
    assert e.value.exit_code == EXIT_USAGE
    words = str(e.value)
    for clue in ("HIP_VISIBLE_DEVICES='0'", "video and render", torch.__version__, "none of"):
        assert clue in words
    assert len(words.encode()) < 1500, "the end of a pod's message is cut"


def test_device_files_are_named_and_whether_they_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("kfd", "dri/renderD128", "dri/card0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("fluxtrain.gpus._opens", lambda path: path.name == "kfd")
    with pytest.raises(ConfigError) as raised:
        require_gpus(1, {}, tmp_path)
    found = f"brings: {tmp_path}/kfd, {tmp_path}/dri/renderD128 (no access); "
    assert found in str(raised.value)


def test_on_a_machine_without_gpus_a_file_for_gpus_says_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in BLIND.items():
        monkeypatch.setitem(os.environ, name, value)
    file = tmp_path / "job.yaml"
    file.write_text(FILE)
    flags = ["--schedule.steps=1", "--logging.metrics_port=0", "--evaluation.at_end=false"]
    done = fluxtrain("run", str(file), "--output", str(tmp_path / "run"), *flags)
    assert done.returncode == EXIT_OK, done.stderr
    told = [line for line in done.stderr.splitlines() if "spec.gpusPerNode is 8" in line]
    assert told == [
        "fluxtrain: spec.gpusPerNode is 8, but torch sees no GPU here: this runs on the CPU"
    ]
