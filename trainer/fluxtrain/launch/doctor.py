"""``fluxtrain doctor``: what this node has for training, what is set, what is missing, and the next step.

All but torch, the limits of this process and its variables is read below a root.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from fluxtrain.contract.process import GPU_VARIABLES, GpuVariable
from fluxtrain.launch.environment import CAP_IPC_LOCK, SHOWN, has_capability, memlock_warning
from fluxtrain.parallel.compile import missing_compiler
from fluxtrain.runtime.devices import DEVICE_FILES, missing_gpus, num_visible, torch_build
from fluxtrain.runtime.installed import packages
from fluxtrain.runtime.progress import binary

State = Literal["ok", "warning", "missing"]
_AMD = "0x1002"
_MODULES = {_AMD: "amdgpu", "0x10de": "nvidia"}
"""The kernel's modules for GPUs, by PCI's numbers of the vendors."""
_COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")
"""PCI's classes of GPUs without a display."""
_SMALL_MEMORY, _SMALL_DISK = 1 << 30, 50 << 30


@dataclass(frozen=True)
class Finding:
    """What one check found; without a name it has the check's."""

    state: State
    text: str
    step: str = ""
    """What to do next."""
    name: str = ""


@dataclass(frozen=True)
class Node:
    """A node as its kernel shows it below ``root``."""

    root: Path
    environment: Mapping[str, str]
    output: Path

    def paths(self, pattern: str) -> list[Path]:
        """Return the paths of ``pattern``, in the order of the numbers in their names."""
        return sorted(self.root.glob(pattern), key=lambda path: (len(str(path)), str(path)))

    @cached_property
    def amd_gpus(self) -> list[Path]:
        """Return the folders of AMD's GPUs, or partitions of them."""
        folders = [path / "device" for path in self.paths("sys/class/drm/renderD*")]
        return [folder for folder in folders if text_of(folder / "vendor") == _AMD]

    @cached_property
    def gpus(self) -> list[str]:
        """Return a description of each GPU."""
        cards = self.paths("proc/driver/nvidia/gpus/*/information")
        models = [line.partition(":")[2] for c in cards for line in text_of(c).splitlines()[:1]]
        split = " in MIG" if self.paths("proc/driver/nvidia/capabilities/gpu*/mig/gi*") else ""
        return [_amd_gpu(f) for f in self.amd_gpus] + [f"{m.strip()}{split}" for m in models]


