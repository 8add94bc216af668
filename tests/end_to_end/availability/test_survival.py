"""The operator on a real cluster: a leader is stopped, frozen or killed, is idle, a node is lost."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import lifecycle
from cluster.kubectl import Manifest
from cluster.layout import Node, nodes
from cluster.lifecycle import NODE_GRACE_SECONDS
from cluster.nodes import node
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.availability.gateway import Gateway, Request
from tests.end_to_end.stage import RUN, Operator, job, losses, ready_nodes, step, wait_for

from fluxtrain_operator.controller.pollers import PROGRESS_SECONDS

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
EVICTION_SECONDS = NODE_GRACE_SECONDS + 300
"""How long Kubernetes takes: the grace period of a node, and how long pods tolerate a lost node."""


class Replica(Operator):
    """A replica of the operator behind its own gateway."""

    def __init__(self, kubectl: Kubectl, name: str, folder: Path) -> None:
        folder.mkdir()
        self.gateway = Gateway(kubectl.kubeconfig, folder)
        super().__init__(kubectl, NAMESPACE, folder, name, self.gateway.kubeconfig)

    def start(self) -> None:
        self.gateway.start()
        super().start()

    def send(self, signum: int) -> float:
        """Send a signal; return the time."""
        assert self.process is not None
        self.process.send_signal(signum)
        return time.monotonic()

    def led_at(self) -> float:
        """Return the time at which it acquired the Lease."""
        writes = [r.at for r in self.gateway.requests if r.for_lease and r.method != "GET"]
        return min(writes)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz") as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


class Replicas:
    """The replicas of the operator and its jobs."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self.kubectl, self.folder = kubectl, folder
        self.output = folder / "output"
        self.replicas: list[Replica] = []

    def start_replica(self) -> Replica:
        """Start another replica; return it when it is ready."""
        name = chr(ord("a") + len(self.replicas))
        replica = Replica(self.kubectl, name, self.folder / name)
        self.replicas.append(replica)
        replica.start()
        wait_for(replica.ready, f"{name} is ready: {replica.log()}")
        return replica

    def holder(self) -> str:
        """Return the holder of the Lease, without the suffix of the process."""
        lease = self.kubectl.get("lease", LEASE, f"--namespace={NAMESPACE}")
        return str(lease["spec"].get("holderIdentity", "")).partition("_")[0]

    def leader(self) -> Replica:
        """Wait for a leader and return it."""
        leaders: list[Replica] = []

        def is_led() -> bool:
            holder = self.holder()
            leaders[:] = [r for r in self.replicas if r.identity == holder]
            return bool(leaders)

        wait_for(is_led, "a replica leads")
        return leaders[0]

    def stop(self) -> None:
        for replica in self.replicas:
            replica.stop(signal.SIGKILL)
            replica.gateway.stop()

    def status(self) -> Manifest:
        return stage.status(self.kubectl, NAMESPACE, JOB)

    def pods(self, name: str = JOB) -> dict[str, Manifest]:
        pods = self.kubectl.get(
            "pods", f"--selector=fluxtrain.dev/job={name}", f"--namespace={NAMESPACE}"
        )
        return {pod["metadata"]["name"]: pod for pod in pods["items"]}

    def wait_for_steps(self, count: int, replica: Replica) -> float:
        """Return the seconds until ``count`` further steps are done."""
        return stage.wait_for_steps(
            self.output, count, lambda: f"{self.status()}\n{replica.log()}", seconds=120
        )


