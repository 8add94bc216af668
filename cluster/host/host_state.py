"""Changes to the machine outside `.cluster` that programs always make: saved before, restored after."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from cluster.host import mounts
from cluster.layout import STATE

FOLDERS = (
    "/var/lib/kubelet",  # the kubelet's device plugin sockets
    "/var/log/containers",  # its links to the pods' logs
    "/var/lib/cni",  # state of the network plugins
    "/run/containerd",  # the sockets of containerd's shims
    "/run/netns",  # mounted on itself by the first `ip netns add`
)

SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
"""Sysctls that the kubelet sets."""

RECORD = STATE / "host_state.json"


def save() -> None:
    """Record the state of the machine before the first program starts."""
    missing = [folder for folder in FOLDERS if not Path(folder).exists()]
    sysctls = {name: _sysctl(name).read_text() for name in SYSCTLS}
    STATE.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"missing_folders": missing, "sysctls": sysctls}))


def restore() -> None:
    """Restore the recorded state; folders that existed before lose only our entries."""
    if not RECORD.exists():
        return
    record = json.loads(RECORD.read_text())
    for folder in record["missing_folders"]:
        mounts.unmount(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(STATE):
            link.unlink()
    for file in Path("/var/lib/cni/results").glob("fluxtrain-node-*"):
        file.unlink()
    for name, value in record["sysctls"].items():
        with contextlib.suppress(OSError):
            _sysctl(name).write_text(value)


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name
