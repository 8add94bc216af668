"""Programs extracted from Debian's packages, since installing those would start services."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cluster.commands import run
from cluster.console import timed
from cluster.errors import ClusterError, MachineError
from cluster.layout import CACHE
from cluster.programs import packages

PROGRAMS = {"prometheus": ("prometheus", "promtool"), "docker-registry": ("docker-registry",)}
"""Package -> its programs."""


def find(name: str) -> Path | None:
    """Return the program ``name``: the installed one, else the extracted one, else None."""
    installed = shutil.which(name, path=packages.search_path())
    owner = next(package for package, programs in PROGRAMS.items() if name in programs)
    program = Path(installed) if installed else _folder(owner) / name
    return program if program.exists() else None


def ensure(package: str) -> None:
    """Extract the programs of ``package`` if the machine has none.

    Raises MachineError if the machine has no apt-get, ClusterError if the download fails.
    """
    if all(map(find, PROGRAMS[package])):
        return
    if shutil.which("apt-get") is None:
        raise MachineError(f"no apt-get here; install by hand: {package}")
    target = _folder(package)
    target.parent.mkdir(parents=True, exist_ok=True)
    with timed(f"unpacked {package}"), tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        _unpack(_download(package, Path(temporary)), Path(temporary) / "package")
        (Path(temporary) / "package" / "usr" / "bin").rename(target)


def unpacked(*packages: str) -> Path:
    """Return a folder with all files of ``packages``; raises what `ensure` raises."""
    target = CACHE / "packages" / "+".join(packages)
    if target.exists():
        return target
    if shutil.which("apt-get") is None:
        raise MachineError(f"no apt-get here; install by hand: {' '.join(packages)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        for package in packages:
            folder = Path(temporary) / package
            folder.mkdir()
            _unpack(_download(package, folder), Path(temporary) / "files")
        if not target.exists():  # another process may have been first
            (Path(temporary) / "files").rename(target)
    return target


def _folder(package: str) -> Path:
    return CACHE / "programs" / package


def _download(package: str, folder: Path) -> Path:
    """Return the downloaded package; update the package lists if the download fails."""
    folder.chmod(0o755)  # apt-get downloads as another user
    command = ["apt-get", "download", "--quiet", package]
    try:
        run(command, folder=folder, seconds=600)
    except ClusterError:
        packages.update()
        run(command, folder=folder, seconds=600)
    return next(folder.glob("*.deb"))


def _unpack(package: Path, target: Path) -> None:
    run(["dpkg-deb", "--extract", package, target])
