"""Trainers on GPUs get the defaults of the contract, unless the user has set the variables."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from getpass import getuser
from pathlib import Path

import pytest
import torch
from tests.trainer.commands import Forked

from fluxtrain.contract.process import RunPaths, gpu_environment
from fluxtrain.launch import environment as module
from fluxtrain.launch import torchrun
from fluxtrain.launch.environment import describe_environment, has_capability, prepare_for_gpus

pytestmark = pytest.mark.slow

ROOT = "Name:\tpython\nCapInh:\t0\nCapEff:\t000001ffffffffff\n"
USER_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
USER = "Name:\tpython\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that torch sees GPUs of AMD, on a node without RDMA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(module, "_RDMA_DEVICES", tmp_path / "infiniband")


@pytest.mark.parametrize("is_amd", [True, False])
def test_no_default_serializes_the_launches_of_fsdp2(is_amd: bool) -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in gpu_environment(is_amd)


def test_only_gpus_of_amd_get_the_variables_of_rocm() -> None:
    other, amd = gpu_environment(is_amd=False), gpu_environment(is_amd=True)
    assert all(name.startswith("TORCH_NCCL_") for name in other)
    assert other.items() < amd.items()
    assert "HSA_NO_SCRATCH_RECLAIM" in amd


def test_defaults_are_set_and_printed_on_one_line(
    gpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"PATH": "/bin"}
    prepare_for_gpus(environment)
    assert environment == {"PATH": "/bin", **gpu_environment(is_amd=True)}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fluxtrain: environment for GPUs: HSA_NO_SCRATCH_RECLAIM=1 NCCL_")
    assert "PATH" not in line


def test_values_of_the_user_are_kept(gpus: None) -> None:
    environment = {"NCCL_CROSS_NIC": "2", "GPU_MAX_HW_QUEUES": ""}
    prepare_for_gpus(environment)
    assert (environment["NCCL_CROSS_NIC"], environment["GPU_MAX_HW_QUEUES"]) == ("2", "")
    assert environment["NCCL_PXN_DISABLE"] == "0"


def test_nothing_is_set_or_printed_without_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environment: dict[str, str] = {}
    prepare_for_gpus(environment)
    assert environment == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [("INFO", "INFO"), ("", "''"), ("1 2", "'1 2'"), ("a\nb", "'a\\nb'"), ("^=a", "'^=a'")],
)
def test_every_value_stays_on_the_line(value: str, shown: str) -> None:
    assert describe_environment({"NCCL_A": value}) == f"environment for GPUs: NCCL_A={shown}"


@pytest.mark.parametrize(
    ("status", "expected"), [(ROOT, True), (USER, False), ("", False)], ids=["root", "user", "none"]
)
def test_a_capability_counts_only_if_it_is_in_effect(status: str, expected: bool) -> None:
    assert has_capability(status, 14) is expected


LIMITS = [(1 << 16, 8 << 20), (8 << 20, 8 << 20), (0, 0)]
"""Soft and hard; the hard ones may only fall in one process."""


def raise_limits(status: Path, output: Path) -> None:
    """Raise each of the limits, and write what is returned and what holds."""
    module._PROCESS_STATUS = status
    limits_after = []
    for limits in LIMITS:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
        raised = module.raise_memlock_limit()
        limits_after.append([raised, *resource.getrlimit(resource.RLIMIT_MEMLOCK)])
    output.write_text(json.dumps(limits_after))


def test_the_limit_of_locked_memory_is_raised_as_far_as_allowed(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(USER)
    assert Forked(raise_limits, tmp_path / "status", tmp_path / "limits").wait(120) == 0
    limits = json.loads((tmp_path / "limits").read_text())
    assert limits == [[hard] * 3 for _, hard in LIMITS]


def test_rdma_devices_and_a_limit_of_locked_memory_give_a_warning(
    gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "infiniband").mkdir()
    for limit, warns in ((8 << 20, True), (None, False)):
        monkeypatch.setattr(module, "raise_memlock_limit", lambda limit=limit: limit)
        prepare_for_gpus({})
        assert ("only 8 MiB" in capsys.readouterr().err) is warns


def test_no_limit_of_locked_memory_needs_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda what: unlimited)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    assert module.raise_memlock_limit() is None


@pytest.mark.parametrize("user", [None, "somebody"])
def test_trainers_have_a_user_whose_uid_has_no_passwd_entry(
    user: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in USER_NAMES}
    monkeypatch.setattr(os, "environ", kept | ({} if user is None else {"USER": user}))
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError
    torchrun.prepare_environment(tmp_path, RunPaths(tmp_path, tmp_path, tmp_path))
    assert os.environ["USER"] == getuser() == (user or f"uid_{os.getuid()}")


def test_a_run_on_this_machine_takes_no_options_of_another_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PET_NNODES": "2:2", "PET_RUN_PATH": "1"})
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    torchrun.prepare_environment(tmp_path, paths)
    assert not [name for name in os.environ if name.startswith("PET_")]
    torchrun.prepare_environment(tmp_path, replace(paths, num_nodes=(3, 4)))
    assert os.environ["PET_NNODES"] == "3:4"


def test_an_agent_imports_no_package_that_only_ranks_need() -> None:
    packages = {"torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "matplotlib"}
    code = f"import sys, fluxtrain.launch.torchrun; print({packages!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_imported_without_the_garbage_collector_and_skipped_later(fails: bool) -> None:
    program = f"""
import gc
from fluxtrain.runtime.program import importing
passes = list[str]()
gc.callbacks.append(lambda phase, info: passes.append(phase))
try:
    with importing():
        kept = [[] for _ in range(100_000)]
        if {fails}:
            raise ModuleNotFoundError
except ModuleNotFoundError:
    pass
assert not passes
assert gc.isenabled() and gc.get_freeze_count() > 100_000
more = [[] for _ in range(100_000)]
assert passes
"""
    subprocess.run([sys.executable, "-c", program], check=True)
