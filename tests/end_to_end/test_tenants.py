"""Many tenants, one operator: what is whose, and a job that is too much, on an API server without nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import cluster
import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, Manifest
from tests.end_to_end.empty_api_server import empty_api_server
from tests.end_to_end.stage import ROOT, Operator, condition, wait_for

from fluxtrain_operator.bounds import MAX_BYTES

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's programs"),
    pytest.mark.timeout(900),
]

NAMESPACE = "tenants"
IN = f"--namespace={NAMESPACE}"
DEEP = '{"a":' * 2000 + "1" + "}" * 2000


class Scene:
    """The operator's process, and what its API server has."""

    def __init__(self, kubectl: Kubectl, operator: Operator) -> None:
        self.kubectl, self.operator = kubectl, operator

    def apply(self, name: str, **spec: Any) -> None:
        manifest = {
            "apiVersion": "fluxtrain.dev/v1alpha1",
            "kind": "FluxTraining",
            "metadata": {"name": name},
            "spec": {"run": {"preset": "micro"}, **spec},
        }
        self.kubectl.apply(manifest, namespace=NAMESPACE)

    def create(self, kind: str, name: str, **fields: Any) -> None:
        """Create a stranger's object."""
        manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **fields}
        self.kubectl.create(manifest, namespace=NAMESPACE)

    def get(self, kind: str, name: str) -> Manifest:
        return self.kubectl.get(kind, name, IN)

    def status(self, job: str) -> Manifest:
        """Return the status alone: Python cannot read some of the specs."""
        text = self.kubectl("get", "ft", job, IN, "--output=jsonpath={.status}")
        found: Manifest = json.loads(text or "{}")
        return found

    def pods(self, job: str) -> list[str]:
        """Return the names of the pods that the job which is there now controls."""
        uid = self.kubectl("get", "ft", job, IN, "--output=jsonpath={.metadata.uid}")
        found = self.kubectl.get("pods", IN)["items"]
        owners = {p["metadata"]["name"]: p["metadata"].get("ownerReferences", []) for p in found}
        return sorted(
            name for name, listed in owners.items() if any(o["uid"] == uid for o in listed)
        )

    def wait(self, job: str, kind: str, reason: str, *, seconds: float = 60) -> str:
        """Wait until a condition has ``reason``; return its message."""

        def says() -> bool:
            return condition(self.status(job), kind).get("reason") == reason

        wait_for(says, lambda: self.told(job), seconds=seconds)
        return str(condition(self.status(job), kind)["message"])

    def wait_for_pods(self, job: str, count: int, *, seconds: float = 90) -> None:
        wait_for(lambda: len(self.pods(job)) == count, lambda: self.told(job), seconds=seconds)

    def told(self, job: str) -> str:
        return f"{json.dumps(self.status(job), indent=1)}\n{self.operator.log()}"

    def warnings(self, job: str) -> list[str]:
        found = self.kubectl.get("events.events.k8s.io", IN)["items"]
        return [
            event["reason"]
            for event in found
            if event["regarding"]["name"] == job and event["type"] == "Warning"
        ]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    try:
        cluster.prepare()
    except ClusterError as error:
        pytest.skip(f"the cluster's parts cannot be had here: {error}")
    folder = tmp_path_factory.mktemp("tenants")
    with empty_api_server(folder) as kubectl:
        kubectl("apply", "--server-side", f"--filename={ROOT / 'manifests' / 'crd.yaml'}")
        kubectl("wait", "--for=condition=Established", "crd/fluxtrainings.fluxtrain.dev")
        kubectl("create", "namespace", NAMESPACE)
        kubectl("create", "serviceaccount", "default", IN)
        operator = Operator(kubectl, NAMESPACE, folder)
        operator.start()
        try:
            yield Scene(kubectl, operator)
        finally:
            operator.stop()


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        ("ConfigMap", "pay-config", {"data": {"price": "7"}}),
        ("Service", "pay", {"spec": {"ports": [{"port": 80}], "selector": {"app": "shop"}}}),
        ("Pod", "pay-rendezvous", {"spec": {"containers": [{"name": "a", "image": "a:1"}]}}),
    ],
)
def test_a_strangers_object_is_left_alone_and_the_job_waits_for_its_name(
    scene: Scene, kind: str, name: str, fields: Manifest
) -> None:
    scene.create(kind, name, **fields)
    before = scene.get(kind, name)
    scene.apply("pay")
    message = scene.wait("pay", "Ready", "NameConflict")
    assert f"{kind} {name} already exists and belongs to nobody" in message
    time.sleep(12)  # of retries
    assert scene.get(kind, name) == before
    assert scene.warnings("pay").count("NameConflict") == 1
    if kind != "Pod":
        assert scene.pods("pay") == []
    scene.kubectl("delete", kind, name, IN, "--grace-period=0", "--force")
    scene.wait_for_pods("pay", 2)
    scene.kubectl("delete", "ft", "pay", IN)
    clear(scene)


