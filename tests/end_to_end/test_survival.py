"""The operator survives on a real cluster: a leader that goes, freezes or dies, idle hours, a lost node."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import lifecycle, node
from cluster.kubectl import Kubectl, Manifest
from cluster.places import Node, nodes
from tests.end_to_end import stage
from tests.end_to_end.gateway import Gateway, Request
from tests.end_to_end.stage import RUN, Operator, job, losses, step, wait_for, wait_until

from fluxtrain_operator.controller.progress_poller import PROGRESS_SECONDS

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

NAMESPACE = "survival"
LEASE = "fluxtrain-operator"
JOB = "long"
IDLE_SECONDS = 20.0
DONE: Manifest = {
    "phase": "Complete",
    "attempt": 1,
    "conditions": [
        {
            "type": "Complete",
            "status": "True",
            "reason": "Succeeded",
            "message": "",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}
EVICTION_SECONDS = 40 + 300
"""What Kubernetes itself takes: the grace of a node, and how long pods tolerate a lost one."""


class Replica(Operator):
    """An operator of its own name, behind a gateway of its own."""

    def __init__(self, kubectl: Kubectl, name: str, folder: Path) -> None:
        folder.mkdir()
        self.gateway = Gateway(kubectl.kubeconfig, folder)
        super().__init__(kubectl, NAMESPACE, folder, name, self.gateway.kubeconfig)

    def start(self) -> None:
        self.gateway.start()
        super().start()

    def send(self, signum: int) -> float:
        """Send a signal; return the moment."""
        assert self.process is not None
        self.process.send_signal(signum)
        return time.monotonic()

    def led_at(self) -> float:
        """Return the moment at which it took the Lease."""
        taken = [r.at for r in self.gateway.requests if r.for_lease and r.method != "GET"]
        return min(taken)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz") as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


class Crew:
    """Two replicas, or those left of them, and the job that they look after."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self.kubectl, self.folder = kubectl, folder
        self.output = folder / "output"
        self.replicas: list[Replica] = []

    def hire(self) -> Replica:
        """Start one more replica, and return it when it is ready."""
        name = chr(ord("a") + len(self.replicas))
        replica = Replica(self.kubectl, name, self.folder / name)
        self.replicas.append(replica)
        replica.start()
        wait_for(replica.ready, f"{name} is ready: {replica.log()}")
        return replica

    def holder(self) -> str:
        """Return the name on the Lease, up to the process's own suffix."""
        lease = self.kubectl.get("lease", LEASE, f"--namespace={NAMESPACE}")
        return str(lease["spec"].get("holderIdentity", "")).partition("_")[0]

    def leader(self) -> Replica:
        """Return the replica that leads, once one does."""
        found: list[Replica] = []

        def led() -> bool:
            holder = self.holder()
            found[:] = [r for r in self.replicas if r.identity == holder]
            return bool(found)

        wait_for(led, "somebody leads")
        return found[0]

    def dismiss(self) -> None:
        for replica in self.replicas:
            replica.stop(signal.SIGKILL)
            replica.gateway.stop()

    def status(self) -> Manifest:
        return stage.status(self.kubectl, NAMESPACE, JOB)

    def pods(self, name: str = JOB) -> dict[str, Manifest]:
        found = self.kubectl.get("pods", f"--selector=fluxtrain.dev/job={name}", f"-n{NAMESPACE}")
        return {pod["metadata"]["name"]: pod for pod in found["items"]}

    def wait_for_steps(self, count: int, replica: Replica) -> float:
        """Return the seconds after which ``count`` steps more than now are done."""
        return stage.wait_for_steps(
            self.output, count, lambda: f"{self.status()}\n{replica.log()}", seconds=120
        )


