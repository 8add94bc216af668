"""Enforces NetworkPolicies on request: rules of iptables in the network namespaces of the pods."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.commands import run
from cluster.kubectl import Kubectl
from cluster.layout import IS_IPV6, Node, nodes
from cluster.policies.network_policies import State, has_network
from cluster.programs.packages import program

RESTORE = "ip6tables-restore" if IS_IPV6 else "iptables-restore"


def enforce(kubectl: Kubectl) -> int:
    """Make the pods obey the policies that exist now; return how many pods.

    Nothing is watched: call it again after a change. Pods that come later are not limited.
    """
    state = read_state(kubectl)
    found = pod_namespaces()
    count = 0
    for pod in filter(has_network, state.pods):
        if place := found.get(pod["status"]["podIP"]):
            node, namespace = place
            _restore(namespace, state.rules(pod, node.gateway))
            count += 1
    return count


def lift() -> None:
    """Remove the rules of all pods."""
    for _, namespace in pod_namespaces().values():
        _restore(namespace, "*filter\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n")


def read_state(kubectl: Kubectl) -> State:
    """Return pods, policies and namespaces of the cluster."""
    kinds = "pods,networkpolicies,namespaces"
    items = json.loads(kubectl("get", kinds, "--all-namespaces", "--output=json"))["items"]
    pods, policies, namespaces = (
        [item for item in items if item["kind"] == kind]
        for kind in ("Pod", "NetworkPolicy", "Namespace")
    )
    labels = {item["metadata"]["name"]: item["metadata"].get("labels", {}) for item in namespaces}
    return State(pods, policies, labels)


def pod_namespaces() -> dict[str, tuple[Node, Path]]:
    """Return node and network namespace of each pod by its address."""
    found = {}
    for node in nodes():
        folder = node.folder / "containers" / "io.containerd.grpc.v1.cri" / "netns"
        for path in folder.glob("*") if folder.exists() else ():
            enter = [program("nsenter"), f"--net={path}"]
            links = json.loads(run([*enter, program("ip"), "-json", "address"]) or "[]")
            for link in links:
                for address in link.get("addr_info", []):
                    if link["ifname"] != "lo":
                        found[address["local"]] = (node, path)
    return found


def _restore(namespace: Path, rules: str) -> None:
    run([program("nsenter"), f"--net={namespace}", program(RESTORE)], stdin=rules)
