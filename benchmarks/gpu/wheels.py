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

OWN = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "prometheus-client")
DIFFUSERS = ("diffusers",)
TORCHTITAN = {  # its flux model imports its data sets and its tokenizer
    "0.2.2": ("torchtitan==0.2.2", "torchdata==0.11.0"),
    "0.3.0": (
        *("torchtitan==0.3.0", "torchdata==0.11.0"),
        *("torch_checkpointing==0.1.1", "spmd_types==0.2.3"),
    ),
}
TORCHTITAN_NEEDS = (
    *("datasets==4.7.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0"),
    *("tyro==1.0.17", "docstring_parser==0.18.0", "httpx==0.28.1", "httpcore==1.0.9"),
)
_GLIBC = (39, 36, 35, 34, 31, 28, 27, 24, 17)


def main(arguments: list[str] | None = None) -> int:
    """Download the wheels and print their size; return pip's exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument("--torchtitan", choices=TORCHTITAN, default="0.2.2")
    options = parser.parse_args(arguments)
    packages = (*pinned(OWN + DIFFUSERS), *TORCHTITAN[options.torchtitan], *TORCHTITAN_NEEDS)
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


def pinned(names: tuple[str, ...]) -> list[str]:
    """Return ``names`` with the versions that this environment has."""
    return [f"{name}=={version(name)}" for name in names]


if __name__ == "__main__":
    sys.exit(main())
