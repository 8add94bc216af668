"""Hardware and software of this node, as fields of MLCommons' system description.

Read from /proc, /sys and torch. The submitter adds the other fields (cooling, networks, interconnects) when
the package is created.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

Facts = dict[str, str]  # by the names of MLCommons' system description; all values are strings

_GPU_DRIVERS = ("amdgpu", "nvidia")  # kernel modules
_PACKAGES = ("fluxtrain", "torch", "transformers", "safetensors", "numpy", "mlperf-logging")


def node_facts(ranks_per_node: int, root: Path = Path("/")) -> Facts:
    """Return the facts of this node alone, with drivers and network cards."""
    facts = machine_facts(ranks_per_node, ranks_per_node, root)
    del facts["number_of_nodes"], facts["other_software_stack"]
    drivers = {name: _read(root / f"sys/module/{name}/version").strip() for name in _GPU_DRIVERS}
    if drivers := {name: version for name, version in drivers.items() if version}:
        facts["accelerator_driver"] = ", ".join(f"{name} {drivers[name]}" for name in drivers)
    cards = Counter([*_network_cards(root), *_infiniband(root)])
    if cards:
        facts["network_cards"] = ", ".join(f"{count} x {name}" for name, count in cards.items())
    return facts


def machine_facts(num_ranks: int, ranks_per_node: int, root: Path = Path("/")) -> Facts:
    """Return the facts of this node, assuming equal nodes; ``root`` is the parent of /proc and /sys."""
    return {
        "number_of_nodes": str(-(-num_ranks // ranks_per_node)),
        **_processors(root),
        **_memory(root),
        **_accelerators(ranks_per_node),
        "framework": f"PyTorch {torch.__version__}",
        "operating_system": _operating_system(root),
        "other_software_stack": ", ".join(_software()),
    }


def node_mark(root: Path = Path("/")) -> str:
    """Return a mark of this node: that of its kernel since the last boot, in containers too."""
    boot = _read(root / "proc/sys/kernel/random/boot_id").strip() or platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def _processors(root: Path) -> Facts:
    """Return sockets, cores, threads, frequency and caches, as far as the kernel reports them."""
    records = [_pairs(text) for text in _read(root / "proc/cpuinfo").split("\n\n") if text.strip()]
    sockets = {record.get("physical id", "0") for record in records}
    cores = {(r.get("physical id", "0"), r.get("core id", str(i))) for i, r in enumerate(records)}
    facts = {
        "host_processors_per_node": str(len(sockets)),
        "host_processor_model_name": next((r.get("model name", "") for r in records), "")
        or platform.machine(),
        "host_processor_core_count": str(len(cores) // max(1, len(sockets))),
        "host_processor_vcpu_count": str(len(records) or os.cpu_count() or 1),
    }
    highest = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if highest.isdigit():
        facts["host_processor_frequency"] = f"{int(highest) / 1e6:.2f} GHz"
    if caches := ", ".join(_caches(root)):
        facts["host_processor_caches"] = caches
    return facts


def _caches(root: Path) -> Iterable[str]:
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(folder / name).strip() for name in ("level", "type", "size"))
        if level and size:
            yield f"L{level} {kind.lower()} {size}"


def _memory(root: Path) -> Facts:
    match = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    return {"host_memory_capacity": f"{int(match[1]) / 2**20:.0f} GiB"} if match else {}


def _accelerators(ranks_per_node: int) -> Facts:
    if not torch.cuda.is_available():
        return {"accelerators_per_node": "0", "accelerator_model_name": "none"}
    device = torch.cuda.get_device_properties(0)
    return {
        "accelerators_per_node": str(ranks_per_node),
        "accelerator_model_name": device.name,
        "accelerator_memory_capacity": f"{device.total_memory / 2**30:.0f} GiB",
    }


def _network_cards(root: Path) -> Iterable[str]:
    """Yield driver and speed of each network card; virtual interfaces have no device."""
    for folder in sorted((root / "sys/class/net").glob("*")):
        driver = folder / "device/driver"
        if driver.exists():
            speed = _read(folder / "speed").strip()  # in Mb/s; -1 or an error if the link is down
            rate = f"{int(speed) / 1000:g} Gb/s" if speed.isdigit() else "link down"
            yield f"{driver.resolve().name} {rate}"


def _infiniband(root: Path) -> Iterable[str]:
    """Yield kind and rate of each port of RDMA cards."""
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        kind = _read(port.parents[1] / "hca_type").strip() or port.parents[1].name.rstrip(
            "0123456789_"
        )
        rate, layer = (_read(port / name).strip() for name in ("rate", "link_layer"))
        yield f"RDMA {kind} {layer} {rate.partition(' (')[0]}".strip()


def _operating_system(root: Path) -> str:
    release = _pairs(_read(root / "etc/os-release"), "=")
    name = release.get("PRETTY_NAME", "").strip('"') or platform.system()
    return f"{name}, kernel {platform.release()}"


def _software() -> Iterable[str]:
    yield f"Python {platform.python_version()}"
    if torch.version.hip:
        yield f"ROCm {torch.version.hip}"
    elif torch.cuda.is_available():
        yield f"CUDA {torch.version.cuda}"
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:  # a base image may have it without metadata
            continue


def _pairs(text: str, mark: str = ":") -> Facts:
    split = (line.partition(mark) for line in text.splitlines() if mark in line)
    return {name.strip(): value.strip() for name, _, value in split}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
