"""What programs leave on the machine outside `.cluster`, whatever one tells them: undone at the end."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from cluster import mounts
from cluster.places import STATE

FOLDERS = (
    "/var/lib/kubelet",  # the kubelet's sockets for device plugins
    "/var/log/containers",  # its links to the pods' logs
    "/var/lib/cni",  # what the network plugins remember of a pod
    "/run/containerd",  # the sockets of containerd's shims
    "/run/netns",  # mounted on itself by the first `ip netns add`
)

SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
"""Set by the kubelet."""

RECORD = STATE / "traces.json"


def remember() -> None:
    """Note how the machine looks before the first program starts."""
    missing = [folder for folder in FOLDERS if not Path(folder).exists()]
    sysctls = {name: _sysctl(name).read_text() for name in SYSCTLS}
    STATE.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"missing_folders": missing, "sysctls": sysctls}))


def undo() -> None:
    """Make the machine look so again; what was there before is left alone but for our own entries."""
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
