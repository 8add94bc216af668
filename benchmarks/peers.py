"""The peers' environment: made once, beside the project's own, whose packages it shares."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / ".peers"
PACKAGES = (  # torchtitan and what its flux model imports, torchvision; diffusers is in the project's
    "torchtitan==0.3.0",
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
    """Return the interpreter that can import the peers; makes its environment where there is none.

    The environment sees the project's packages, so that all contenders run the same torch.
    Raises subprocess.CalledProcessError where a package cannot be installed.
    """
    python = FOLDER / "venv" / "bin" / "python"
    done = FOLDER / "installed.txt"
    wanted = "\n".join(PACKAGES)
    if done.exists() and done.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    _share_packages(python)
    # Without dependencies: torch and what else the project has must not be installed a second time.
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", *PACKAGES], check=True)
    done.write_text(wanted)
    return python


def _share_packages(python: Path) -> None:
    """Add the project's packages to the environment of ``python``, behind its own."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    shared = sysconfig.get_path("purelib")
    # addsitedir, unlike a bare path, follows the .pth file of the project's editable install.
    line = f"import site; site.addsitedir({shared!r})\n"
    (Path(answer.stdout.strip()) / "project.pth").write_text(line)
