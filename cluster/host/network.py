"""A bridge, and for each node a network namespace connected by a veth pair, with plain routes.

The machine's network is not changed: no address except the bridge's, no iptables rule, no forwarding. The
host reaches pods by routes, pods reach each other through their nodes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re

from cluster.commands import run
from cluster.errors import ClusterError, MachineError
from cluster.layout import (
    BRIDGE,
    BRIDGE_ADDRESS,
    EVERY_RANGE,
    FAKE_POD_RANGE,
    IS_IPV6,
    NODE_BITS,
    POD_RANGE,
    SERVICE_RANGE,
    Node,
)
from cluster.programs.packages import program

OUR_LINKS = re.compile(rf"{BRIDGE}|ft-node-\d")
OUR_NAMESPACES = re.compile(r"fluxtrain-node-\d")
OUR_RANGES = (f"{BRIDGE_ADDRESS}/{NODE_BITS}", POD_RANGE, SERVICE_RANGE, FAKE_POD_RANGE)
_FORWARD = f"/proc/sys/net/{'ipv6/conf/all/forwarding' if IS_IPV6 else 'ipv4/ip_forward'}"
_AT_ONCE = "nodad" if IS_IPV6 else ""
"""Of a new address: it is used without asking whether another machine has it."""


def require_free_ranges() -> None:
    """Raise MachineError if a route of the machine overlaps with our addresses."""
    ours = [ipaddress.ip_network(text, strict=False) for text in OUR_RANGES]
    family = "-6" if IS_IPV6 else "-4"
    for route in json.loads(run([program("ip"), family, "-json", "route", "show"]) or "[]"):
        with contextlib.suppress(ValueError):  # "default" is no network
            taken = ipaddress.ip_network(route["dst"])
            if any(taken.overlaps(network) for network in ours):
                raise MachineError(
                    f"{taken} is in use on {route.get('dev')}; the cluster needs {', '.join(OUR_RANGES)} "
                    "(another clone's cluster? `make cluster-down` there)"
                )


def create(nodes: list[Node]) -> None:
    """Create the bridge and the namespaces."""
    host = [
        f"link add {BRIDGE} type bridge",
        f"address add {BRIDGE_ADDRESS}/{NODE_BITS} dev {BRIDGE} {_AT_ONCE}",
        f"link set {BRIDGE} up",
    ]
    for node in nodes:
        host += [
            f"netns add {node.namespace}",
            f"link add {node.link} type veth peer name eth0 netns {node.namespace}",
            f"link set {node.link} master {BRIDGE} up",
            f"route add {node.pod_range} via {node.address}",
        ]
    _ip(host)
    for node in nodes:
        _set_up_inside(node, [other for other in nodes if other != node])


def _set_up_inside(node: Node, others: list[Node]) -> None:
    inside = [
        "link set lo up",
        f"address add {node.address}/{NODE_BITS} dev eth0 {_AT_ONCE}",
        "link set eth0 up",
        f"route add {EVERY_RANGE} via {BRIDGE_ADDRESS}",
        *(f"route add {other.pod_range} via {other.address}" for other in others),
    ]
    _ip(inside, "-netns", node.namespace)
    enter = [program("nsenter"), f"--net=/run/netns/{node.namespace}"]
    run([*enter, "tee", _FORWARD], stdin="1")


def disconnect(node: Node) -> None:
    """Disconnect the node from the bridge; the node and its pods keep running."""
    _ip([f"link set {node.link} down"])


def reconnect(node: Node) -> None:
    """Connect the node again."""
    _ip([f"link set {node.link} up"])


def remove() -> None:
    """Delete everything that `create` creates, even if incomplete."""
    listed = json.loads(run([program("ip"), "-json", "link", "show"]) or "[]")
    links = [link["ifname"] for link in listed if OUR_LINKS.fullmatch(link["ifname"])]
    spaces = json.loads(run([program("ip"), "-json", "netns", "list"]) or "[]")
    names = [space["name"] for space in spaces if OUR_NAMESPACES.fullmatch(space["name"])]
    # deleting a namespace deletes its veth pair: a link may be gone already
    for line in [f"link delete {link}" for link in links] + [f"netns delete {n}" for n in names]:
        with contextlib.suppress(ClusterError):
            _ip([line])


def _ip(lines: list[str], *options: str) -> None:
    run([program("ip"), *options, "-batch", "-"], stdin="\n".join(lines) + "\n")