@pytest.fixture(scope="module")
def replicas(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Return two replicas; a job that trains, one that is complete and one that is unschedulable."""
    replicas = Replicas(kubectl, tmp_path_factory.mktemp("survival"))
    stage.make_namespace(kubectl, NAMESPACE)
    try:
        stage.make_volumes(kubectl, NAMESPACE, replicas.output)
        apply_jobs(kubectl)
        first, _ = replicas.start_replica(), replicas.start_replica()
        wait_for(
            lambda: step(status := replicas.status()) >= 1 and status["nodes"]["ready"] == 2,
            first.log,
            seconds=240,
        )
        yield replicas
    finally:
        replicas.stop()
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
    """Return the requests that write, except those of the leader election."""
    return [str(r) for r in requests if r.method != "GET" and not r.for_lease]


def assert_no_duplicates(replicas: Replicas) -> None:
    """Check that no pod was restarted or duplicated, and no step is missing."""
    running = [p for p in replicas.pods().values() if "deletionTimestamp" not in p["metadata"]]
    kinds = Counter(p["metadata"]["labels"]["app.kubernetes.io/component"] for p in running)
    assert kinds == {"trainer": 2, "rendezvous": 1}
    steps = list(losses(replicas.output))
    assert steps == list(range(1, len(steps) + 1))
    assert replicas.status()["restarts"]["gang"] == 0


def test_a_stopped_leader_hands_over_to_the_standby(replicas: Replicas) -> None:
    leader = replicas.leader()
    (other,) = [r for r in replicas.replicas if r is not leader]
    assert leader.ready()
    assert other.ready(), "ready means ready to take over"
    assert {r.method for r in other.gateway.requests} <= {"GET", "WATCH"}, "a standby only reads"
    before = replicas.pods()
    stopped = leader.send(signal.SIGTERM)
    wait_for(lambda: replicas.holder() == other.identity, other.log)
    print(f"SIGTERM: the other replica leads after {other.led_at() - stopped:.1f} s")
    assert leader.process is not None
    assert leader.process.wait(30) == 0
    replicas.wait_for_steps(3, other)
    assert uids(replicas.pods()) == uids(before)
    assert_no_duplicates(replicas)


def uids(pods: dict[str, Manifest]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}


def test_a_pod_that_was_deleted_without_a_watch_is_replaced(replicas: Replicas) -> None:
    """As after a restart of the API server: the watch expires and the pods are listed again."""
    replica = replicas.leader()
    before = uids(replicas.pods("waiting"))
    replica.gateway.hide("pods")
    try:
        replicas.kubectl("delete", "pod", "waiting-1", "--now", f"--namespace={NAMESPACE}")
    finally:
        shown = time.monotonic()
        replica.gateway.show()
    wait_for(
        lambda: len(new := uids(replicas.pods("waiting"))) == len(before) and new != before,
        replica.log,
    )
    print(f"deleted unwatched: replaced after {time.monotonic() - shown:.1f} s")
    status_path = f"/fluxtrainings/{JOB}/status"  # of the job that trains
    wait_for(  # so that the next test starts without pending work
        lambda: all(status_path in c for c in changes(replica.gateway.since(time.monotonic() - 5))),
        replica.log,
    )


@pytest.mark.proof
def test_a_frozen_leader_writes_nothing_after_it_lost_the_lease(replicas: Replicas) -> None:
    frozen, other = replicas.leader(), replicas.start_replica()
    before = replicas.pods()
    stopped = frozen.send(signal.SIGSTOP)
    wait_for(lambda: replicas.holder() == other.identity, other.log)
    print(f"SIGSTOP: the other replica leads after {other.led_at() - stopped:.1f} s")
    old = uids(replicas.pods("waiting"))
    replicas.kubectl("delete", "pod", "waiting-1", "--now", f"--namespace={NAMESPACE}")
    wait_for(  # the frozen one would do the same if it had seen the event
        lambda: len(new := uids(replicas.pods("waiting"))) == len(old) and new != old, other.log
    )
    thawed = frozen.send(signal.SIGCONT)
    assert frozen.process is not None
    assert frozen.process.wait(30) == 1, "kubelet restarts it"
    print(f"SIGCONT: it has exited after {time.monotonic() - thawed:.1f} s")
    assert changes(frozen.gateway.since(stopped + 1)) == [], "it writes nothing"
    assert replicas.holder() == other.identity
    assert len(replicas.pods("waiting")) == len(old)
    assert uids(replicas.pods()) == uids(before)
    replicas.wait_for_steps(3, other)
    assert_no_duplicates(replicas)


def test_an_idle_operator_sends_no_requests(replicas: Replicas) -> None:
    leader = replicas.leader()
    began = time.monotonic()
    time.sleep(IDLE_SECONDS)
    requests = leader.gateway.since(began)
    lease = Counter(request.method for request in requests if request.for_lease)
    others = Counter(str(request) for request in requests if not request.for_lease)
    progress = f"PUT /apis/fluxtrain.dev/v1alpha1/namespaces/{NAMESPACE}/fluxtrainings/{JOB}/status"
    print(
        f"idle for {IDLE_SECONDS:.0f} s: Lease {dict(lease)}, progress of the job that trains "
        f"{(num_writes := others.pop(progress, 0))} status writes, all else {dict(others)}"
    )
    assert others == {}
    assert num_writes <= IDLE_SECONDS // PROGRESS_SECONDS + 1
    assert set(lease) == {"PUT"}


def running(replicas: Replicas) -> set[str]:
    return {
        name for name, pod in replicas.pods().items() if pod["status"].get("phase") == "Running"
    }


@contextmanager
def powered_off(victim: Node) -> Iterator[float]:
    """Power a node off; yield the time. The lock keeps `cluster.up` from powering it on."""
    with lifecycle.lock():
        began = time.monotonic()
        node.power_off(victim)
        try:
            yield began
        finally:
            node.power_on(victim)


@pytest.mark.proof
def test_a_node_and_the_leader_are_lost_together(replicas: Replicas) -> None:
    leader, other = replicas.leader(), replicas.start_replica()
    before = replicas.pods()
    store = before[f"{JOB}-rendezvous"]["spec"]["nodeName"]
    lost = next(n for n, p in before.items() if p["spec"]["nodeName"] != store)
    (victim,) = [n for n in nodes() if n.name == before[lost]["spec"]["nodeName"]]
    with powered_off(victim) as began:
        killed = leader.send(signal.SIGKILL)
        replicas.wait_for_steps(3, other)
        print(
            f"node lost: further steps on the remaining nodes after {time.monotonic() - began:.1f} s"
        )
        wait_for(lambda: replicas.holder() == other.identity, other.log)
        print(f"SIGKILL: the other replica leads after {other.led_at() - killed:.1f} s")
        wait_for(lambda: victim.name not in ready_nodes(other.kubectl), "the node is not ready")
        noticed = time.monotonic() - began
        wait_for(lambda: running(replicas) - set(before) != set(), other.log)
        replaced = time.monotonic() - began
        print(
            f"the node is not ready after {noticed:.1f} s; our replacement runs "
            f"{replaced - noticed:.1f} s later (Kubernetes alone: evicted after {EVICTION_SECONDS} s)"
        )
        assert lost in replicas.pods(), "its pod object exists until the node is back or deleted"
        replicas.wait_for_steps(3, other)
    print(f"the node's power was off for {time.monotonic() - began:.1f} s")
    wait_for(lambda: lost not in replicas.pods(), other.log)
    replicas.wait_for_steps(3, other)
    assert_no_duplicates(replicas)
