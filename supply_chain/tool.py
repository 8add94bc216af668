"""Tools of this folder, each in an environment of its own: nothing else depends on them."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / ".venv" / "tools"


def installed(requirement: str) -> Path:
    """Return the folder with the commands of ``requirement``, which is installed if it is not.

    Raises CalledProcessError if pip cannot install it.
    """
    folder = _FOLDER / requirement
    done = folder / ".installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", requirement]
        subprocess.run(command, check=True, stdout=sys.stderr)
        done.touch()
    return folder / "bin"
