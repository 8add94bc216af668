"""Debian packages: which programs the cluster borrows from the machine, installed where missing."""

from __future__ import annotations

import os
import shutil
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
"""Program -> the package that brings it."""

_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def program(name: str) -> str:
    """Return the path of a program of the machine.

    Raises MachineError where it is not installed.
    """
    found = shutil.which(name, path=search_path())
    if found is None:
        package = PROGRAMS.get(name, name)
        raise MachineError(f"{name} is not installed (Debian package {package})")
    return found


def search_path() -> str:
    """Return PATH with the sbin folders, which a person's own may lack."""
    return f"{os.environ.get('PATH', '')}:{SBIN}"


def missing() -> list[str]:
    """Return the packages that are still needed."""
    path = search_path()
    wanted = {package for name, package in PROGRAMS.items() if not shutil.which(name, path=path)}
    if not (CNI / "bridge").exists():
        wanted.add("containernetworking-plugins")
    if "gcc" in wanted:
        wanted.add("libc6-dev")  # pause is linked statically
    return sorted(wanted)


def ensure() -> None:
    """Install what is missing.

    Raises MachineError where the machine has no apt-get.
    """
    wanted = missing()
    if not wanted:
        return
    if shutil.which("apt-get") is None:
        raise MachineError(f"no apt-get here; install by hand: {', '.join(wanted)}")
    update()
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends"]
    run([*install, *wanted], env=_QUIET, seconds=600)


def update() -> None:
    """Fetch the lists of what Debian has."""
    run(["apt-get", "update", "--quiet"], env=_QUIET, seconds=300)
