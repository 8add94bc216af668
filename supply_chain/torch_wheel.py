"""Install the project with the torch wheel of this machine.

    python -m supply_chain.torch_wheel TORCH INDEX REQUIREMENT

TORCH is auto, cpu, cuda or rocmX.Y. PyTorch's INDEX has a folder of wheels for each kind; that of cuda is on
pip's own index, and comes from there. An installed torch is kept unless TORCH asks for another kind.
Needs only the standard library and pip: it runs before anything is installed.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = r"cpu|cuda|rocm\d+\.\d+(\.\d+)?"
RANGE = "torch>=2.9"  # pyproject's
_LIBRARIES = r"torch|triton|(pytorch-)?triton-.*|nvidia-.*|cuda-.*"
"""Distributions that a torch wheel brings, in versions of its own."""
_ROCM = "rocm6.4"
"""Wheels for a machine with AMD's driver that has no ROCm of its own; the wheels bring theirs."""


def kind_of_machine(root: Path = Path("/")) -> str:
    """Return rocmX.Y, cuda or cpu by the device files and the installed ROCm."""
    if (root / "dev/kfd").exists():
        version = root / "opt/rocm/.info/version"
        found = re.match(r"\d+\.\d+", version.read_text()) if version.exists() else None
        return f"rocm{found[0]}" if found else _ROCM
    return "cuda" if any((root / "dev").glob("nvidia[0-9]*")) else "cpu"


def installed_torch() -> str | None:
    """Return the version of the installed torch, None without one."""
    importlib.invalidate_caches()
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def kind_of_torch(version: str) -> str:
    """Return the kind of wheel that has ``version``, such as cpu for 2.11.0+cpu."""
    local = version.partition("+")[2]
    return "cuda" if not local or local.startswith("cu") else local


def pinned(constraints: str, torch: str) -> Iterator[str]:
    """Yield the lines of ``constraints`` with the version ``torch`` in place of torch and its libraries."""
    for line in constraints.splitlines():
        if not re.fullmatch(_LIBRARIES, line.partition("==")[0].strip(), re.IGNORECASE):
            yield line
    yield f"torch=={torch}"


def pip(*arguments: str) -> bool:
    """Print and run a command of pip; return whether it succeeded."""
    command = ["-m", "pip", *arguments]
    print("+ python", *command, file=sys.stderr, flush=True)
    options = ("--disable-pip-version-check", "--quiet", "--progress-bar", "off")
    return subprocess.run([sys.executable, *command, *options], check=False).returncode == 0


def put_torch(kind: str, index: str) -> bool:
    """Install the newest torch of ``kind`` that is in range; if pip cannot, keep the old and return False."""
    source = () if kind == "cuda" else ("--index-url", f"{index}/{kind}", "--retries", "1")
    if not pip("install", RANGE, "--force-reinstall", "--no-deps", *source):
        return False
    names = {str(found.metadata["Name"]) for found in metadata.distributions()} - {"torch"}
    if old := sorted(name for name in names if re.fullmatch(_LIBRARIES, name, re.IGNORECASE)):
        pip("uninstall", "--yes", *old)
    return pip("install", f"torch=={installed_torch()}", *source)


def install(torch: str, index: str, requirement: str) -> None:
    """Install ``requirement`` with torch of the kind ``torch``, or with the installed one if it is "auto".

    Exits with a line on stderr where pip fails.
    """
    if torch != "auto" and not re.fullmatch(KINDS, torch):
        sys.exit(f"TORCH={torch}: must be auto, cpu, cuda or rocmX.Y, such as rocm6.4")
    version = installed_torch()
    kind = kind_of_machine() if torch == "auto" else torch
    is_kept = version is not None and torch in ("auto", kind_of_torch(version))
    if not is_kept and (version is not None or kind != "cuda"):
        if not put_torch(kind, index):
            if torch != "auto" or kind != "cpu":
                sys.exit(f"{index}/{kind}: no {RANGE} for this Python; set TORCH= or TORCH_INDEX=")
            text = "cannot be reached: torch comes from pip's own index, with CUDA's libraries"
            print(f"{index}/{kind} {text}", file=sys.stderr)
        version = installed_torch()
    constraints = (ROOT / "constraints.txt").read_text()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(pinned(constraints, version)) if version else constraints)
        file.flush()
        if not pip("install", "--editable", requirement, "--constraint", file.name):
            sys.exit("pip could not install the project")


if __name__ == "__main__":
    install(*sys.argv[1:])
