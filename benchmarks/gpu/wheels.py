"""Downloads the packages that a machine without network lacks: ``python -m benchmarks.gpu.wheels FOLDER``.

For a machine whose image has torch, numpy, einops, jaxtyping and transformers. Carry the folder, and there::

    python3 -m pip install --no-index --no-deps --target site FOLDER/*.whl
    PYTHONPATH=site:trainer:operator python3 -m benchmarks.gpu
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers import PACKAGES

OWN = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "prometheus-client"),
    *("mlperf-logging", "webdataset", "braceexpand"),  # of `fluxtrain run`
)
DIFFUSERS = ("diffusers",)
_NOT_NEEDED = {"torchvision", "simpletuner"}
TORCHTITAN = {  # the packages of `benchmarks.peers` that each version does without
    "0.2.2": {"torch_checkpointing", "spmd_types"},
    "0.3.0": set[str](),
}
_GLIBC = (39, 36, 35, 34, 31, 28, 27, 24, 17)


def main(arguments: list[str] | None = None) -> int:
    """Download the wheels and print their size; return pip's exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument("--torchtitan", choices=TORCHTITAN, default="0.2.2")
    options = parser.parse_args(arguments)
    packages = (*pinned(OWN + DIFFUSERS), *torchtitan(options.torchtitan))
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", f"--python-version={options.python}", "--implementation=cp"),
        *(*platforms, "--platform=manylinux2014_x86_64", f"--dest={options.folder}", *packages),
    ]
    code = subprocess.run(command).returncode
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    print(f"{size / 2**20:.1f} MiB in {options.folder}")
    return code


def torchtitan(wanted: str) -> list[str]:
    """Return version ``wanted`` of torchtitan, and what its flux model imports, with versions."""
    pins = dict(package.split("==") for package in PACKAGES) | {"torchtitan": wanted}
    left_out = _NOT_NEEDED | TORCHTITAN[wanted]
    return [f"{name}=={pin}" for name, pin in pins.items() if name not in left_out]


def pinned(names: tuple[str, ...]) -> list[str]:
    """Return ``names`` with the versions that this environment has."""
    return [f"{name}=={version(name)}" for name in names]


if __name__ == "__main__":
    sys.exit(main())