@pytest.fixture(scope="module")
def crew(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Return two replicas; a job that trains, one that is done and one that finds no node."""
    found = Crew(kubectl, tmp_path_factory.mktemp("survival"))
    stage.make_namespace(kubectl, NAMESPACE)
    try:
        stage.make_volumes(kubectl, NAMESPACE, found.output)
        apply_jobs(kubectl)
        first, _ = found.hire(), found.hire()
        wait_until(lambda s: step(s) >= 1 and s["nodes"]["ready"] == 2, first, JOB)
        yield found
    finally:
        found.dismiss()
        stage.clear(kubectl, NAMESPACE)


def apply_jobs(kubectl: Kubectl) -> None:
    nowhere = {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}
    kubectl.apply(
        job(JOB, run={**RUN, "schedule": {"steps": 100_000}}),
        job("waiting", scheduling=nowhere, storage={}),
        job("done"),
        namespace=NAMESPACE,
    )
    where = ("ft", "done", f"--namespace={NAMESPACE}", "--subresource=status")
    kubectl("patch", *where, "--type=merge", f"--patch={json.dumps({'status': DONE})}")


def changes(requests: list[Request]) -> list[str]:
    """Return those that change something, apart from the election's."""
    return [str(r) for r in requests if r.method != "GET" and not r.for_lease]


def assert_nothing_is_doubled(crew: Crew) -> None:
    """Check that no pod was restarted or is there twice, and no step is missing."""
    running = [p for p in crew.pods().values() if "deletionTimestamp" not in p["metadata"]]
    kinds = Counter(p["metadata"]["labels"]["app.kubernetes.io/component"] for p in running)
    assert kinds == {"trainer": 2, "rendezvous": 1}
    steps = list(losses(crew.output))
    assert steps == list(range(1, len(steps) + 1))
    assert crew.status()["restarts"]["gang"] == 0


def test_one_leads_both_are_ready_and_a_leader_that_is_stopped_hands_over(crew: Crew) -> None:
    leader = crew.leader()
    (other,) = [r for r in crew.replicas if r is not leader]
    assert leader.ready()
    assert other.ready(), "ready means ready to take over"
    assert {str(r) for r in other.gateway.requests} == {
        f"GET /apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{LEASE}"
    }, "who stands by does nothing but look at the Lease"
    before = crew.pods()
    stopped = leader.send(signal.SIGTERM)
    wait_for(lambda: crew.holder() == other.identity, other.log)
    print(f"SIGTERM: the other replica leads after {other.led_at() - stopped:.1f} s")
    assert leader.process is not None
    assert leader.process.wait(30) == 0
    crew.wait_for_steps(3, other)
    assert uids(crew.pods()) == uids(before)
    assert_nothing_is_doubled(crew)


def uids(pods: dict[str, Manifest]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}


def test_a_pod_that_went_while_there_was_no_watch_is_replaced(crew: Crew) -> None:
    """As when the API server starts anew: it knows nothing of what was before, and lists what is left."""
    replica = crew.leader()
    before = uids(crew.pods("waiting"))
    replica.gateway.hide("pods")
    try:
        crew.kubectl("delete", "pod", "waiting-1", "--now", f"--namespace={NAMESPACE}")
    finally:
        shown = time.monotonic()
        replica.gateway.show()
    wait_for(
        lambda: len(new := uids(crew.pods("waiting"))) == len(before) and new != before, replica.log
    )
    print(f"deleted unwatched: replaced after {time.monotonic() - shown:.1f} s")
    told = f"/fluxtrainings/{JOB}/status"  # of the job that trains
    wait_for(  # so that the next test finds nothing to do
        lambda: all(told in c for c in changes(replica.gateway.since(time.monotonic() - 5))),
        replica.log,
    )


def test_a_leader_that_was_frozen_never_acts_again(crew: Crew) -> None:
    frozen, other = crew.leader(), crew.hire()
    before = crew.pods()
    stopped = frozen.send(signal.SIGSTOP)
    wait_for(lambda: crew.holder() == other.identity, other.log)
    print(f"SIGSTOP: the other replica leads after {other.led_at() - stopped:.1f} s")
    old = uids(crew.pods("waiting"))
    crew.kubectl("delete", "pod", "waiting-1", "--now", f"--namespace={NAMESPACE}")
    wait_for(  # what the frozen one would do as well, had it only heard of it
        lambda: len(new := uids(crew.pods("waiting"))) == len(old) and new != old, other.log
    )
    thawed = frozen.send(signal.SIGCONT)
    assert frozen.process is not None
    assert frozen.process.wait(30) == 1, "kubelet starts it anew"
    print(f"SIGCONT: it is gone after {time.monotonic() - thawed:.1f} s")
    assert changes(frozen.gateway.since(stopped + 1)) == [], "nothing was on its way any more"
    assert crew.holder() == other.identity
    assert len(crew.pods("waiting")) == len(old)
    assert uids(crew.pods()) == uids(before)
    crew.wait_for_steps(3, other)
    assert_nothing_is_doubled(crew)


def test_an_operator_with_nothing_to_do_asks_and_changes_nothing(crew: Crew) -> None:
    leader = crew.leader()
    began = time.monotonic()
    time.sleep(IDLE_SECONDS)
    seen = leader.gateway.since(began)
    lease = Counter(request.method for request in seen if request.for_lease)
    others = Counter(str(request) for request in seen if not request.for_lease)
    progress = f"PUT /apis/fluxtrain.dev/v1alpha1/namespaces/{NAMESPACE}/fluxtrainings/{JOB}/status"
    print(
        f"idle for {IDLE_SECONDS:.0f} s: Lease {dict(lease)}, progress of the job that trains "
        f"{(told := others.pop(progress, 0))} status writes, all else {dict(others)}"
    )
    assert others == {}
    assert told <= IDLE_SECONDS // PROGRESS_SECONDS + 1
    assert set(lease) == {"PUT"}


def running(crew: Crew) -> set[str]:
    return {name for name, pod in crew.pods().items() if pod["status"].get("phase") == "Running"}


@contextmanager
def off(victim: Node) -> Iterator[float]:
    """Have a node's power off; give the moment. Meanwhile nobody may find the cluster broken, and mend it."""
    with lifecycle.lock():
        began = time.monotonic()
        node.power_off(victim)
        try:
            yield began
        finally:
            node.power_on(victim)


def test_a_node_and_the_leader_are_lost_at_once(crew: Crew) -> None:
    leader, other = crew.leader(), crew.hire()
    before = crew.pods()
    store = before[f"{JOB}-rendezvous"]["spec"]["nodeName"]
    lost = next(n for n, p in before.items() if p["spec"]["nodeName"] != store)
    (victim,) = [n for n in nodes() if n.name == before[lost]["spec"]["nodeName"]]
    with off(victim) as began:
        killed = leader.send(signal.SIGKILL)
        crew.wait_for_steps(3, other)
        print(f"node lost: further steps on what is left after {time.monotonic() - began:.1f} s")
        wait_for(lambda: crew.holder() == other.identity, other.log)
        print(f"SIGKILL: the other replica leads after {other.led_at() - killed:.1f} s")
        wait_for(lambda: not node.is_ready(victim), "Kubernetes calls the node lost")
        noticed = time.monotonic() - began
        wait_for(lambda: running(crew) - set(before) != set(), other.log)
        replaced = time.monotonic() - began
        print(
            f"Kubernetes calls the node lost after {noticed:.1f} s; our replacement runs "
            f"{replaced - noticed:.1f} s later (Kubernetes alone: evicted after {EVICTION_SECONDS} s)"
        )
        assert lost in crew.pods(), "its name is taken until the node is back or given up"
        crew.wait_for_steps(3, other)
    print(f"the node's power was off for {time.monotonic() - began:.1f} s")
    wait_for(lambda: lost not in crew.pods(), other.log)
    crew.wait_for_steps(3, other)
    assert_nothing_is_doubled(crew)
