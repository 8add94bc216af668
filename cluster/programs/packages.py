"""Debian packages of the machine's programs that the cluster uses; installed if missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cluster.commands import run
from cluster.errors import MachineError

CNI = Path("/usr/lib/cni")

PROGRAMS = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "mount": "mount",
    "umount": "mount",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "gcc": "gcc",
}
"""Program -> its Debian package."""

_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def program(name: str) -> str:
    """Return the path of a program of the machine.

    Raises MachineError if it is not installed.
    """
    path = shutil.which(name, path=search_path())
    if path is None:
        package = PROGRAMS.get(name, name)
        raise MachineError(f"{name} is not installed (Debian package {package})")
    return path


def search_path() -> str:
    """Return PATH with the sbin folders, which a user's may lack."""
    return f"{os.environ.get('PATH', '')}:{SBIN}"


def missing() -> list[str]:
    """Return the packages that are not installed."""
    path = search_path()
    packages = {package for name, package in PROGRAMS.items() if not shutil.which(name, path=path)}
    if not (CNI / "bridge").exists():
        packages.add("containernetworking-plugins")
    if "gcc" in packages:
        packages.add("libc6-dev")  # pause is linked statically
    return sorted(packages)


def ensure() -> None:
    """Install missing packages; MachineError if the machine has no apt-get."""
    _install(missing())


def ensure_programs(programs: Mapping[str, str]) -> None:
    """Install the packages of missing ``programs``, which are given with their packages, like `ensure`."""
    path = search_path()
    _install(sorted({programs[name] for name in programs if not shutil.which(name, path=path)}))


def _install(packages: list[str]) -> None:
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise MachineError(f"no apt-get here; install by hand: {', '.join(packages)}")
    update()
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends"]
    run([*install, *packages], env=_QUIET, seconds=600)


def update() -> None:
    """Update the package lists."""
    run(["apt-get", "update", "--quiet"], env=_QUIET, seconds=300)