def clear(scene: Scene) -> None:
    """Delete what the garbage collector would."""
    kinds = "pods,configmaps,services,networkpolicies,poddisruptionbudgets,events"
    scene.kubectl("delete", kinds, "--all", IN, "--grace-period=0", "--force", seconds=120)


def test_two_jobs_that_share_the_name_of_a_service_are_told_apart(scene: Scene) -> None:
    scene.apply("1")
    scene.wait_for_pods("1", 2)
    scene.apply("ft-1")
    message = scene.wait("ft-1", "Ready", "NameConflict")
    assert "Service ft-1 already exists and belongs to FluxTraining 1" in message
    scene.kubectl("delete", "ft", "1", IN)
    scene.kubectl("delete", "service", "ft-1", IN)
    scene.wait_for_pods("ft-1", 2)
    scene.kubectl("delete", "ft", "ft-1", IN)
    clear(scene)


@pytest.mark.parametrize(
    ("cascade", "reason"), [("orphan", "NameConflict"), ("background", "PredecessorLeaving")]
)
def test_a_job_that_is_applied_anew_does_not_take_over_the_pods_of_the_one_before(
    scene: Scene, cascade: str, reason: str
) -> None:
    """There is no garbage collector here: what it would do to the pods, the test does."""
    scene.apply("again")
    scene.wait_for_pods("again", 2)
    done = {"status": {"phase": "Succeeded", "containerStatuses": [FINISHED]}}
    scene.kubectl(
        "patch", "ft", "again", IN, "--type=merge", '--patch={"metadata":{"finalizers":null}}'
    )
    scene.kubectl("delete", "ft", "again", IN, "--cascade=background")
    if cascade == "orphan":
        for kind in (
            "pod/again-0",
            "pod/again-rendezvous",
            "configmap/again-config",
            "service/again",
            "networkpolicy/again-network",
        ):
            scene.kubectl(
                "patch", kind, IN, "--type=merge", '--patch={"metadata":{"ownerReferences":null}}'
            )
    scene.kubectl(
        "patch",
        "pod",
        "again-0",
        IN,
        "--subresource=status",
        "--type=merge",
        f"--patch={json.dumps(done)}",
    )
    scene.apply("again")
    scene.wait("again", "Ready", reason)
    time.sleep(3)
    assert scene.pods("again") == []
    found = scene.status("again")
    assert found["phase"] == "Pending"
    clear(scene)
    scene.wait_for_pods("again", 2)
    scene.kubectl("delete", "ft", "again", IN)
    clear(scene)


FINISHED = {
    "name": "trainer",
    "image": "a:1",
    "imageID": "a",
    "ready": False,
    "restartCount": 0,
    "state": {"terminated": {"exitCode": 0}},
}


