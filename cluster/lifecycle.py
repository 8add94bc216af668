"""Prepare, start, inspect and stop the cluster; all functions are idempotent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster import control_plane, processes, slurm
from cluster.access import certificates
from cluster.console import log, timed, wait_until
from cluster.errors import ClusterError, MachineError
from cluster.host import host_state, left_behind, mounts, network
from cluster.kubectl import Kubectl, kubectl
from cluster.layout import API_URL, CACHE, FAMILY, KUBECONFIG, LOGS, MAX_NODES, STATE, Node, nodes
from cluster.nodes import containerd, fake_gpus, images, node
from cluster.programs import binaries, debian, packages

CONTROL_PLANE = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "coredns",
)


NODE_GRACE_SECONDS = 50
"""Kubernetes' default."""

KUBELET_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"
"""Fixed in the kubelet's source: our kubelets share it, since there is no device plugin."""


def up(num_nodes: int = 2, node_grace_seconds: int = NODE_GRACE_SECONDS) -> Path:
    """Return the kubeconfig of a cluster: that of KUBECONFIG, the running one, or a new one.

    A new one has ``num_nodes`` nodes with eight fake GPUs each, which are not ready after
    ``node_grace_seconds`` without a heartbeat. Nodes of a running one that are down are powered on. If a new
    one cannot start, only its logs are kept. Raises MachineError if this machine lacks
    something, ClusterError if a program fails.
    """
    if (existing := _existing_kubeconfig()) is not None:
        return existing
    _require_root()
    with lock():
        if _is_running():
            if API_URL not in KUBECONFIG.read_text():
                raise MachineError(
                    f"a cluster without {FAMILY} is running; make cluster-down first"
                )
            _power_on_all()
            log(f"already running, with {len(nodes())} nodes")
            return KUBECONFIG
        _remove_all()
        _require_possible(num_nodes)
        _build()
        try:
            _start([Node(index) for index in range(num_nodes)], node_grace_seconds)
        except BaseException:
            _remove_all(keep_logs=True)
            raise
    return KUBECONFIG


def prepare() -> None:
    """Install and build everything that a start and the tests on a cluster need.

    Takes minutes the first time. Raises the errors of `up`.
    """
    _require_root()
    with lock():
        _build()
        debian.ensure("prometheus")
        slurm.ensure()
        for module in binaries.TESTED:
            binaries.build(module)


def down() -> None:
    """Stop the cluster of this clone and undo all its changes to the machine.

    Raises ClusterError if something cannot be removed.
    """
    if not STATE.exists():
        return
    _require_root()
    with lock():
        _remove_all()


def status() -> dict[str, bool]:
    """Return whether each started program of the cluster is running."""
    return {name: processes.is_running(name) for name in processes.names()}


def _start(new: list[Node], node_grace_seconds: int) -> None:
    left_behind.clear()
    network.require_free_ranges()
    _require_no_kubelet()
    host_state.save()
    with timed("certificates, network, cgroups"):
        certificates.create(new)
        network.create(new)
        for each in new:
            node.prepare(each, node_grace_seconds)
    with ThreadPoolExecutor() as pool:
        images_loaded = pool.submit(_start_containerd, new)
        with timed("control plane"):
            control_plane.start(node_grace_seconds)
        images_loaded.result()
    with timed(f"{len(new)} nodes ready"):
        for each in new:
            node.start(each)
        for each in new:
            node.wait_ready(each)
            fake_gpus.set_capacity(each.name)
    with timed("DNS and service accounts"):
        control_plane.wait_for_dns()
        wait_until(_has_default_account, "the default service account", seconds=30)


def _start_containerd(new: list[Node]) -> None:
    with timed("containerd and images"):
        for each in new:
            containerd.start(each)
        images.load(images.ensure())


def _build() -> None:
    """Install packages, build programs and images."""
    with timed("Debian packages"):
        packages.ensure()
    with timed("programs and images"), ThreadPoolExecutor() as pool:
        built = pool.submit(images.ensure)
        binaries.ensure()
        built.result()


def _remove_all(*, keep_logs: bool = False) -> None:
    """Undo `_start`, even if it was interrupted.

    No state is kept, so everything is killed; nodes first, so that they report nothing. Without our record
    nothing was started, and the machine may run another clone's cluster.
    """
    processes.stop(name for name in processes.names() if name not in CONTROL_PLANE)
    if host_state.RECORD.exists():
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
    left_behind.remove_nodes()
    host_state.restore()


def _is_running() -> bool:
    """Return whether the control plane is running and ready, in whatever state its nodes are."""
    return all(map(processes.is_running, CONTROL_PLANE)) and kubectl.is_ready()


def _power_on_all() -> None:
    for each in nodes():
        if not all(processes.is_running(each.process(name)) for name in node.PROGRAMS):
            with timed(f"{each.name} was down: power on"):
                node.power_off(each)
                node.power_on(each)


def _existing_kubeconfig() -> Path | None:
    """Return the path in KUBECONFIG if it is not ours and its cluster responds, else None."""
    kubeconfig = Path(os.environ.get("KUBECONFIG", KUBECONFIG))
    if kubeconfig.resolve() == KUBECONFIG:
        return None
    binaries.ensure_tools()
    if Kubectl(kubeconfig).is_ready():
        log(f"KUBECONFIG names a working cluster, which is used: {kubeconfig}")
        return kubeconfig
    log(f"KUBECONFIG names a cluster that does not respond: {kubeconfig}")
    return None


def _has_default_account() -> bool:
    with contextlib.suppress(ClusterError):
        kubectl.get("serviceaccount", "default")
        return True
    return False


def _require_possible(num_nodes: int) -> None:
    if FAMILY not in ("ipv4", "ipv6"):
        raise MachineError(f"FAMILY={FAMILY}: must be ipv4 or ipv6")
    if not 1 <= num_nodes <= MAX_NODES:
        raise MachineError(f"{num_nodes} nodes: 1 to {MAX_NODES} are possible")
    if os.uname().sysname != "Linux":
        raise MachineError(f"Linux is needed, this is {os.uname().sysname}")
    if os.uname().machine != "x86_64":  # the platform of the wheel with kubectl and helm
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
            "or set KUBECONFIG to an existing cluster"
        )


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Serialise `up` and `down` of all clones that share the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    handle = os.open(CACHE, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
