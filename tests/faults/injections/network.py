"""Faults of the network: a node, the rendezvous pod, two ranks or the DNS cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cluster import control_plane, processes
from cluster.commands import run
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.layout import Node
from cluster.nodes import node
from cluster.programs.packages import program
from tests.faults.injections.processes import AGENT, RANK, RENDEZVOUS, pids, wait_until_ended
from tests.faults.target import Target, machine_of

DNS_SECONDS = 20.0


@contextmanager
def node_cut(target: Target) -> Iterator[None]:
    """Cut a node that the rendezvous service is not on, until its pod is replaced elsewhere."""
    before, victim = target.uids(), machine_of(target.expendable_pod)
    with cut(victim):
        target.wait_for_new_pods(before)
        yield


@contextmanager
def rendezvous_node_cut(target: Target) -> Iterator[None]:
    """Cut the node of the rendezvous service, until pods are replaced elsewhere."""
    before, victim = target.uids(), machine_of(target.rendezvous)
    with cut(victim):
        target.wait_for_new_pods(before)
        yield


@contextmanager
def rendezvous_cut(target: Target) -> Iterator[None]:
    """Drop all packets to the rendezvous pod, until it is replaced."""
    before, pod = target.uids(), target.rendezvous
    with firewall(pod, RENDEZVOUS, "INPUT"):
        target.wait_for_new_pods(before)
        yield


@contextmanager
def collective_hangs(target: Target) -> Iterator[None]:
    """Drop the packets between two ranks; their agents still reach the rendezvous service."""
    pod, peer = target.pod_of_rank(1), target.pod_of_rank(2)
    (rank,) = pids(pod, RANK)
    with firewall(pod, AGENT, "INPUT", "--source", peer["status"]["podIP"]):
        wait_until_ended(target, rank)
    yield


@contextmanager
def dns_lost(target: Target) -> Iterator[None]:
    """Stop the DNS, and delete the pod of a rank meanwhile."""
    processes.stop(["coredns"])
    try:
        time.sleep(DNS_SECONDS)
    finally:
        control_plane.start_dns()
        control_plane.wait_for_dns()
    yield


@contextmanager
def cut(victim: Node) -> Iterator[None]:
    """Disconnect a node, which keeps running."""
    node.disconnect(victim)
    try:
        yield
    finally:
        node.reconnect(victim)


@contextmanager
def firewall(pod: Manifest, program_name: str, chain: str, *match: str) -> Iterator[None]:
    """Drop packets in the network of ``pod``, as long as its program runs."""
    pid = pids(pod, program_name)[0]
    iptables = [program("nsenter"), f"--net=/proc/{pid}/ns/net", program("iptables"), "--wait"]
    rule = [chain, *match, "--jump", "DROP"]
    run([*iptables, "--insert", *rule])
    try:
        yield
    finally:
        with suppress(ClusterError):  # the pod is gone
            run([*iptables, "--delete", *rule])