def text_of(path: Path) -> str:
    """Return the content of a file of the kernel, "" if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.isdecimal() else 0


def _amd_gpu(folder: Path) -> str:
    name = text_of(folder / "product_name") or f"AMD GPU {text_of(folder / 'device')}"
    size = _number(folder / "mem_info_vram_total")
    modes = [text_of(folder / f"current_{kind}_partition") for kind in ("compute", "memory")]
    return ", ".join(
        filter(None, (name, binary(size) if size else "", "/".join(filter(None, modes))))
    )


def _counted(texts: Sequence[str]) -> str:
    return "; ".join(f"{count} × {text}" for text, count in Counter(texts).items())


def _gpus(node: Node) -> Iterator[Finding]:
    seen = f"torch sees {num_visible()}"
    reason = None if num_visible() else missing_gpus(node.root / "dev")
    if not node.gpus and not reason:
        yield Finding("ok", seen if num_visible() else "no GPU: training runs on the CPU")
    elif reason:
        yield Finding("missing", _counted(node.gpus) or "unknown to /sys and /proc", reason)
    elif len(set(node.gpus)) > 1:
        step = "the slowest or smallest decides: run on those of one kind"
        yield Finding("warning", f"{_counted(node.gpus)}; {seen}", step)
    else:
        yield Finding("ok", f"{_counted(node.gpus)}; {seen}")


def _driver(node: Node) -> Iterator[Finding]:
    for path in node.paths("sys/bus/pci/devices/*/class"):
        vendor, bus = text_of(path.with_name("vendor")), path.parent
        is_gpu = text_of(path).startswith(_COMPUTE_CLASSES) and vendor in _MODULES
        if is_gpu and not (bus / "driver").exists():
            step = f"install and load {_MODULES[vendor]}; dmesg says why it fails"
            yield Finding("missing", f"no driver for the GPU at {bus.name}", step)
    kernel = text_of(node.root / "proc/sys/kernel/osrelease")
    loaded = [path for path in node.paths("sys/module/*") if path.name in _MODULES.values()]
    versions = [f"{p.name} {text_of(p / 'version') or 'of the kernel'}" for p in loaded]
    yield Finding("ok", f"{', '.join(versions) or 'none for GPUs'}; Linux {kernel or 'unknown'}")


def _rights(node: Node) -> Iterator[Finding]:
    files = [path for pattern in DEVICE_FILES for path in node.paths(f"dev/{pattern}")]
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        groups = " ".join(sorted({str(path.stat().st_gid) for path in closed}))
        step = f"add user {os.getuid()} to groups {groups}, in pods podDefaults.supplementalGroups"
        yield Finding("missing", f"no access to {', '.join(map(str, closed))}", step)
    elif node.gpus and not files:
        step = "give the container its devices (--device /dev/kfd --device /dev/dri, or --gpus all)"
        yield Finding("warning", "no device file of the GPUs is here", step)
    else:
        yield Finding("ok", f"{len(files)} device files may be opened" if files else "none needed")


def _torch(node: Node) -> Iterator[Finding]:
    triton = next((v for name, v in packages().items() if "triton" in name), "none")
    text = f"{torch.__version__} for {torch_build()}; Triton {triton}"
    lacks = missing_compiler(torch.device("cuda")) if num_visible() else None
    step = f"{lacks}: install it, else blocks are not compiled" if lacks else ""
    yield Finding("warning" if lacks else "ok", text, step)


def _collectives(node: Node) -> Iterator[Finding]:
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        name = "RCCL" if torch.version.hip else "NCCL"
        yield Finding("ok", f"{name} {'.'.join(map(str, version))}")
    elif num_visible() > 1:
        yield Finding("missing", "neither RCCL nor NCCL", "install torch's ROCm or CUDA wheel")
    else:
        yield Finding("ok", "gloo, on CPUs")


def _nics(node: Node) -> Iterator[Finding]:
    ports = node.paths("sys/class/infiniband/*/ports/*")
    states = {port: text_of(port / "state").partition(":")[2].strip() for port in ports}
    kinds = [f"{text_of(p / 'rate')}, {text_of(p / 'link_layer')}, {states[p]}" for p in ports]
    down = [port.parts[-3] for port, state in states.items() if state != "ACTIVE"]
    if not ports:
        yield Finding("ok", "no RDMA device: nodes exchange over TCP")
    elif down:
        step = "check cables and switch, or leave them out by spec.network.rdmaDevices, NCCL_IB_HCA"
        yield Finding("warning", f"{_counted(kinds)}; not active: {', '.join(down)}", step)
    elif not (node.root / "dev/infiniband").exists():
        step = "mount /dev/infiniband (docs/operator.md, RDMA), else nodes exchange over TCP"
        yield Finding("warning", f"{_counted(kinds)}, but no /dev/infiniband", step)
    else:
        yield Finding("ok", _counted(kinds))


def _memlock(node: Node) -> Iterator[Finding]:
    _, limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = text_of(node.root / "proc/self/status")
    if limit == resource.RLIM_INFINITY or has_capability(status, CAP_IPC_LOCK):
        yield Finding("ok", "unlimited")
    elif (node.root / "dev/infiniband").exists():
        yield Finding("warning", binary(limit), memlock_warning(limit))
    else:
        yield Finding("ok", f"{binary(limit)}; only RDMA needs more")


def _clocks(node: Node) -> Iterator[Finding]:
    texts, is_capped = [], False
    for folder in node.amd_gpus:
        power = next(iter(folder.glob("hwmon/hwmon*")), folder)
        cap, full = (_number(power / f"power1_{kind}") // 10**6 for kind in ("cap", "cap_default"))
        clocks = text_of(folder / "pp_dpm_sclk").replace("*", "").splitlines()
        top = f"up to {clocks[-1].partition(':')[2].strip()}" if clocks else ""
        texts.append(", ".join(filter(None, (top, f"{cap} W" if cap else ""))))
        is_capped |= cap < full
    if is_capped or len(set(texts)) > 1:
        step = (
            "set the same, full power cap on all: amd-smi set --power-cap; amd-smi reset --clocks"
        )
        yield Finding("warning", _counted(texts), step)
    else:
        nvidia = "by nvidia-smi -q -d CLOCK,POWER" if node.gpus else "no GPU"
        yield Finding("ok", _counted(list(filter(None, texts))) or nvidia)


def _shared_memory(node: Node) -> Iterator[Finding]:
    folder = node.root / "dev/shm"
    if not folder.is_dir():
        yield Finding("missing", f"no {folder}", "mount a tmpfs there: data loaders need it")
        return
    total, _, free = shutil.disk_usage(folder)
    text = f"{binary(free)} free of {binary(total)}"
    if total < _SMALL_MEMORY:
        step = "docker run --shm-size=16g, or spec.resources.sharedMemory"
        yield Finding("warning", text, step)
    else:
        yield Finding("ok", text)


def _disk(node: Node) -> Iterator[Finding]:
    folder = next(p for p in (node.output, *node.output.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("missing", f"{folder} cannot be written", "name another folder by --output")
    elif free < _SMALL_DISK:
        step = "fluxtrain plan FILE tells what weights and checkpoints need"
        yield Finding("warning", f"{binary(free)} free in {folder}", step)
    else:
        yield Finding("ok", f"{binary(free)} free in {folder}")


def _environment(node: Node) -> Iterator[Finding]:
    own = node.environment
    if node.gpus or num_visible():
        is_amd = bool(node.amd_gpus)
        yield from (_variable(each, own) for each in GPU_VARIABLES if is_amd or each.for_all)
    known = {each.name for each in GPU_VARIABLES}
    others = [f"{n}={own[n]}" for n in sorted(own) if n.startswith(SHOWN) and n not in known]
    yield Finding("ok", f"also set: {' '.join(others) or 'nothing'}")


def _variable(each: GpuVariable, own: Mapping[str, str]) -> Finding:
    given = own.get(each.name)
    if given is None:
        text = "not set" if each.ours is None else f"not set; fluxtrain run sets {each.ours}"
        return Finding("ok", f"{text} ({each.sources})", name=each.name)
    if given == each.ours:
        return Finding("ok", f"{given} ({each.sources})", name=each.name)
    step = f"unset it, or measure that it helps: {each.effect}"
    ours = "nothing" if each.ours is None else each.ours
    return Finding("warning", f"{given}, ours is {ours} ({each.sources})", step, each.name)


_CHECKS: dict[str, Callable[[Node], Iterator[Finding]]] = {
    "GPUs": _gpus,
    "kernel driver": _driver,
    "rights": _rights,
    "torch": _torch,
    "collectives": _collectives,
    "RDMA": _nics,
    "locked memory": _memlock,
    "clocks and power": _clocks,
    "/dev/shm": _shared_memory,
    "output": _disk,
    "environment": _environment,
}


def examine(output: Path, environment: Mapping[str, str], root: Path = Path("/")) -> list[Finding]:
    """Return what all checks find on the node below ``root``."""
    node = Node(root, environment, output)
    return [
        Finding(**{**asdict(found), "name": found.name or name})
        for name, check in _CHECKS.items()
        for found in check(node)
    ]


def render(findings: Sequence[Finding]) -> str:
    """Return a line of each finding, and its next step below it."""
    width = max(len(each.name) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.state:7}  {each.name:{width}}  {each.text}")
        lines += [f"{'':{width + 9}}→ {each.step}"] if each.step else []
    return "\n".join(lines)
