"""A trainer runs on the CPUs of its GPU's NUMA node, as far as they are known and allowed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fluxtrain.runtime import devices
from fluxtrain.runtime.devices import bind_near_gpu, cpus_near, parse_cpus

ADDRESS = "0000:e5:00.0"
ALLOWED = os.sched_getaffinity(0)
FIRST = min(ALLOWED)


def write_sys(folder: Path, node: str, cpus: str | None) -> Path:
    """Write the parts of /sys that name the NUMA node of the device, and its CPUs."""
    device, nodes = folder / "bus/pci/devices" / ADDRESS, folder / "devices/system/node"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    if cpus is not None:
        (nodes / f"node{node.strip()}").mkdir(parents=True)
        (nodes / f"node{node.strip()}" / "cpulist").write_text(cpus)
    return folder


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("7", {7}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_a_list_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(
    ("node", "cpus", "near"),
    [
        ("1\n", "96-97\n", {96, 97}),
        ("-1\n", None, set()),  # a machine with one node
        ("1\n", None, set()),
        ("1\n", "", set()),  # a node with memory only
        ("?", "0", set()),
        ("1", "a-b", set()),
    ],
)
def test_the_cpus_near_a_device(
    tmp_path: Path, node: str, cpus: str | None, near: set[int]
) -> None:
    assert cpus_near(ADDRESS, write_sys(tmp_path, node, cpus)) == near


def test_an_unknown_device_has_no_cpus(tmp_path: Path) -> None:
    assert cpus_near("0000:00:00.0", write_sys(tmp_path, "0", "0")) == set()


def affinity_after(index: int) -> set[int]:
    """Return the CPUs of a new thread after it was bound; the other threads stay as they are."""

    def bind() -> set[int]:
        bind_near_gpu(index)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(bind).result()


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (f"{FIRST}", {FIRST}),
        (f"{FIRST},99999", {FIRST}),  # only some are allowed
        ("99999", ALLOWED),  # none is
        (None, ALLOWED),
    ],
)
def test_a_trainer_is_bound_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpus: str | None, expected: set[int]
) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xE5, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: gpu}.__getitem__)
    sys = write_sys(tmp_path, "1", cpus)
    monkeypatch.setattr(devices, "cpus_near", lambda address: cpus_near(address, sys))
    assert affinity_after(3) == expected
    assert os.sched_getaffinity(0) == ALLOWED


def test_nothing_is_bound_if_torch_does_not_tell_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert affinity_after(0) == ALLOWED


def test_nothing_is_bound_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert affinity_after(0) == ALLOWED
