"""The cluster's life: prepare, up, status, down; each can be said at any time, and twice."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster import (
    binaries,
    certificates,
    cgroups,
    containerd,
    control_plane,
    fake_gpus,
    images,
    mounts,
    network,
    node,
    packages,
    processes,
    prometheus,
    traces,
)
from cluster.errors import ClusterError, MachineError
from cluster.kubectl import Kubectl, kubectl
from cluster.places import CACHE, KUBECONFIG, LOGS, MAX_NODES, STATE, Node, nodes
from cluster.progress import part, say, wait_until

CONTROL_PLANE = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "coredns",
)


KUBELET_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"
"""Fixed in the kubelet's source: two of our own share it, and no device plugin comes."""


def up(num_nodes: int = 2) -> Path:
    """Return the kubeconfig of a cluster: the person's own, the running one, or a new one.

    A new one has ``num_nodes`` nodes with eight fake GPUs each; nodes of a running one that are down are
    powered on. Where a new one cannot start, nothing is left but its logs. Raises MachineError where this
    machine lacks something, ClusterError where a part fails.
    """
    if (given := _persons_own()) is not None:
        return given
    _require_root()
    with lock():
        if _is_running():
            _power_on_what_is_off()
            say(f"runs already, with {len(nodes())} nodes")
            return KUBECONFIG
        _remove_all()
        _require_possible(num_nodes)
        _provide()
        try:
            _start([Node(index) for index in range(num_nodes)])
        except BaseException:
            _remove_all(keep_logs=True)
            raise
    return KUBECONFIG


def prepare() -> None:
    """Install, build and make everything that a start and the tests on a cluster need.

    It takes minutes the first time. Raises like `up`.
    """
    _require_root()
    with lock():
        _provide()
        prometheus.ensure()


def down() -> None:
    """Stop the cluster of this clone and remove all that it left on the machine.

    Raises ClusterError where something stays.
    """
    if not STATE.exists():
        return
    _require_root()
    with lock():
        _remove_all()


def status() -> dict[str, bool]:
    """Return each program of the cluster that was started, and whether it runs."""
    return {name: processes.alive(name) for name in processes.names()}


def _start(new: list[Node]) -> None:
    network.require_free_ranges()
    _require_no_kubelet()
    traces.remember()
    with part("certificates, network, cgroups"):
        certificates.create(new)
        network.create(new)
        for each in new:
            node.prepare(each)
    with ThreadPoolExecutor() as pool:
        loaded = pool.submit(_start_containerd, new)
        with part("control plane"):
            control_plane.start()
        loaded.result()
    with part(f"{len(new)} nodes ready"):
        for each in new:
            node.start(each)
        for each in new:
            node.wait_ready(each)
            fake_gpus.give(each.name)
    with part("names and accounts"):
        control_plane.wait_for_dns()
        wait_until(_has_default_account, "the default service account", seconds=30)


def _start_containerd(new: list[Node]) -> None:
    with part("containerd and images"):
        for each in new:
            containerd.start(each)
        images.load(images.ensure())


def _provide() -> None:
    """Get everything that does not change from start to start."""
    with part("Debian packages"):
        packages.ensure()
    with part("programs and images"), ThreadPoolExecutor() as pool:
        made = pool.submit(images.ensure)
        binaries.ensure()
        made.result()


def _remove_all(*, keep_logs: bool = False) -> None:
    """Undo `_start`, wherever it stopped, and whatever died since.

    Nothing of the state is kept, so everything is killed at once; nodes first, lest they report.
    Without a record of ours nothing was started, and the machine may carry another clone's cluster.
    """
    processes.stop(name for name in processes.names() if name not in CONTROL_PLANE)
    if traces.RECORD.exists():
        _clear_machine()
    keep = {LOGS} if keep_logs else set()
    for path in set(STATE.iterdir() if STATE.exists() else ()) - keep:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if STATE.exists() and not any(STATE.iterdir()):
        STATE.rmdir()


def _clear_machine() -> None:
    for each in nodes():
        containerd.kill_containers(each)
    processes.stop(processes.names())
    mounts.unmount(STATE)
    network.remove()
    for index in range(MAX_NODES):
        cgroups.remove(Node(index).namespace)
    traces.undo()


def _is_running() -> bool:
    """Tell whether the control plane runs and answers: what it knows is kept, whatever its nodes do."""
    return all(map(processes.alive, CONTROL_PLANE)) and kubectl.answers()


def _power_on_what_is_off() -> None:
    for each in nodes():
        if not all(processes.alive(each.process(name)) for name in node.PROGRAMS):
            with part(f"{each.name} was down: power on"):
                node.power_off(each)
                node.power_on(each)


def _persons_own() -> Path | None:
    """Return the kubeconfig of KUBECONFIG where it is not ours and its cluster answers."""
    given = Path(os.environ.get("KUBECONFIG", KUBECONFIG))
    if given.resolve() == KUBECONFIG:
        return None
    binaries.ensure_tools()
    if Kubectl(given).answers():
        say(f"KUBECONFIG names a working cluster, which is used: {given}")
        return given
    say(f"KUBECONFIG names a cluster that does not answer: {given}")
    return None


def _has_default_account() -> bool:
    with contextlib.suppress(ClusterError):
        kubectl.get("serviceaccount", "default")
        return True
    return False


def _require_possible(num_nodes: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise MachineError(f"{num_nodes} nodes: 1 to {MAX_NODES} are possible")
    if os.uname().sysname != "Linux":
        raise MachineError(f"Linux is needed, this is {os.uname().sysname}")
    if os.uname().machine != "x86_64":  # what the wheel with kubectl and helm is made for
        raise MachineError(f"an x86_64 machine is needed, this is {os.uname().machine}")


def _require_no_kubelet() -> None:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(KUBELET_SOCKET)
        raise MachineError(
            "this machine is a Kubernetes node already; its kubelet would be disturbed"
        )


def _require_root() -> None:
    if os.geteuid():
        raise MachineError(
            "root is needed, for network namespaces, cgroups and mounts: sudo make cluster; "
            "or set KUBECONFIG to a cluster of yours"
        )


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Let one `up` or `down` work at a time, over all clones that share the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    handle = os.open(CACHE, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
