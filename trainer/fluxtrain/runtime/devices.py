"""Peak and memory of known GPUs from the vendors' data sheets, and the check for visible GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsInt

import torch
from torch import Tensor

from fluxtrain.errors import ConfigError

_TERA, _MEBI = 1e12, 1 << 20
_SLOWER_BOARDS = {"PCIE", "NVL", "LAPTOP", "D"}  # boards of the same name with a lower peak

DEVICE_FILES = ("kfd", "dri/renderD*", "nvidia[0-9]*")
_ROCM_INDEX = "--index-url https://download.pytorch.org/whl/rocm6.4"
_FILTERS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Gpu:
    """One device as torch sees it."""

    name: str
    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    fp8_flops: float | None
    """Dense fp8 FLOP/s; None if it has no fp8."""
    memory_bytes: int
    """What the driver reports."""
    float32_flops: float | None = None
    """Float32 FLOP/s of matrix products, not in TF32, which torch uses only where it is allowed."""


_ROWS: list[tuple[str, float, float | None, float, int]] = [
    ("MI250X", 191.5, None, 47.9, 65_520),  # a die, which torch and Kubernetes count as a GPU
    ("MI300A", 980.6, 1961.2, 122.6, 131_056),  # shared with the CPU
    ("MI300X", 1307.4, 2614.9, 163.4, 196_592),
    ("MI308X", 344.0, 688.1, 43.0, 196_592),  # an estimate: 80 of the MI300X's 304 compute units
    ("MI325X", 1307.4, 2614.9, 163.4, 262_128),
    ("MI350X", 2306.9, 4613.7, 144.2, 294_896),
    ("MI355X", 2516.6, 5033.0, 157.3, 294_896),
    ("A100 40GB", 312.0, None, 19.5, 40_960),
    ("A100 80GB", 312.0, None, 19.5, 81_920),
    ("H100", 989.4, 1978.9, 66.9, 81_559),
    ("H200", 989.4, 1978.9, 66.9, 143_771),
    ("B200", 2250.0, 4500.0, 75.0, 183_359),
    ("GB200", 2500.0, 5000.0, 80.0, 189_471),
    ("GB300", 2500.0, 5000.0, 80.0, 274_658),  # the data sheet's 288e9 bytes, a lower bound
    ("RX 7900 XTX", 122.8, None, 61.4, 24_560),
    ("RX 9070 XT", 194.6, 389.3, 48.7, 16_304),
    ("W7900", 122.6, None, 61.3, 46_064),  # with ECC, the default
    ("Strix Halo", 59.4, None, 29.7, 98_304),  # the most memory that a BIOS gives it
    ("RTX 3090", 71.0, None, 35.6, 24_576),  # sums in float32, as those of the next
    ("RTX 4090", 165.2, 330.3, 82.6, 24_564),
    ("RTX 5090", 209.5, 419.0, 104.8, 32_607),
]
"""Name, dense bfloat16, fp8 and float32 in TFLOP/s, memory in MiB as the driver reports it."""
_OTHER_NAMES = {"8060S": "Strix Halo"}
"""What drivers call a GPU, and what the table does."""
GPUS = {
    name: Gpu(name, peak * _TERA, fp8 and fp8 * _TERA, memory * _MEBI, float32 * _TERA)
    for name, peak, fp8, float32, memory in _ROWS
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU called ``name``, such as ``rx7900xtx``; raise ConfigError if it is unknown."""
    gpu = next((gpu for known, gpu in GPUS.items() if plain(known) == plain(name)), None)
    if gpu is None:
        word = plain(name)
        near = [known for known in GPUS if plain(known) in word or word in plain(known)]
        hint = f"did you mean {' or '.join(near)}? " if word and near else ""
        raise ConfigError("--gpu", name, f"{hint}known: {', '.join(GPUS)}")
    return gpu


def plain(name: str) -> str:
    """Return ``name`` in small letters, with neither blanks nor hyphens."""
    return re.sub(r"[\s_-]", "", name).lower()


@dataclass(frozen=True)
class Peak:
    """A dense peak of the data sheets, which an MFU is a fraction of."""

    gpu: str
    """Name in the table of GPUs."""
    dtype: str
    flops: float
    """FLOP/s."""

    def __str__(self) -> str:
        return f"{self.gpu} dense {self.dtype} {self.flops / _TERA:g} TFLOP/s"


def find_peak(device_name: str, dtype: str) -> Peak | None:
    """Return the dense peak of the torch device ``device_name``; None if it is unknown.

    ``dtype`` is bfloat16, float32 or fp8; peaks of others are not in the table.
    """
    gpu = find_device(device_name)
    if gpu is None:
        return None
    peaks = {"bfloat16": gpu.peak_flops, "fp8": gpu.fp8_flops, "float32": gpu.float32_flops}
    flops = peaks.get(dtype)
    return None if flops is None else Peak(gpu.name, dtype, flops)


def find_device(device_name: str) -> Gpu | None:
    """Return the GPU of the table that torch calls ``device_name``; None if it is none of them."""
    parts = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if parts & _SLOWER_BOARDS:
        return None
    parts |= {part for name in parts & set(_OTHER_NAMES) for part in _words(_OTHER_NAMES[name])}
    return next((gpu for name, gpu in GPUS.items() if _words(name) <= parts), None)


