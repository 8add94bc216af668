"""A hostile tenant on a real API server: nothing crosses a boundary, and the neighbour's jobs do not wait.

The admission policy is not installed: the operator alone has to hold.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster.kubectl import Manifest
from tests.api_server.attacks import ATTACKS, FORBIDDEN, STATUSES, Attack
from tests.api_server.client import ApiServer, Kubectl, Plugin, make_job
from tests.api_server.empty_api_server import api_server
from tests.end_to_end.stage import Operator, condition, wait_for

pytestmark = pytest.mark.proof

HOSTILE, QUIET, STRICT_LEVEL = "hostile", "quiet", "hostile-restricted"
JOBS = "/apis/fluxtrain.dev/v1alpha1/namespaces/{}/fluxtrainings"
MAX_RATIO = 12.0
"""Of the neighbour's p99 beside the attacks to that before and after them: the machine may be loaded."""
_QUIET_JOBS = 20
_POLL_SECONDS = 0.02
_GIVE_UP_SECONDS = 60.0


@dataclass
class Neighbour:
    """A tenant who creates one small job after the other, and measures until its pod exists."""

    kubeconfig: Path
    seconds: list[float] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Measure until stopped."""
        server, number = ApiServer(self.kubeconfig), 0
        while not self._stopped.is_set():
            number += 1
            self.seconds.append(self._measure(server, f"small-{number}"))
            self._stopped.wait(0.05)
        server.close()

    def wait(self, count: int, meanwhile: str = "no attack") -> None:
        """Wait until ``count`` jobs were measured."""
        what = f"a job of the neighbour, during: {meanwhile}"
        wait_for(lambda: len(self.seconds) >= count, what, seconds=120)

    def stop(self) -> None:
        self._stopped.set()

    def _measure(self, server: ApiServer, name: str) -> float:
        job, pod = f"{JOBS.format(QUIET)}/{name}", f"/api/v1/namespaces/{QUIET}/pods/{name}-0"
        assert server.create(JOBS.format(QUIET), make_job(name, {}), dry_run=False).accepted
        start = time.monotonic()
        while not server.get(pod).accepted:
            if time.monotonic() - start > _GIVE_UP_SECONDS:
                return math.inf
            time.sleep(_POLL_SECONDS)
        took = time.monotonic() - start
        server.delete(job)
        return took


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


@dataclass
class Arena:
    """Two tenants' namespaces, and one operator for both."""

    kubectl: Kubectl
    operator: Operator
    quiet_uid: str
    before: Manifest
    """The neighbour's objects before the attacks, by kind and name."""
    rewritten: int = 0
    """How often the operator replaced a forged status."""

    def create(self, attack: Attack, number: int) -> int:
        """Create the jobs of ``attack``; return how many the API server accepted."""
        accepted = 0
        for n in range(attack.count):
            metadata = {**attack.metadata, "name": f"attack-{number}-{n}"}
            text = json.dumps(make_job("", attack.spec) | {"metadata": metadata})
            text = text.replace('"HERE"', attack.raw or '"HERE"').replace(
                '"UID"', f'"{self.quiet_uid}"'
            )
            accepted += self.kubectl.server.post(JOBS.format(HOSTILE), text).accepted
        if attack.status:
            self.forge(f"{JOBS.format(HOSTILE)}/attack-{number}-0", attack.status)
        return accepted

    def forge(self, job: str, status: Manifest) -> None:
        """Write ``status`` before the operator's and, three times, over it."""
        requests, written = self.kubectl.server, f"{job}/status"
        for _ in range(4):
            assert requests.merge(written, {"status": status}).code in (200, 422)
            before = requests.get(job).body["status"]
            time.sleep(0.3)
            self.rewritten += requests.get(job).body["status"] != before

    def objects(self, namespace: str) -> Manifest:
        """Return spec, labels and owners of all objects that are not of the neighbour's small jobs."""
        kinds = (
            "api/v1/{}/pods",
            "api/v1/{}/services",
            "api/v1/{}/configmaps",
            "api/v1/{}/secrets",
        )
        found = {}
        for kind in (*kinds, "apis/networking.k8s.io/v1/{}/networkpolicies"):
            items = self.kubectl.server.get(f"/{kind.format(f'namespaces/{namespace}')}").body[
                "items"
            ]
            for item in items:
                metadata = item["metadata"]
                if not metadata["name"].startswith(("small-", "kube-root")):
                    owners = [owner["uid"] for owner in metadata.get("ownerReferences", [])]
                    found[f"{kind} {metadata['name']}"] = (
                        metadata["uid"],
                        owners,
                        item.get("spec"),
                    )
        return found

    def pending(self) -> int:
        """Return how many hostile jobs have no status yet, of those that this operator manages."""
        columns = (
            "jsonpath={range .items[*]}{.spec.managedBy},{.status.observedGeneration}{'\\n'}{end}"
        )
        text = self.kubectl("get", "ft", f"--namespace={HOSTILE}", f"--output={columns}")
        return sum(line == "fluxtrain.dev/operator,-1" for line in text.splitlines())


