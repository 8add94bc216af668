"""Prometheus and promtool, unpacked from Debian's package: installing it would start a service."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cluster import packages
from cluster.commands import run
from cluster.errors import ClusterError, MachineError
from cluster.places import CACHE
from cluster.progress import part

PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")
_FOLDER = CACHE / "programs" / PACKAGE


def find(name: str) -> Path | None:
    """Return the program ``name``: the machine's own, else the unpacked one; None where neither is."""
    installed = shutil.which(name, path=packages.search_path())
    found = Path(installed) if installed else _FOLDER / name
    return found if found.exists() else None


def ensure() -> None:
    """Unpack the programs where the machine has none.

    Raises MachineError where the machine has no apt-get, ClusterError where it cannot download.
    """
    if all(map(find, PROGRAMS)):
        return
    if shutil.which("apt-get") is None:
        raise MachineError(f"no apt-get here; install by hand: {PACKAGE}")
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with part(f"unpacked {PACKAGE}"), tempfile.TemporaryDirectory(dir=_FOLDER.parent) as made:
        _unpack(_download(Path(made)), Path(made) / "package")
        (Path(made) / "package" / "usr" / "bin").rename(_FOLDER)


def _download(folder: Path) -> Path:
    """Return the package as a file; the lists of packages are fetched where they are missing or old."""
    folder.chmod(0o755)  # apt-get downloads as a user of its own
    command = ["apt-get", "download", "--quiet", PACKAGE]
    try:
        run(command, folder=folder, seconds=600)
    except ClusterError:
        packages.update()
        run(command, folder=folder, seconds=600)
    return next(folder.glob("*.deb"))


def _unpack(package: Path, target: Path) -> None:
    run(["dpkg-deb", "--extract", package, target])