def test_a_quota_that_is_used_up_is_told_and_waited_for(scene: Scene) -> None:
    scene.kubectl("create", "quota", "small", IN, "--hard=pods=1")
    used = {"status": {"hard": {"pods": "1"}, "used": {"pods": "0"}}}
    patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps(used)}")
    scene.kubectl("patch", "quota", "small", IN, *patch)  # as its controller would
    scene.apply("big", nodes={"min": 2, "max": 2})
    message = scene.wait("big", "Admitted", "QuotaExceeded")
    assert "exceeded quota: small" in message
    time.sleep(8)
    assert scene.warnings("big").count("QuotaExceeded") == 1
    scene.kubectl("delete", "quota", "small", IN)
    scene.wait_for_pods("big", 3)
    assert scene.status("big")["restarts"]["pod"] == 0
    scene.kubectl("delete", "ft", "big", IN)
    clear(scene)


def test_an_object_that_took_the_place_of_ours_is_not_changed(scene: Scene) -> None:
    scene.apply("swap")
    scene.wait_for_pods("swap", 2)
    scene.kubectl("delete", "configmap", "swap-config", IN)
    scene.create("ConfigMap", "swap-config", data={"price": "7"})
    before = scene.get("configmap", "swap-config")
    scene.apply("swap", run={"preset": "micro", "logging": {"every_steps": 3}})
    scene.wait("swap", "Healthy", "NameConflict")
    assert scene.get("configmap", "swap-config") == before
    scene.kubectl("delete", "ft", "swap", IN)
    clear(scene)


def test_a_list_without_end_is_refused_when_it_is_applied(scene: Scene) -> None:
    aliases = [{"ip": "192.0.2.1", "hostnames": [f"h{n}"]} for n in range(20_000)]
    with pytest.raises(ClusterError, match="hostAliases"):
        scene.apply("lines", podTemplate={"spec": {"hostAliases": aliases}})


LARGE = {"a": [{"b": "c" * 20, "d": n} for n in range(10_000)]}


@pytest.mark.parametrize(
    ("affinity", "says"),
    [
        (DEEP, "must be nested at most 32 deep"),
        (json.dumps(LARGE), f"must be at most {MAX_BYTES['spec'] >> 10} KiB"),
    ],
    ids=["deep", "large"],
)
def test_a_job_that_is_too_much_is_refused_by_itself_and_others_go_on(
    scene: Scene, affinity: str, says: str
) -> None:
    scene.kubectl("create", "--filename=-", IN, stdin=too_much(affinity))
    message = scene.wait("much", "Failed", "InvalidSpec")
    assert says in message
    goes_on(scene)
    scene.operator.stop()
    scene.operator.start()  # it finds such a job among those that it lists
    goes_on(scene)
    scene.kubectl("delete", "ft", "much", IN)


def too_much(affinity: str) -> str:
    template = {"spec": {"affinity": "HERE", "containers": [{"name": "trainer"}]}}
    job = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "much"},
        "spec": {
            "run": {"preset": "micro"},
            "nodes": {"min": 64, "max": 64},
            "podTemplate": template,
        },
    }
    return json.dumps(job).replace('"HERE"', affinity)


def goes_on(scene: Scene) -> None:
    scene.apply("small")
    scene.wait_for_pods("small", 2)
    scene.kubectl("delete", "ft", "small", IN)
    clear(scene)
    assert scene.operator.process is not None
    assert scene.operator.process.poll() is None, scene.operator.log()


def test_all_pods_of_a_job_that_failed_while_they_waited_for_a_node_go(scene: Scene) -> None:
    """The watch often tells that they are gone before the answer to their deletion arrives."""
    for number in range(5):
        scene.apply(f"late-{number}", lifecycle={"activeDeadlineSeconds": 2})
    for number in range(5):
        scene.wait(f"late-{number}", "Failed", "DeadlineExceeded")
        scene.wait_for_pods(f"late-{number}", 0, seconds=30)