def _words(name: str) -> set[str]:
    return set(name.upper().split())


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the torch device ``device_name``, None if it is unknown."""
    peak = find_peak(device_name, "bfloat16")
    return peak.flops if peak else None


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory of the GPU ``device`` as its driver reports them; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def lacks_bfloat16(device: torch.device) -> bool:
    """Return whether ``device`` is a CPU without instructions for bfloat16, or torch without their library.

    There torch's products in bfloat16 take 5 to 90 times as long as in float32, and convolutions 100 times.
    """
    has = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return device.type == "cpu" and not has()


def num_visible() -> int:
    """Return the number of GPUs that torch can use here."""
    return torch.cuda.device_count()


def require_gpus(expected: int, environment: Mapping[str, str], dev: Path = Path("/dev")) -> None:
    """Raise ConfigError, with likely causes, if torch sees fewer than ``expected`` GPUs."""
    visible = num_visible()
    if visible >= expected:
        return
    filters = [f"{name}={environment[name]!r}" for name in _FILTERS if name in environment]
    groups = " ".join(str(group) for group in sorted({os.getgid(), *os.getgroups()}))
    raise ConfigError(
        "spec.gpusPerNode",
        expected,
        f"torch sees {visible} GPUs in this pod, and training on fewer, or on the CPU, is refused. Look at "
        f"the device files, which the device plugin mounts: {_device_files(dev)}; "
        f"who may open them, often the groups video and render: this is user {os.getuid()} with groups "
        f"{groups}; the chart's podDefaults.supplementalGroups adds groups; "
        f"torch {torch.__version__} of the image, built for {torch_build()}; "
        f"{' '.join(filters) or ', '.join(_FILTERS) + ' (none is set)'}",
    )


def missing_gpus(dev: Path = Path("/dev")) -> str | None:
    """Return why torch sees no GPU of this machine, and the next step; None if there is no device file."""
    amd, nvidia = (dev / "kfd").exists(), any(dev.glob("nvidia[0-9]*"))
    if not (amd or nvidia):
        return None
    if torch.version.hip if amd else torch.version.cuda:
        step = f"check who may open them, and {', '.join(_FILTERS)}"
    elif amd:
        step = (
            f"install the ROCm wheel: make setup TORCH=rocm6.4, or pip install torch {_ROCM_INDEX}"
        )
    else:
        step = (
            "install the CUDA wheel: make setup TORCH=cuda, or pip install --force-reinstall torch"
        )
    built = f"torch {torch.__version__}, built for {torch_build()}"
    return f"{built}, sees no GPU of {_device_files(dev)}; {step}"


def _device_files(dev: Path) -> str:
    paths = [path for pattern in DEVICE_FILES for path in sorted(dev.glob(pattern))]
    if not paths:
        return f"none of {', '.join(str(dev / pattern) for pattern in DEVICE_FILES)} is here"
    return ", ".join(f"{path}{'' if _opens(path) else ' (no access)'}" for path in paths[:12])


def _opens(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def torch_build() -> str:
    """Return what this torch was built for, with its version."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"


# Binds a trainer to the CPUs near its GPU.
#
# Not by torchrun's ``--numa-binding``: it starts each trainer through the program numactl, which
# few images have and which needs more than a pod's seccomp profile allows, and it makes the agent
# use the GPUs too.


_SYS = Path("/sys")


def bind_near_gpu(index: int) -> None:
    """Let this process, and those that it starts, run only on the CPUs of the GPU's NUMA node.

    Changes nothing without a GPU, if /sys does not name the node, or if none of its CPUs is allowed.
    """
    if torch.cuda.is_available():
        near = cpus_near(_pci_address(index)) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)


def cpus_near(address: str, sys: Path = _SYS) -> set[int]:
    """Return the CPUs of the NUMA node of the PCI device ``address``; empty if it is unknown."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text(encoding="utf-8"))
        return parse_cpus(
            (sys / f"devices/system/node/node{node}/cpulist").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return set()


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs in a list of Linux, such as "0-3,8"; ValueError for anything else."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _pci_address(index: int) -> str:
    """Return the address of a GPU as in /sys, "" if this build of torch does not tell."""
    gpu = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(gpu, name) for name in names):
        return ""
    domain, bus, device = (getattr(gpu, name) for name in names)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


# Memory of the host that a GPU copies to directly, of exactly the size that is asked for.
#
# Torch's own pinned tensors come from an allocator that rounds each one up to a power of two, and
# keeps it.


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def pin(memory: Tensor) -> bool:
    """Pin the pages of ``memory``, a tensor of the host; return whether that was possible.

    Copies to memory that is not pinned are slower, and the host waits for them.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return _is_success(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))


def unpin(memory: Tensor) -> None:
    """Release what `pin` pinned, before the memory is freed."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _is_success(cudart.cudaHostUnregister(memory.data_ptr()))


def _is_success(error: SupportsInt) -> bool:
    """Return whether a call of the CUDA runtime succeeded; no later call of this thread finds its error."""
    if int(error) == 0:
        return True
    with suppress(RuntimeError):  # a launch raises what an earlier call left, and clears it
        torch.ones((), device="cuda")
    return False
