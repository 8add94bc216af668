"""containerd of one node: its configuration, its network for pods, its images, its containers."""

from __future__ import annotations

import json
from pathlib import Path

from cluster import processes
from cluster.commands import Arguments, run
from cluster.console import wait_until
from cluster.host import cgroups, mounts
from cluster.layout import EVERY_RANGE, Node
from cluster.programs.packages import CNI, program

PAUSE_IMAGE = "localhost/fluxtrain/pause:1"
RUNTIMES = ("containerd-shim-runc-v2", "runc", "ctr")
START_SECONDS = 30

CONFIG = """\
version = 2
root = "{folder}/images"
state = "{folder}/containers"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
# Without CAP_SYS_RESOURCE a container's score cannot be lowered, and runc would die of trying.
restrict_oom_score_adj = true
# Namespaces of pods lie below our folder, so that unmounting it removes them.
netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{folder}/cni"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{folder}/runc"
"""


def start(node: Node) -> None:
    """Start containerd and return when it listens: the kubelet would not wait for it.

    Raises ClusterError with the end of its log if it exits.
    """
    name = node.process("containerd")
    if not processes.is_running(name):  # one that runs would listen on, and nobody could reach it
        node.containerd_socket.unlink(missing_ok=True)
    config = node.folder / "containerd.toml"
    argv: Arguments = [program("containerd"), "--config", config, "--log-level", "warn"]
    processes.start(name, argv, namespace=node.namespace)

    def listens() -> bool:
        processes.require_running(name)
        return node.containerd_socket.exists()

    wait_until(listens, f"{name} listens", seconds=START_SECONDS, every=0.05)


def prepare(node: Node) -> None:
    """Write how containerd runs containers and gives pods addresses; make room for images."""
    values = {"folder": node.folder, "socket": node.containerd_socket, "cni": CNI}
    text = CONFIG.format(pause=PAUSE_IMAGE, **values)
    (node.folder / "containerd.toml").write_text(text)
    mounts.mount_tmpfs(node.folder / "images")
    folder = node.folder / "cni"
    folder.mkdir(exist_ok=True)
    (folder / "10-pods.conflist").write_text(json.dumps(_pod_network(node), indent=2))


def _pod_network(node: Node) -> dict[str, object]:
    """Return a bridge in the node whose pods are reached by routes, without NAT."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pod_range}]],
        "routes": [{"dst": EVERY_RANGE}],
        "dataDir": str(node.folder / "addresses"),
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": addresses,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": node.namespace, "plugins": [bridge, ports]}


def import_image(node: Node, archive: Path) -> None:
    """Import the image of an archive, under the name in the archive."""
    ctr(node, "images", "import", str(archive))


def has_image(node: Node, name: str) -> bool:
    """Return whether the node has the image ``name``."""
    return name in ctr(node, "images", "list", "--quiet").split()


def ctr(node: Node, *arguments: str) -> str:
    """Return the output of containerd's client, in the kubelet's namespace."""
    argv: Arguments = [program("ctr"), "--address", node.containerd_socket, "--namespace=k8s.io"]
    return run([*argv, *arguments], seconds=300)


def kill_containers(node: Node) -> None:
    """Kill all containers of the node and their shims, as a power loss would.

    containerd need not run. Containers that are being created meanwhile are killed too.
    """
    while pids := [*_runtimes(node), *cgroups.processes(node.namespace)]:
        processes.kill(pids)


def _runtimes(node: Node) -> list[int]:
    """Return the ids of containerd's helper processes on this node, found by paths in their arguments."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if _is_runtime(_arguments(pid), f"{node.folder}/")]


def _is_runtime(arguments: list[str], prefix: str) -> bool:
    name = Path(arguments[0]).name
    return name in RUNTIMES and any(argument.startswith(prefix) for argument in arguments)


def _arguments(pid: int) -> list[str]:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return [""]
    return line.decode(errors="replace").split("\0")
