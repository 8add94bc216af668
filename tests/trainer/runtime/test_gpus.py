"""A pod that requests GPUs trains on all of them or fails."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.commands import fluxtrain

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE, ConfigError
from fluxtrain.runtime import devices
from fluxtrain.runtime.devices import (
    GPUS,
    find_device,
    find_gpu,
    lacks_bfloat16,
    memory_of,
    missing_gpus,
    pin,
    require_gpus,
    unpin,
)

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    ("files", "hip", "cuda", "clue"),
    [
        (["dri/renderD128"], None, "13.0", None),
        (["kfd"], None, "13.0", "make setup TORCH=rocm"),
        (["kfd"], None, None, "--index-url"),
        (["kfd", "nvidia0"], None, "13.0", "make setup TORCH=rocm"),
        (["kfd"], "6.4", None, "HIP_VISIBLE_DEVICES"),
        (["nvidia0"], None, None, "make setup TORCH=cuda"),
        (["nvidia0"], "6.4", None, "make setup TORCH=cuda"),
        (["nvidia0"], None, "13.0", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_wheel_that_does_not_fit_the_machine_is_named_with_the_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: list[str],
    hip: str | None,
    cuda: str | None,
    clue: str | None,
) -> None:
    (tmp_path / "dri").mkdir()
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    reason = missing_gpus(tmp_path)
    if clue is None:
        assert reason is None
    else:
        assert reason is not None
        assert clue in reason
        assert torch.__version__ in reason


def test_a_job_for_gpus_is_refused_where_torch_cannot_use_them_unless_it_is_meant_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fluxtrain.runtime.devices.missing_gpus", lambda: "torch has no ROCm")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in NO_GPUS:
        monkeypatch.setenv(name, "0")
    file = tmp_path / "job.yaml"
    file.write_text(FILE)
    command = ["run", str(file), "--output", str(tmp_path / "run")]
    assert main(command) == EXIT_USAGE
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("spec.gpusPerNode: got 8; torch has no ROCm; --cpu runs on the CPU")
    monkeypatch.setattr("fluxtrain.cli.run.run_task", lambda *arguments: EXIT_STOPPED)
    assert main([*command, "--cpu"]) == EXIT_STOPPED, "it is started"
    assert {name: os.environ[name] for name in NO_GPUS} == NO_GPUS


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


@pytest.mark.parametrize(
    "name", ["AMD Instinct MI300X", "NVIDIA H200", "NVIDIA H100 NVL", "an unknown one"]
)
@pytest.mark.parametrize("num_bytes", [78 << 30, 206_141_652_992, 1 << 40])
def test_memory_is_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, name: str, num_bytes: int
) -> None:
    found = SimpleNamespace(name=name, total_memory=num_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert memory_of(torch.device("cuda", 1)) == num_bytes
    assert memory_of(torch.device("cpu")) is None


def test_a_plan_takes_the_memory_that_drivers_report() -> None:
    gib = {name: round(gpu.memory_bytes / 2**30) for name, gpu in GPUS.items()}
    assert (gib["MI250X"], gib["MI300X"], gib["MI325X"], gib["MI355X"]) == (64, 192, 256, 288)


class Runtime:
    """A CUDA runtime: an error of a call stays until a launch finds it."""

    def __init__(self, error: int) -> None:
        self.error, self.left = error, 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        self.left = self.error
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.left = self.error
        return self.error

    def launch(self, *arguments: object, **options: object) -> None:
        left, self.left = self.left, 0
        if left:
            raise RuntimeError(f"CUDA error {left}")


@pytest.mark.parametrize(("error", "is_pinned"), [(0, True), (2, False), (712, False)])
def test_no_later_launch_finds_the_error_of_memory_that_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, error: int, is_pinned: bool
) -> None:
    runtime, memory = Runtime(error), torch.zeros(8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(devices.torch, "ones", runtime.launch)
    assert pin(memory) is is_pinned
    runtime.launch()
    unpin(memory)
    runtime.launch()


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300A", "MI300A"),
        ("AMD Instinct MI308X", "mi308x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("AMD Radeon RX 9070 XT", "rx-9070-xt"),
        ("AMD Radeon PRO W7900 Dual Slot", "w7900"),
        ("Radeon 8060S Graphics", "strixhalo"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", " h100 "),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name_and_by_a_short_one(name: str, gpu: str) -> None:
    assert find_device(name) == find_gpu(gpu)


@pytest.mark.parametrize(
    "name",
    [
        "AMD Radeon RX 7900 XT",
        "AMD Radeon RX 9070",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
    ],
)
def test_a_slower_board_of_almost_the_same_name_is_not_known(name: str) -> None:
    assert find_device(name) is None


@pytest.mark.parametrize(
    ("kind", "has", "expected"),
    [("cpu", True, False), ("cpu", False, True), ("cpu", None, True), ("cuda", False, False)],
)
def test_a_cpu_may_lack_bfloat16(
    monkeypatch: pytest.MonkeyPatch, kind: str, has: bool | None, expected: bool
) -> None:
    """Torch without oneDNN has no such operation."""
    operations = {} if has is None else {"_is_mkldnn_bf16_supported": lambda: has}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operations))
    assert lacks_bfloat16(torch.device(kind)) is expected
