"""The rules that pods get for NetworkPolicies, compared with what the policies say."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.policies.network_policies import State

NAMESPACES = {"a": {"name": "a"}, "b": {"name": "b"}}


def pod(namespace: str, address: str, host: bool = False, **labels: str) -> Manifest:
    return {
        "metadata": {"namespace": namespace, "labels": labels},
        "spec": {"hostNetwork": host},
        "status": {"phase": "Running", "podIP": address},
    }


def policy(**spec: Any) -> Manifest:
    types = [name.capitalize() for name in ("ingress", "egress") if name in spec]
    selector = {"matchLabels": {"job": "x"}}
    return {
        "metadata": {"namespace": "a"},
        "spec": {"podSelector": selector, "policyTypes": types, **spec},
    }


PODS = [
    pod("a", "10.0.0.1", job="x"),
    pod("a", "10.0.0.2", job="x"),
    pod("a", "10.0.0.3", job="y"),
    pod("b", "10.0.0.4", job="x"),
    pod("b", "10.0.0.5", app="prometheus"),
    pod("b", "10.0.0.6", True, app="prometheus"),
]
SELF = {"podSelector": {"matchLabels": {"job": "x"}}}
PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"name": "b"}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}


def accepted(chain: str, *policies: Manifest, of: Manifest = PODS[0]) -> list[str]:
    """Return what ``chain`` of a pod accepts beside answers, itself and its node."""
    lines = State(PODS, policies, NAMESPACES).rules(of, "10.0.0.254").splitlines()
    own = (f"-A {chain} -i", f"-A {chain} -o", f"-A {chain} -m", f"-A {chain} -s 10.0.0.254 ")
    rules = [line for line in lines if line.startswith(f"-A {chain}") and not line.startswith(own)]
    prefix = f":{chain} "
    (default,) = (line.removeprefix(prefix).split()[0] for line in lines if line.startswith(prefix))
    return [default, *(rule.removeprefix(f"-A {chain} ") for rule in rules)]


def test_a_pod_without_a_policy_accepts_all() -> None:
    ours = policy(ingress=[])
    assert accepted("INPUT", ours) == ["DROP"]
    assert accepted("OUTPUT", ours) == ["ACCEPT"], "the policy is of ingress only"
    for other in PODS[2:4]:  # of another job, of another namespace
        assert accepted("INPUT", ours, of=other) == ["ACCEPT"]


def test_peers_are_pods_of_the_namespaces_that_are_selected() -> None:
    port = {"port": 9464, "protocol": "TCP"}
    ours = policy(ingress=[{"from": [SELF]}, {"from": [PROMETHEUS], "ports": [port]}])
    assert accepted("INPUT", ours) == [
        "DROP",
        "-s 10.0.0.1 -j ACCEPT",
        "-s 10.0.0.2 -j ACCEPT",
        "-s 10.0.0.5 -p tcp --dport 9464 -j ACCEPT",
    ]
    everywhere = policy(ingress=[{"from": [{"namespaceSelector": {}}]}])
    assert len(accepted("INPUT", everywhere)) == 1 + 5, "no pod on the host network"


def test_peers_may_be_addresses_and_egress_is_limited_likewise() -> None:
    block = {"ipBlock": {"cidr": "10.9.0.0/16"}}
    ours = policy(egress=[{"to": [block], "ports": [{"port": 53, "protocol": "UDP"}]}, {}])
    assert accepted("OUTPUT", ours) == [
        "DROP",
        "-d 10.9.0.0/16 -p udp --dport 53 -j ACCEPT",
        "-d 0.0.0.0/0 -j ACCEPT",
    ]
    assert accepted("INPUT", ours) == ["ACCEPT"]


@pytest.mark.parametrize(
    "rule",
    [
        {"from": [{"podSelector": {"matchExpressions": []}}]},
        {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]},
        {"ports": [{"port": "metrics"}]},
        {"ports": [{"port": 1, "endPort": 9}]},
    ],
)
def test_what_is_not_supported_is_an_error(rule: Manifest) -> None:
    with pytest.raises(ClusterError, match="supported"):
        accepted("INPUT", policy(ingress=[rule]))
