"""``fluxtrain doctor`` on made-up trees of /sys, /proc and /dev: each check is ok, and has its fault."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from fluxtrain.cli import main
from fluxtrain.contract.process import GPU_VARIABLES, gpu_environment
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.launch import doctor
from fluxtrain.launch.doctor import Finding, examine, render

GPU = {
    "vendor": "0x1002",
    "device": "0x74a1",
    "product_name": "AMD Instinct MI300X OAM",
    "mem_info_vram_total": "206141652992",
    "current_compute_partition": "SPX",
    "current_memory_partition": "NPS1",
    "pp_dpm_sclk": "0: 132Mhz *\n1: 2100Mhz",
    "hwmon/hwmon3/power1_cap": "750000000",
    "hwmon/hwmon3/power1_cap_default": "750000000",
}
USAGE = shutil._ntuple_diskusage(2 << 40, 1 << 40, 1 << 40)
PORT = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "Ethernet"}
CARDS = [f"sys/class/drm/renderD{128 + n}/device" for n in range(8)]
PORTS = [f"sys/class/infiniband/rdma{n}/ports/1" for n in range(8)]
MI300X = {
    **{f"{card}/{name}": text for card in CARDS for name, text in GPU.items()},
    **{f"{port}/{name}": text for port in PORTS for name, text in PORT.items()},
    **{f"dev/dri/renderD{128 + n}": "" for n in range(8)},
    "dev/kfd": "",
    "dev/infiniband/uverbs0": "",
    "dev/shm/x": "",
    "sys/module/amdgpu/version": "6.16.6",
    "proc/sys/kernel/osrelease": "6.8.0-60-generic",
    "sys/bus/pci/devices/0000:05:00.0/class": "0x120000",
    "sys/bus/pci/devices/0000:05:00.0/vendor": "0x1002",
    "sys/bus/pci/devices/0000:05:00.0/driver/bind": "",
}
H200 = {
    "proc/driver/nvidia/gpus/0000:19:00.0/information": "Model: \t NVIDIA H200\nIRQ: 12",
    "dev/nvidia0": "",
    "dev/shm/x": "",
    "sys/module/nvidia/version": "580.95.05",
}


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see eight GPUs, with ROCm, RCCL and a compiler, on a node of 2 TiB disk and no limits."""
    monkeypatch.setattr(doctor, "num_visible", lambda: 8)
    monkeypatch.setattr(doctor, "missing_compiler", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 6))
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE)
    monkeypatch.setattr(os, "access", lambda path, mode: True)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def found(root: Path, **environment: str) -> dict[str, Finding]:
    return {each.name: each for each in examine(root / "runs", environment, root)}


def test_a_laptop_without_a_gpu_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "num_visible", lambda: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE)
    here = found(tree(tmp_path, {"dev/shm/x": ""}))
    assert {each.state for each in here.values()} == {"ok"}
    assert here["GPUs"].text == "no GPU: training runs on the CPU"
    assert here["RDMA"].text == "no RDMA device: nodes exchange over TCP"
    assert here["environment"].text == "also set: nothing"
    assert torch.__version__ in here["torch"].text


def test_a_whole_node_of_mi300x_is_on_one_screen(torch_sees: None, tmp_path: Path) -> None:
    here = found(tree(tmp_path, MI300X), **gpu_environment(is_amd=True), NCCL_IB_TC="106")
    assert {each.state for each in here.values()} == {"ok"}
    texts = {name: each.text for name, each in here.items()}
    assert texts["GPUs"] == "8 × AMD Instinct MI300X OAM, 191.98 GiB, SPX/NPS1; torch sees 8"
    assert texts["kernel driver"] == "amdgpu 6.16.6; Linux 6.8.0-60-generic"
    assert texts["rights"] == "9 device files may be opened"
    assert texts["collectives"] == "RCCL 2.26.6"
    assert texts["RDMA"] == "8 × 400 Gb/sec (4X NDR), Ethernet, ACTIVE"
    assert texts["clocks and power"] == "8 × up to 2100Mhz, 750 W"
    assert texts["NCCL_PXN_DISABLE"] == "0 (MLPerf v6.0 0, Primus 1)"
    assert texts["environment"] == "also set: NCCL_IB_TC=106"
    assert "for ROCm 7.2" in texts["torch"]
    lines = render(list(here.values())).splitlines()
    assert len(lines) == len(here) <= 24
    assert max(len(line) for line in lines if " free in " not in line) <= 120


def test_gpus_of_nvidia_are_read_too(torch_sees: None, tmp_path: Path) -> None:
    here = found(tree(tmp_path, H200))
    assert here["GPUs"].text == "1 × NVIDIA H200; torch sees 8"
    assert here["kernel driver"].text.startswith("nvidia 580.95.05")
    assert here["clocks and power"].text == "by nvidia-smi -q -d CLOCK,POWER"
    assert here["TORCH_NCCL_HIGH_PRIORITY"].text.startswith("not set; fluxtrain run sets 1")
    assert "HSA_NO_SCRATCH_RECLAIM" not in here
    slices = tree(tmp_path, {"proc/driver/nvidia/capabilities/gpu0/mig/gi1/access": ""})
    assert found(slices)["GPUs"].text.startswith("1 × NVIDIA H200 in MIG")


_CARD, _PORT = CARDS[3], PORTS[5]


