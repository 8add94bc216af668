"""NetworkPolicies as rules of iptables: what a pod's own network namespace must accept and drop.

Supported are labels (matchLabels), ranges of addresses and numbers of ports. What else a policy has is an
error, so that no test believes in a rule that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.layout import EVERY_RANGE, IS_IPV6

_SIDES = {"Ingress": ("INPUT", "ingress", "from", "-s"), "Egress": ("OUTPUT", "egress", "to", "-d")}
"""Direction -> chain of the pod, field of the policy, its peers, the option with their addresses."""


@dataclass(frozen=True)
class State:
    """What policies depend on."""

    pods: Sequence[Manifest]
    policies: Sequence[Manifest]
    namespaces: Mapping[str, Mapping[str, str]]
    """The labels of the namespaces."""

    def rules(self, pod: Manifest, gateway: str) -> str:
        """Return the input of iptables-restore for ``pod``.

        Its node may always connect, from ``gateway``: the kubelet does, and real network plugins let it.
        """
        lines = ["*filter"]
        for direction, (chain, *_) in _SIDES.items():
            policies = [p for p in self.policies if self._applies(p, pod, direction)]
            lines.append(f":{chain} {'DROP' if policies else 'ACCEPT'} [0:0]")
            if policies:
                lines += [
                    f"-A {chain} {'-i' if chain == 'INPUT' else '-o'} lo -j ACCEPT",
                    f"-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
                ]
                if IS_IPV6:  # without it no neighbour is found
                    lines.append(f"-A {chain} -p ipv6-icmp -j ACCEPT")
                if chain == "INPUT":
                    lines.append(f"-A {chain} -s {gateway} -j ACCEPT")
                for policy in policies:
                    lines += dict.fromkeys(self._accepted(policy, direction))
        return "\n".join([*lines, "COMMIT", ""])

    def _applies(self, policy: Manifest, pod: Manifest, direction: str) -> bool:
        spec = policy["spec"]
        return (
            policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
            and direction in spec["policyTypes"]
            and _matches(spec["podSelector"], _labels(pod))
        )

    def _accepted(self, policy: Manifest, direction: str) -> Iterator[str]:
        chain, field, peers, option = _SIDES[direction]
        for rule in policy["spec"].get(field, ()):
            targets = ["-j ACCEPT"]
            if "ports" in rule:
                targets = [_port(port) for port in rule["ports"]]
            sources = [f" {option} {EVERY_RANGE}"]
            if rule.get(peers):
                namespace = policy["metadata"]["namespace"]
                sources = [
                    s for peer in rule[peers] for s in self._addresses(peer, namespace, option)
                ]
            for source in sources:
                yield from (f"-A {chain}{source} {target}" for target in targets)

    def _addresses(self, peer: Manifest, namespace: str, option: str) -> Iterator[str]:
        if block := peer.get("ipBlock"):
            if block.get("except"):
                raise ClusterError(f"ipBlock.except is not supported: {block}")
            yield f" {option} {block['cidr']}"
            return
        for pod in self.pods:
            own = pod["metadata"]["namespace"]
            inside = own == namespace
            if "namespaceSelector" in peer:
                inside = _matches(peer["namespaceSelector"], self.namespaces.get(own, {}))
            if inside and _matches(peer.get("podSelector", {}), _labels(pod)) and has_network(pod):
                yield f" {option} {pod['status']['podIP']}"


def has_network(pod: Manifest) -> bool:
    """Return whether ``pod`` has an address of its own: policies do not see pods on the host network."""
    running = pod["status"].get("phase") in ("Pending", "Running")
    return running and bool(pod["status"].get("podIP")) and not pod["spec"].get("hostNetwork")


def _labels(manifest: Manifest) -> Mapping[str, str]:
    labels: Mapping[str, str] = manifest["metadata"].get("labels", {})
    return labels


def _matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    if selector.keys() - {"matchLabels"}:
        raise ClusterError(f"only matchLabels is supported: {selector}")
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _port(port: Manifest) -> str:
    number = port.get("port")
    if not isinstance(number, int) or "endPort" in port:
        raise ClusterError(f"only numbers of ports are supported: {port}")
    return f"-p {port.get('protocol', 'TCP').lower()} --dport {number} -j ACCEPT"
