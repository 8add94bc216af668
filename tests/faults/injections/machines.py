"""Faults of nodes: without power, without kubelet, without containerd, all unreachable."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster import lifecycle, processes
from cluster.layout import Node, nodes
from cluster.nodes import containerd, fake_gpus, node
from tests.end_to_end.stage import ready_nodes, wait_for
from tests.faults.target import Target, machine_of

NOT_READY_SECONDS = 60.0
UNKNOWN_SECONDS = 120.0
"""More than the 20 to 25 s after which a node is not ready in this cluster, and the operator's 20 s."""


GPU_STATE = "metricsexporter.amd.com.gpu.0.state"
UNHEALTHY_STEPS = 40


@contextmanager
def power_off(target: Target) -> Iterator[None]:
    """Power off a node that the rendezvous service is not on, until its pod is replaced elsewhere."""
    before, victim = target.uids(), machine_of(target.expendable_pod)
    with lifecycle.lock():
        node.power_off(victim)
        try:
            target.wait_for_new_pods(before)
            yield
        finally:
            node.power_on(victim)


@contextmanager
def kubelet_stopped(target: Target) -> Iterator[None]:
    """Stop a node's kubelet until the node is not ready for as long as the operator waits."""
    victim = machine_of(target.expendable_pod)
    programs = [victim.process(name) for name in ("kubelet", "kube-proxy")]  # started together
    with lifecycle.lock():
        processes.stop(programs)
        try:
            _wait_until_not_ready(target, victim)
            yield
        finally:
            node.start(victim)
            fake_gpus.set_capacity(victim.name)


@contextmanager
def containerd_stopped(target: Target) -> Iterator[None]:
    """Stop a node's containerd; its containers run on."""
    victim = machine_of(target.expendable_pod)
    with lifecycle.lock():
        processes.stop([victim.process("containerd")])
        try:
            _wait_until_not_ready(target, victim)
            yield
        finally:
            containerd.start(victim)


@contextmanager
def all_unknown(target: Target) -> Iterator[None]:
    """Freeze all kubelets, so that no node sends heartbeats."""
    with lifecycle.lock(), frozen([each.process("kubelet") for each in nodes()]):
        began = time.monotonic()
        target.wait_for_condition("Healthy", "NodesUnknown")
        time.sleep(max(0.0, began + UNKNOWN_SECONDS - time.monotonic()))
        yield


@contextmanager
def gpus_unhealthy(target: Target) -> Iterator[None]:
    """Label all nodes as AMD's device metrics exporter labels those with unhealthy GPUs."""
    before = target.uids()
    target.kubectl("label", "nodes", "--all", "--overwrite", f"{GPU_STATE}=unhealthy")
    try:
        target.wait_for_condition("Healthy", "UnhealthyGPUs")
        target.wait_for_steps(UNHEALTHY_STEPS)
        assert target.uids() == before, "a pod was replaced"
        yield
    finally:
        target.kubectl("label", "nodes", "--all", f"{GPU_STATE}-")


@contextmanager
def frozen(programs: Sequence[str]) -> Iterator[None]:
    """Freeze programs of the cluster."""
    pids = [pid for name in programs if (pid := processes.pid_of(name)) is not None]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _wait_until_not_ready(target: Target, victim: Node) -> None:
    wait_for(
        lambda: victim.name not in ready_nodes(target.kubectl),
        f"{victim.name} is not ready",
        seconds=NOT_READY_SECONDS,
    )
