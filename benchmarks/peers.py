"""The environment of the peers, created once; it shares the project's packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / ".peers"
PACKAGES = (  # the project has diffusers; torchtitan's flux model imports most of the others
    "torchtitan==0.3.0",
    "simpletuner==3.1.6",
    "torch_checkpointing==0.1.1",
    "torchdata==0.11.0",
    "spmd_types==0.2.3",
    "datasets==4.7.0",
    "torchvision==0.29.2",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "httpx==0.28.1",
    "httpcore==1.0.9",
)


def peers_python() -> Path:
    """Return the interpreter that can import the peers; create its environment if needed.

    It includes the project's packages, so that all contenders use the same torch. Raises
    subprocess.CalledProcessError if a package cannot be installed.
    """
    python = FOLDER / "venv" / "bin" / "python"
    done = FOLDER / "installed.txt"
    packages = "\n".join(PACKAGES)
    if done.exists() and done.read_text() == packages:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    _share_packages(python)
    # without dependencies: the project has torch and the others already
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", *PACKAGES], check=True)
    done.write_text(packages)
    return python


def _share_packages(python: Path) -> None:
    """Add the project's packages to the environment of ``python``, after its own."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    shared = sysconfig.get_path("purelib")
    # addsitedir, unlike a bare path, follows the .pth file of the project's editable install.
    line = f"import site; site.addsitedir({shared!r})\n"
    (Path(done.stdout.strip()) / "project.pth").write_text(line)