@pytest.fixture(scope="module")
def server(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for an API server of its own, as some hostile jobs stay."""
    with api_server(tmp_path_factory.mktemp("hostile_server")) as kubectl:
        yield kubectl


@pytest.fixture(scope="module")
def arena(server: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    kubectl = server
    for namespace in (HOSTILE, QUIET, STRICT_LEVEL):
        kubectl("create", "namespace", namespace)
        kubectl("create", "serviceaccount", "default", f"--namespace={namespace}")
    level = "pod-security.kubernetes.io/enforce=restricted"
    kubectl("label", "namespace", STRICT_LEVEL, level)
    operator = Operator(kubectl, QUIET, tmp_path_factory.mktemp("hostile"), others=(HOSTILE,))
    operator.start()
    requests = kubectl.server
    response = requests.create(JOBS.format(QUIET), make_job("quiet", {}), dry_run=False)
    wait_for(
        lambda: requests.get(f"/api/v1/namespaces/{QUIET}/pods/quiet-0").accepted,
        operator.log,
        seconds=90,
    )
    arena = Arena(kubectl, operator, response.body["metadata"]["uid"], {})
    arena.before = arena.objects(QUIET)
    try:
        yield arena
    finally:
        operator.stop()


def test_no_attack_crosses_a_boundary_and_no_neighbour_waits(arena: Arena) -> None:
    assert len(ATTACKS) >= 100
    neighbour = Neighbour(arena.kubectl.kubeconfig)
    measuring = threading.Thread(target=neighbour.run)
    measuring.start()
    slowest: list[tuple[float, str]] = []
    process, accepted = arena.operator.process, 0
    try:
        neighbour.wait(_QUIET_JOBS)
        before = len(neighbour.seconds)
        for number, attack in enumerate(ATTACKS):
            known = len(neighbour.seconds)
            accepted += arena.create(attack, number)
            neighbour.wait(known + (1 if attack in FORBIDDEN else 3), attack.what)
            slowest.append((max(neighbour.seconds[known:]), attack.what))
        wait_for(lambda: arena.pending() == 0, arena.operator.log, seconds=120)
        after = len(neighbour.seconds)
        neighbour.wait(after + _QUIET_JOBS)
    finally:
        neighbour.stop()
        measuring.join()
    crossed = [*crossings(arena), *forbidden_that_run(arena)]
    print(
        f"{len(ATTACKS)} attacks, {accepted} jobs accepted by the API server, crossed: {len(crossed)}"
    )
    quiet = p99(neighbour.seconds[:before] + neighbour.seconds[after:])
    attacked = p99(neighbour.seconds[before:after])
    print(
        f"{after - before} jobs of the neighbour beside attacks: p99 {attacked:.3f} s until its pod, "
        f"{attacked / quiet:.1f} times that without ({quiet:.3f} s)"
    )
    print(f"{arena.rewritten} of {4 * len(STATUSES)} forged statuses were replaced at once")
    for seconds, what in sorted(slowest, reverse=True):
        print(f"  {seconds:.3f} s, {seconds / quiet:4.1f} times, at most during: {what}")
    assert not crossed, "\n".join(crossed)
    assert attacked < MAX_RATIO * quiet
    assert process is not None
    assert process.poll() is None, "the operator was not restarted"


def test_the_plugin_lists_all_jobs_beside_hostile_ones(arena: Arena, tmp_path: Path) -> None:
    done = Plugin(arena.kubectl, tmp_path, QUIET)("goodput", "--all-namespaces")
    assert done.returncode == 0, done.stderr
    rows = {tuple(line.split()[:2]) for line in done.stdout.splitlines()}
    assert {("NAMESPACE", "NAME"), (QUIET, "quiet")} <= rows
    assert len([row for row in rows if row[0] == HOSTILE]) > 100


def crossings(arena: Arena) -> Iterator[str]:
    """Yield what the attacks changed of the neighbour's, or got beyond level restricted."""
    after = arena.objects(QUIET)
    for name in arena.before.keys() | after.keys():
        if arena.before.get(name) != after.get(name):
            yield f"changed: {name}"
    server = arena.kubectl.server
    for pod in server.get(f"/api/v1/namespaces/{HOSTILE}/pods").body["items"]:
        if not pod["metadata"]["name"].endswith(("-0", "-rendezvous")):
            continue  # the others are as the first
        spec = {k: v for k, v in pod["spec"].items() if k != "nodeName"}
        copy = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "copy"}, "spec": spec}
        response = server.create(f"/api/v1/namespaces/{STRICT_LEVEL}/pods", copy)
        if not response.accepted:
            yield f"{pod['metadata']['name']}: {response.message}"
    for line in arena.operator.log().splitlines():
        if "Traceback" in line or (line.startswith("{") and '"level": "error"' in line):
            yield f"logged: {line[:300]}"


def forbidden_that_run(arena: Arena) -> Iterator[str]:
    """Yield the jobs beyond the policy that are not refused with the path."""
    for number, attack in enumerate(FORBIDDEN):
        response = arena.kubectl.server.get(f"{JOBS.format(HOSTILE)}/attack-{number}-0")
        if response.accepted:
            failed = condition(response.body.get("status", {}), "Failed")
            if (
                failed.get("reason") not in ("NotPermitted", "InvalidSpec")
                or "spec." not in failed["message"]
            ):
                yield f"{attack.what}: {failed}"
