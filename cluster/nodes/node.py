"""A node: containerd, kubelet and kube-proxy in a network namespace."""

from __future__ import annotations

import json

from cluster import processes
from cluster.access import kubeconfigs
from cluster.access.certificates import AUTHORITY, PROXY, kubelet
from cluster.console import wait_until
from cluster.errors import MachineError
from cluster.host import cgroups, network
from cluster.kubectl import kubectl
from cluster.layout import BRIDGE_ADDRESS, DOMAIN, MAX_SOCKET_PATH, POD_RANGE, Node
from cluster.nodes import containerd, fake_gpus
from cluster.programs.binaries import path

PROGRAMS = ("kubelet", "kube-proxy", "containerd")
READY_SECONDS = 60


def prepare(node: Node, grace_seconds: int) -> None:
    """Write the node's configuration and create its cgroup; five heartbeats in ``grace_seconds``.

    Raises MachineError if the path of the clone is too long for socket addresses.
    """
    socket = f"{node.containerd_socket}.ttrpc"
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise MachineError(f"{socket} is too long for a socket; put the clone into a shorter path")
    node.folder.mkdir(parents=True)
    cgroups.create(node.namespace)
    containerd.prepare(node)
    kubeconfigs.write(node.folder / "kubelet.kubeconfig", kubelet(node))
    kubeconfigs.write(node.folder / "kube-proxy.kubeconfig", PROXY)
    (node.folder / "resolv.conf").write_text(f"nameserver {BRIDGE_ADDRESS}\n")
    (node.folder / "kubelet.json").write_text(
        json.dumps(_kubelet_config(node, grace_seconds), indent=2)
    )


def _kubelet_config(node: Node, grace_seconds: int) -> dict[str, object]:
    identity = kubelet(node)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(AUTHORITY.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(identity.certificate),
        "tlsPrivateKeyFile": str(identity.key),
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "nodeLeaseDurationSeconds": grace_seconds * 4 // 5,  # it is renewed four times as often
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.namespace}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [BRIDGE_ADDRESS],
        "clusterDomain": DOMAIN,
        "resolvConf": str(node.folder / "resolv.conf"),
        "podLogsDir": str(node.folder / "logs"),
        # disk and memory are shared with the machine, and kubelet takes the active page cache for used
        # memory (kubernetes#43916): evict only if the disk is almost full, and leave memory to the kernel
        "evictionHard": {"nodefs.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }


_SHARED_SOCKET = "device-plugins/kubelet.sock: bind: address already in use"
"""In the log of a kubelet that lost the race for the one path that kubelets share, and has exited."""


def start(node: Node) -> None:
    """Start kubelet and kube-proxy; containerd must be running."""
    _start_kubelet(node)
    flags = [
        f"--kubeconfig={node.folder / 'kube-proxy.kubeconfig'}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={POD_RANGE}",
        f"--hostname-override={node.name}",
        "--conntrack-max-per-core=0",
    ]
    _start_inside(node, "kube-proxy", flags)


def _start_kubelet(node: Node) -> None:
    folder = node.folder
    flags = [
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={folder / 'kubelet.kubeconfig'}",
        f"--root-dir={folder / 'kubelet'}",
        f"--cert-dir={folder / 'kubelet-certificates'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--node-labels={fake_gpus.label_flag()}",
    ]
    _start_inside(node, "kubelet", flags)


def _start_inside(node: Node, name: str, flags: list[str]) -> None:
    processes.start(node.process(name), [path(name), *flags], namespace=node.namespace)


def wait_ready(node: Node) -> None:
    """Wait until the node is ready.

    Raises ClusterError with the end of the log if a program of the node has exited.
    """

    kubelet = node.process("kubelet")

    def ready() -> bool:
        if not processes.is_running(kubelet) and _SHARED_SOCKET in processes.log_tail(kubelet):
            _start_kubelet(node)
        for name in PROGRAMS:
            processes.require_running(node.process(name))
        return is_ready(node)

    wait_until(ready, f"{node.name} ready", seconds=READY_SECONDS)


def is_ready(node: Node) -> bool:
    """Return whether the node's condition Ready is True."""
    items = kubectl.get("nodes")["items"]
    own = [item for item in items if item["metadata"]["name"] == node.name]
    conditions = [condition for item in own for condition in item["status"]["conditions"]]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def disconnect(node: Node) -> None:
    """Disconnect the node from the network; it keeps running. `reconnect` undoes it."""
    network.disconnect(node)


def reconnect(node: Node) -> None:
    """Connect the node to the network again."""
    network.reconnect(node)


def power_off(node: Node) -> None:
    """Kill everything on the node, including containers. `power_on` undoes it."""
    processes.stop(node.process(name) for name in PROGRAMS)
    containerd.kill_containers(node)


def power_on(node: Node) -> None:
    """Start the node's programs with its existing disk, and wait until it is ready."""
    containerd.start(node)
    start(node)
    fake_gpus.set_capacity(node.name)
    wait_ready(node)