@pytest.mark.parametrize(
    ("files", "name", "state", "text", "step"),
    [
        (
            {f"{_CARD}/current_compute_partition": "CPX"},
            "GPUs",
            "warning",
            "1 × AMD",
            "of one kind",
        ),
        ({f"{_CARD}/mem_info_vram_total": "?"}, "GPUs", "warning", "OAM, SPX/NPS1", "of one kind"),
        (
            {
                "sys/bus/pci/devices/0000:15:00.0/class": "0x030200",
                "sys/bus/pci/devices/0000:15:00.0/vendor": "0x10de",
            },
            *("kernel driver", "missing", "no driver for the GPU at 0000:15:00.0", "load nvidia"),
        ),
        ({f"{_PORT}/state": "1: DOWN"}, "RDMA", "warning", "not active: rdma5", "check cables"),
        (
            {f"{_CARD}/hwmon/hwmon3/power1_cap": "500000000"},
            "clocks and power",
            "warning",
            "500 W",
            "cap",
        ),
        (
            {f"{_CARD}/pp_dpm_sclk": "0: 132Mhz *"},
            "clocks and power",
            "warning",
            "132Mhz",
            "clocks",
        ),
    ],
)
def test_each_file_of_the_kernel_has_a_fault_with_a_next_step(
    files: dict[str, str],
    name: str,
    state: str,
    text: str,
    step: str,
    torch_sees: None,
    tmp_path: Path,
) -> None:
    here = examine(tmp_path, {}, tree(tmp_path, MI300X | files))
    (fault,) = (each for each in here if each.state != "ok")
    assert (fault.name, fault.state) == (name, state)
    assert text in fault.text
    assert step in fault.step
    assert f"→ {fault.step}" in render(here)


def test_gpus_that_torch_does_not_see_are_missing(
    torch_sees: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "num_visible", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    fault = found(tree(tmp_path, MI300X))["GPUs"]
    assert fault.state == "missing"
    assert "install the ROCm wheel" in fault.step


def test_device_files_are_opened_and_there(
    torch_sees: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tree(tmp_path, MI300X)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "kfd")
    fault = found(root)["rights"]
    assert (fault.state, fault.text) == ("missing", f"no access to {root}/dev/kfd")
    assert f"groups {os.stat(root / 'dev/kfd').st_gid}" in fault.step
    for path in (root / "dev/kfd", *(root / "dev/dri").iterdir()):
        path.unlink()
    fault = found(root)["rights"]
    assert fault.state == "warning"
    assert "--device /dev/kfd" in fault.step


def test_limits_of_the_process_and_small_disks_are_named(
    torch_sees: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tree(tmp_path, MI300X)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64 << 10,) * 2)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: USAGE._replace(total=1 << 26, free=1 << 25)
    )
    monkeypatch.setattr(doctor, "missing_compiler", lambda device: "Triton is missing")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    faults = {name: each for name, each in found(root).items() if each.state != "ok"}
    steps = {name: each.step for name, each in faults.items()}
    assert list(faults) == ["torch", "collectives", "locked memory", "/dev/shm", "output"]
    assert "Triton is missing" in steps["torch"]
    assert "LimitMEMLOCK=infinity" in steps["locked memory"]
    assert "--shm-size" in steps["/dev/shm"]
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text("CapEff:\t000001ffffffffff\n")
    assert found(root)["locked memory"].text == "unlimited", "with the capability IPC_LOCK"
    for path in (root / "dev/infiniband/uverbs0", root / "dev/shm/x"):
        path.unlink()
        path.parent.rmdir()
    here = found(root)
    assert here["RDMA"].step.startswith("mount /dev/infiniband")
    assert here["/dev/shm"].state == "missing"
    monkeypatch.setattr(os, "access", lambda path, mode: path != root)
    assert found(root)["output"].state == "missing"


@pytest.mark.parametrize("each", GPU_VARIABLES, ids=lambda each: each.name)
def test_a_variable_that_differs_has_its_sources_and_its_effect(
    each: object, torch_sees: None, tmp_path: Path
) -> None:
    (variable,) = (known for known in GPU_VARIABLES if known is each)
    root = tree(tmp_path, MI300X)
    unset = found(root)[variable.name]
    sets = f"; fluxtrain run sets {variable.ours}" if variable.ours else ""
    assert (unset.state, unset.text) == ("ok", f"not set{sets} ({variable.sources})")
    differs = found(root, **{variable.name: "7"})[variable.name]
    assert differs.state == "warning"
    assert differs.text == f"7, ours is {variable.ours or 'nothing'} ({variable.sources})"
    assert variable.effect in differs.step


def test_the_exit_code_tells_whether_something_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = main(["doctor", "--json", f"--output={tmp_path / 'new'}"])
    states = {each["name"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert code == (EXIT_ERROR if "missing" in states.values() else EXIT_OK)
    assert list(states)[:2] == ["GPUs", "kernel driver"]
    for state, expected in (("warning", EXIT_OK), ("missing", EXIT_ERROR)):
        made = [Finding(state, "text", "step", "name")]  # type: ignore[arg-type]
        monkeypatch.setattr(doctor, "examine", lambda *args, made=made: made)
        assert main(["doctor"]) == expected
        assert capsys.readouterr().out == f"{state:7}  name  text\n{'':13}→ step\n"
