"""Three nodes, a batch that three ranks do not divide: one is lost, all are unheard of, it is scaled.

Every way of dividing the work leaves the losses that one rank has, and uses the same samples.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import lifecycle, node, processes
from cluster.kubectl import Kubectl, Manifest
from cluster.places import Node, nodes
from tests.end_to_end import stage
from tests.end_to_end.stage import RUN, condition, losses, wait_for
from tests.end_to_end.test_life import Scene, ledger, wanted

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

NAMESPACE = "three-nodes"
JOB = "odd"
ODD: Manifest = {**RUN, "schedule": {"steps": 100_000, "global_batch_size": 16}}
UNHEARD_SECONDS = 75.0
"""Kubernetes calls a node lost after 40 to 50 s without its heartbeat."""
EQUAL = 1e-4


class Three(Scene):
    """The namespace, its operator, and one job of two to three nodes."""

    def trains_on(self, count: int) -> None:
        """Wait until so many nodes train."""
        wait_for(
            lambda: self.status(JOB).get("nodes", {}).get("ready") == count,
            lambda: self.told(JOB, self.status(JOB)),
            seconds=240,
        )
        self.wait_for_steps(JOB, 5, f"{count} nodes")


@pytest.fixture(scope="module")
def scene(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    assert len(nodes()) >= 3, "the cluster of these tests has three nodes"
    found = Three(kubectl, tmp_path_factory.mktemp("three"), NAMESPACE)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, found.output)
    found.operator.start()
    found.apply(JOB, nodes={"min": 2, "max": 3}, run=ODD)
    try:
        yield found
    finally:
        found.operator.stop()
        stage.clear(kubectl, NAMESPACE)


def machine_of(pod: Manifest) -> Node:
    return next(each for each in nodes() if each.name == pod["spec"]["nodeName"])


@contextmanager
def unheard(victims: list[Node]) -> Iterator[None]:
    """Have the kubelets of ``victims`` stand still, as if the control plane heard nothing; pods go on."""
    pids = [processes.pid_of(each.process("kubelet")) for each in victims]
    with lifecycle.lock():
        try:
            for pid in pids:
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                assert pid is not None
                os.kill(pid, signal.SIGCONT)


def test_a_batch_that_the_ranks_do_not_divide_is_trained(scene: Three) -> None:
    scene.trains_on(3)
    assert scene.status(JOB)["restarts"]["gang"] == 0


def test_while_no_node_is_heard_of_nothing_is_deleted(scene: Three) -> None:
    before = scene.uids(JOB)
    with unheard(nodes()):
        began = time.monotonic()
        wait_for(lambda: not any(map(node.is_ready, nodes())), "all nodes are not ready")
        scene.wait_for_condition(JOB, "Healthy", "NodesUnknown")
        while time.monotonic() < began + UNHEARD_SECONDS:
            assert scene.uids(JOB) == before
            time.sleep(1)
        scene.wait_for_steps(JOB, 3, "no node heard of")
    wait_for(lambda: all(map(node.is_ready, nodes())), "all nodes are ready again")
    scene.wait(JOB, lambda s: condition(s, "Healthy")["status"] == "True")
    assert scene.uids(JOB) == before
    assert scene.status(JOB)["restarts"] == {"process": 0, "pod": 0, "gang": 0}


def test_a_node_is_lost_and_the_others_go_on(scene: Three) -> None:
    pods = scene.pods(JOB)
    store = pods[f"{JOB}-rendezvous"]["spec"]["nodeName"]
    lost = next(n for n, p in pods.items() if p["spec"]["nodeName"] != store)
    victim = machine_of(pods[lost])
    with lifecycle.lock():
        node.power_off(victim)
        try:
            scene.wait_for_steps(JOB, 5, "a node lost")
            wait_for(lambda: not node.is_ready(victim), "Kubernetes calls the node lost")
            scene.trains_on(3)  # what was lost runs elsewhere
        finally:
            node.power_on(victim)
    wait_for(lambda: lost not in scene.pods(JOB), scene.operator.log)
    assert scene.status(JOB)["restarts"]["gang"] == 0


def test_it_is_scaled_down_and_up_and_trains_as_one_rank_would(
    scene: Three, tmp_path: Path
) -> None:
    scene.scale(JOB, 2)
    scene.trains_on(2)
    scene.scale(JOB, 3)
    scene.trains_on(3)
    assert scene.status(JOB)["restarts"]["gang"] == 0
    scene.patch(JOB, lifecycle={"suspend": True})
    scene.wait(JOB, lambda s: s.get("phase") == "Suspended" and scene.pods(JOB) == {})
    ours = losses(scene.output)
    steps = max(ours)
    assert list(ours) == list(range(1, steps + 1))
    alone = losses(stage.laptop(tmp_path, {**ODD, "schedule": {**ODD["schedule"], "steps": steps}}))
    worst = max(abs(ours[step] - alone[step]) for step in alone)
    print(f"losses of {steps} steps on 2 and 3 nodes are within {worst:.1e} of one rank's")
    assert worst < EQUAL
    assert ledger(scene.output) == wanted(steps, ODD)
