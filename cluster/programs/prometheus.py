"""Prometheus and promtool, extracted from Debian's package, since installing it would start a service."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cluster.commands import run
from cluster.console import timed
from cluster.errors import ClusterError, MachineError
from cluster.layout import CACHE
from cluster.programs import packages

PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")
_FOLDER = CACHE / "programs" / PACKAGE


def find(name: str) -> Path | None:
    """Return the program ``name``: the installed one, else the extracted one, else None."""
    installed = shutil.which(name, path=packages.search_path())
    program = Path(installed) if installed else _FOLDER / name
    return program if program.exists() else None


def ensure() -> None:
    """Extract the programs if the machine has none.

    Raises MachineError if the machine has no apt-get, ClusterError if the download fails.
    """
    if all(map(find, PROGRAMS)):
        return
    if shutil.which("apt-get") is None:
        raise MachineError(f"no apt-get here; install by hand: {PACKAGE}")
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with timed(f"unpacked {PACKAGE}"), tempfile.TemporaryDirectory(dir=_FOLDER.parent) as temporary:
        _unpack(_download(Path(temporary)), Path(temporary) / "package")
        (Path(temporary) / "package" / "usr" / "bin").rename(_FOLDER)


def _download(folder: Path) -> Path:
    """Return the downloaded package; update the package lists if the download fails."""
    folder.chmod(0o755)  # apt-get downloads as another user
    command = ["apt-get", "download", "--quiet", PACKAGE]
    try:
        run(command, folder=folder, seconds=600)
    except ClusterError:
        packages.update()
        run(command, folder=folder, seconds=600)
    return next(folder.glob("*.deb"))


def _unpack(package: Path, target: Path) -> None:
    run(["dpkg-deb", "--extract", package, target])
