"""Many tenants, one operator: name conflicts, quotas and oversized jobs, on an API server without nodes."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from tests.api_server.client import Kubectl, make_job
from tests.api_server.empty_api_server import empty_api_server
from tests.end_to_end.stage import GRANT, Operator, condition, grant, make_account, wait_for
from tests.paths import ROOT

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import MAX_BYTES

NAMESPACE = "tenants"
IN = f"--namespace={NAMESPACE}"
CRD = "crd/fluxtrainings.fluxtrain.dev"
DEEP = '{"a":' * 2000 + "1" + "}" * 2000


class Tenants:
    """The operator and the objects of its API server."""

    def __init__(self, kubectl: Kubectl, operator: Operator) -> None:
        self.kubectl, self.operator = kubectl, operator

    def apply(self, name: str, **spec: Any) -> None:
        self.kubectl.apply(make_job(name, spec), namespace=NAMESPACE)

    def create(self, kind: str, name: str, **fields: Any) -> None:
        """Create an object that is not the job's."""
        manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **fields}
        self.kubectl.create(manifest, namespace=NAMESPACE)

    def get(self, kind: str, name: str) -> Manifest:
        return self.kubectl.get(kind, name, IN)

    def status(self, job: str) -> Manifest:
        try:
            status: Manifest = self.get("ft", job).get("status", {})
        except RecursionError:  # Python cannot parse some of the specs
            text = self.kubectl("get", "ft", job, IN, "--output=jsonpath={.status}")
            status = json.loads(text or "{}")
        return status

    def pods(self, job: str) -> list[str]:
        """Return the names of the pods that the current job controls."""
        uid = self.get("ft", job)["metadata"]["uid"]
        pods = self.kubectl.get("pods", IN)["items"]
        owners = {p["metadata"]["name"]: p["metadata"].get("ownerReferences", []) for p in pods}
        return sorted(
            name for name, listed in owners.items() if any(o["uid"] == uid for o in listed)
        )

    def patch(self, kind: str, name: str, change: Manifest, *options: str) -> None:
        """Patch an object as another controller."""
        patch = f"--patch={json.dumps(change)}"
        is_list = kind == "pod" and "spec" in change  # of containers, which is merged by name
        merge = f"--type={'strategic' if is_list else 'merge'}"
        self.kubectl("patch", kind, name, IN, merge, patch, "--field-manager=other", *options)

    def objects(self, job: str) -> dict[tuple[str, str], tuple[str, str]]:
        """Return uid and version of the job and of its objects, by kind and name."""
        uid = self.get("ft", job)["metadata"]["uid"]
        items = json.loads(self.kubectl("get", OF_JOBS, IN, "--output=json"))["items"]
        return {
            (item["kind"], meta["name"]): (meta["uid"], meta["resourceVersion"])
            for item in items
            if uid in [(meta := item["metadata"])["uid"], *owners(meta)]
        }

    def wait(self, job: str, kind: str, reason: str, *, seconds: float = 60) -> str:
        """Wait until a condition has ``reason``; return its message."""

        def has_reason() -> bool:
            return condition(self.status(job), kind).get("reason") == reason

        wait_for(has_reason, lambda: self.debug_text(job), seconds=seconds)
        return str(condition(self.status(job), kind)["message"])

    def wait_for_pods(self, job: str, count: int, *, seconds: float = 90) -> None:
        wait_for(
            lambda: len(self.pods(job)) == count, lambda: self.debug_text(job), seconds=seconds
        )

    def debug_text(self, job: str) -> str:
        return f"{json.dumps(self.status(job), indent=1)}\n{self.operator.log()}"

    def warnings(self, job: str) -> list[str]:
        events = self.kubectl.get("events.events.k8s.io", IN)["items"]
        return [
            event["reason"]
            for event in events
            if event["regarding"]["name"] == job and event["type"] == "Warning"
        ]


def owners(metadata: Manifest) -> list[str]:
    return [owner["uid"] for owner in metadata.get("ownerReferences", [])]


@pytest.fixture(scope="module")
def tenants(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    kubectl("create", "namespace", NAMESPACE)
    kubectl("create", "serviceaccount", "default", IN)
    folder, lenient = tmp_path_factory.mktemp("tenants"), ['--job-policy={"podTemplate":"any"}']
    operator = Operator(kubectl, NAMESPACE, folder, options=lenient)
    operator.start()
    try:
        yield Tenants(kubectl, operator)
    finally:
        operator.stop()


@pytest.mark.proof
def test_of_two_releases_one_reconciles_a_namespace(
    tenants: Tenants, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both would write every object of a job, again and again, each as its own settings have it."""
    kubectl, other = tenants.kubectl, "tenants-other"
    kubectl("create", "namespace", other)
    folder, rules = tmp_path_factory.mktemp("second"), '--network={"egress":"restricted"}'
    second = Operator(kubectl, other, folder, others=(NAMESPACE,), options=[rules])
    tenants.apply("claimed")
    tenants.wait_for_pods("claimed", 2)
    second.start()
    try:
        kubectl.apply(make_job("own", {}), namespace=other)
        wait_for(
            lambda: "phase" in kubectl.get("ft", "own", f"--namespace={other}")["status"],
            second.log,
        )
        text = f"{NAMESPACE}: its jobs are left to {NAMESPACE}/fluxtrain-operator, which claims it"
        wait_for(lambda: text in second.log(), second.log)
        name = names.network_policy("claimed")
        before = tenants.get("networkpolicy", name)["metadata"]["resourceVersion"]
        time.sleep(10)
        assert tenants.get("networkpolicy", name)["metadata"]["resourceVersion"] == before
        assert len(tenants.pods("claimed")) == 2
    finally:
        second.stop()
        for place in (NAMESPACE, other):
            kubectl("delete", "ft", "--all", f"--namespace={place}")
    clear(tenants)


def meta(**fields: Any) -> Manifest:
    return {"metadata": fields}


CHANGES: list[tuple[str, str, Manifest]] = [
    ("pod", "labels of a policy engine", meta(labels={"policies.example.org/checked": "yes"})),
    ("pod", "another manager", meta(labels={names.LABEL_MANAGED_BY: "policy-engine"})),
    ("pod", "a label removed", meta(labels={names.LABEL_MANAGED_BY: None})),
    ("pod", "the status of a mesh", meta(annotations={"sidecar.example.org/status": "injected"})),
    ("pod", "a finalizer", meta(finalizers=["example.org/keep"])),
    (
        "pod",
        "a newer proxy",
        {"spec": {"containers": [{"name": "proxy", "image": "proxy:2"}]}},
    ),
    ("service", "labels", meta(labels={"team": "a", names.LABEL_MANAGED_BY: "argocd"})),
    (
        "service",
        "annotations of a load balancer",
        meta(annotations={"cloud.example.org/neg": "{}"}),
    ),
    ("service", "a finalizer", meta(finalizers=["example.org/load-balancer"])),
    ("service", "a field with a default", {"spec": {"sessionAffinity": "ClientIP"}}),
    ("networkpolicy", "labels", meta(labels={"team": "a", names.LABEL_MANAGED_BY: "kyverno"})),
    ("networkpolicy", "annotations", meta(annotations={"policies.example.org/synced": "1"})),
    ("networkpolicy", "a rule", {"spec": {"ingress": [{"ports": [{"port": 15090}]}]}}),
    ("poddisruptionbudget", "labels", meta(labels={names.LABEL_MANAGED_BY: None})),
    ("poddisruptionbudget", "annotations", meta(annotations={"example.org/why": "drain"})),
    ("configmap", "labels", meta(labels={"team": "a"})),
    ("configmap", "annotations", meta(annotations={"reflector.example.org/allowed": "true"})),
    ("secret", "labels", meta(labels={"team": "a", names.LABEL_MANAGED_BY: "vault"})),
    ("secret", "annotations", meta(annotations={"reloader.example.org/match": "true"})),
    (
        "fluxtraining",
        "the tracking of a GitOps tool",
        meta(annotations={"example.org/tracking-id": "x"}),
    ),
    ("fluxtraining", "labels", meta(labels={"velero.io/backup-name": "nightly"})),
]
"""Kind, what another controller does to it, and how: a merge patch."""
OF_JOBS = "pod,service,networkpolicy,poddisruptionbudget,configmap,secret,fluxtraining"


def test_changes_of_other_controllers_start_neither_pods_nor_writes(tenants: Tenants) -> None:
    tenants.kubectl.apply(*injection(), namespace=NAMESPACE)
    wait_for(lambda: injects(tenants), lambda: "the policy does not change pods")
    tenants.apply("shared")
    tenants.wait_for_pods("shared", 2)
    begun = {"status": {"phase": "Running", "startTime": names.stamp(time.time())}}
    found = tenants.objects("shared")
    pods = {uid: name for (kind, name), (uid, _) in found.items() if kind == "Pod"}
    for name in pods.values():
        tenants.patch("pod", name, begun, "--subresource=status")
    for kind, _, change in CHANGES:
        for (found_kind, name), _ in found.items():
            if found_kind.lower() == kind:
                tenants.patch(kind, name, change)
    time.sleep(6)  # of reactions
    settled = tenants.objects("shared")
    time.sleep(6)
    after = tenants.objects("shared")
    assert after == settled, "no write follows another"
    assert {uid for uid, _ in after.values()} == {uid for uid, _ in found.values()}, (
        "none is made anew"
    )
    assert tenants.warnings("shared") == []
    for kind, name in found:
        tenants.patch(kind, name, meta(finalizers=None))
    tenants.kubectl("delete", "ft", "shared", IN)
    kinds = "mutatingadmissionpolicybindings,mutatingadmissionpolicies"
    tenants.kubectl("delete", kinds, "--all")
    clear(tenants)


def injection() -> list[Manifest]:
    """Return a policy that adds a container, a volume and a label to every pod."""
    change = """Object{
        metadata: Object.metadata{labels: {"mesh.example.org/revision": "1"}},
        spec: Object.spec{
            containers: [Object.spec.containers{
                name: "proxy", image: "proxy:1",
                volumeMounts: [
                    Object.spec.containers.volumeMounts{name: "certs", mountPath: "/certs"}
                ]
            }],
            volumes: [Object.spec.volumes{
                name: "certs", emptyDir: Object.spec.volumes.emptyDir{}
            }]
        }
    }"""
    header = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "inject"}}
    pods = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    spec = {
        "matchConstraints": {"resourceRules": [pods]},
        "mutations": [
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": change}}
        ],
        "reinvocationPolicy": "IfNeeded",
        "failurePolicy": "Fail",
    }
    inside = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}}
    return [
        {**header, "kind": "MutatingAdmissionPolicy", "spec": spec},
        {
            **header,
            "kind": "MutatingAdmissionPolicyBinding",
            "spec": {"policyName": "inject", "matchResources": inside},
        },
    ]


def injects(tenants: Tenants) -> bool:
    """Return whether a new pod has the container that the policy adds."""
    spec = {"containers": [{"name": "main", "image": "a:1"}]}
    tenants.create("Pod", "tried", spec=spec)
    pod = tenants.get("pod", "tried")
    tenants.kubectl("delete", "pod", "tried", IN, "--grace-period=0", "--force")
    return len(pod["spec"]["containers"]) > 1


NETWORK_POLICY = {"apiVersion": "networking.k8s.io/v1", "spec": {"podSelector": {}}}
OTHERS: dict[str, tuple[str, str, Manifest]] = {
    "pay": ("NetworkPolicy", "pay-network", NETWORK_POLICY),
    "sell": ("Service", "sell", {"spec": {"ports": [{"port": 80}], "selector": {"app": "shop"}}}),
    "buy": ("Pod", "buy-rendezvous", {"spec": {"containers": [{"name": "a", "image": "a:1"}]}}),
}
"""An object that is not the job's and has a name that the job needs, by the job's name."""


def test_an_existing_object_is_left_alone_and_the_job_waits_for_its_name(tenants: Tenants) -> None:
    for kind, name, fields in OTHERS.values():
        tenants.create(kind, name, **fields)
    before = {job: tenants.get(kind, name) for job, (kind, name, _) in OTHERS.items()}
    for job in OTHERS:
        tenants.apply(job)
    for job, (kind, name, _) in OTHERS.items():
        message = tenants.wait(job, "Training", "NameConflict")
        assert f"{kind} {name} already exists and has no owner" in message
    time.sleep(12)  # of retries
    for job, (kind, name, _) in OTHERS.items():
        assert tenants.get(kind, name) == before[job]
        assert tenants.warnings(job).count("NameConflict") == 1
        if kind != "Pod":
            assert tenants.pods(job) == []
        tenants.kubectl("delete", kind, name, IN, "--grace-period=0", "--force")
    for job in OTHERS:
        tenants.wait_for_pods(job, 2)
        tenants.kubectl("delete", "ft", job, IN)
    clear(tenants)


def clear(tenants: Tenants) -> None:
    """Delete what the garbage collector would delete."""
    kinds = "pods,configmaps,services,networkpolicies,poddisruptionbudgets,events"
    tenants.kubectl("delete", kinds, "--all", IN, "--grace-period=0", "--force", seconds=120)


RESTORED_BY = {"velero.io/backup-name": "nightly", "velero.io/restore-name": "nightly-1"}
SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
VELERO_ORDER = ("Secret", "ConfigMap", "Pod", "FluxTraining", "NetworkPolicy")
"""Velero restores these first, then what is left by the name of its resource."""


def back_up(tenants: Tenants, job: str) -> list[Manifest]:
    """Return the job and all its objects in Velero's order, as a backup keeps them, and delete them."""
    text = tenants.kubectl("get", OF_JOBS, IN, "--output=json")
    own = {name for _, name in tenants.objects(job)}
    items = [item for item in json.loads(text)["items"] if item["metadata"]["name"] in own]
    tenants.kubectl("delete", "ft", job, IN)
    clear(tenants)
    for item in items:
        metadata = item["metadata"]
        kept = {k: v for k, v in metadata.items() if k not in (*SET_BY_SERVER, "ownerReferences")}
        item["metadata"] = {**kept, "labels": {**kept.get("labels", {}), **RESTORED_BY}}
        item["spec"] = {k: v for k, v in item.get("spec", {}).items() if k != "nodeName"}
        if not item["spec"]:
            del item["spec"]
    order = {kind: place for place, kind in enumerate(VELERO_ORDER)}
    return sorted(items, key=lambda item: order.get(item["kind"], len(order)))


def restore(tenants: Tenants, items: list[Manifest], with_status: bool = False) -> None:
    """Create the objects of a backup; those that exist by then are skipped."""
    for item in items:
        status = item.get("status") if item["kind"] == "FluxTraining" else None
        content = {key: value for key, value in item.items() if key != "status"}
        with contextlib.suppress(ClusterError):  # the operator was faster
            tenants.kubectl.create(content, namespace=NAMESPACE)
        if with_status and status:
            name = item["metadata"]["name"]
            tenants.patch("ft", name, {"status": status}, "--subresource=status")


def own_objects(tenants: Tenants, job: str) -> dict[str, list[str]]:
    """Return the names of the objects that the job controls, without secrets, by kind."""
    found: dict[str, list[str]] = {}
    for kind, name in sorted(tenants.objects(job)):
        found.setdefault(kind, []).append(name)
    return {kind: listed for kind, listed in found.items() if kind != "Secret"}


@pytest.mark.parametrize("way", ["by Velero", "all before the operator", "with the status"])
def test_a_restored_job_adopts_what_is_its_own_and_runs_on(tenants: Tenants, way: str) -> None:
    tenants.apply("moved", nodes={"min": 1, "max": 2})
    tenants.wait_for_pods("moved", 3)
    before = own_objects(tenants, "moved")
    revision = tenants.status("moved")["revision"]
    backup = back_up(tenants, "moved")
    if way == "by Velero":
        restore(tenants, backup)
    else:
        tenants.operator.stop()
        restore(tenants, backup, way == "with the status")
        service = tenants.get("service", "moved")["metadata"]["uid"]
        tenants.operator.start()
    tenants.wait_for_pods("moved", 3)
    wait_for(lambda: own_objects(tenants, "moved") == before, lambda: tenants.debug_text("moved"))
    assert "NameConflict" not in tenants.warnings("moved")
    stored = tenants.get("configmap", revision)
    assert RESTORED_BY.items() <= stored["metadata"]["labels"].items(), "it is adopted"
    if way != "by Velero":
        assert tenants.get("service", "moved")["metadata"]["uid"] == service, "it is adopted"
    uid = tenants.get("ft", "moved")["metadata"]["uid"]
    for name in tenants.pods("moved"):
        pod = tenants.get("pod", name)
        assert not RESTORED_BY.items() <= pod["metadata"]["labels"].items(), "it is a new one"
        assert names.rendezvous_key("moved", uid) in json.dumps(pod["spec"]["volumes"])
    status = tenants.status("moved")
    assert (status["attempt"], status["revision"]) == (1, revision)
    tenants.kubectl("delete", "ft", "moved", IN)
    clear(tenants)


SHOP = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "shop", "uid": "shop"}


@pytest.mark.parametrize("changed", ["a policy", "the revision"])
def test_objects_that_are_not_the_restored_jobs_are_named_at_once_with_a_command(
    tenants: Tenants, changed: str
) -> None:
    tenants.apply("mixed", nodes={"min": 2, "max": 3})
    tenants.wait_for_pods("mixed", 4)
    before = own_objects(tenants, "mixed")
    backup = back_up(tenants, "mixed")
    for item in backup:
        if changed == "the revision" and item["kind"] == "ConfigMap":
            item["data"]["spec-hash"] = "forged"
        if changed == "a policy" and item["kind"] == "NetworkPolicy":
            item["spec"]["ingress"].append({"ports": [{"port": 22, "protocol": "TCP"}]})
        if item["metadata"]["name"] == "mixed-1":
            item["metadata"] |= {"labels": {"app": "shop"}}
            item["metadata"] |= {"ownerReferences": [{**SHOP, "controller": True}]}
    tenants.operator.stop()
    restore(tenants, backup)
    tenants.operator.start()
    (revision,) = before["ConfigMap"]
    expected = {"pod/mixed-1", "networkpolicy/mixed-network"}
    if changed == "the revision":
        expected |= {f"configmap/{revision}", "service/mixed", "poddisruptionbudget/mixed-nodes"}
    free = expected - {"pod/mixed-1"}
    message = tenants.wait("mixed", "Training", "NameConflict")
    wait_for(
        lambda: all(
            name in condition(tenants.status("mixed"), "Training")["message"] for name in free
        ),
        lambda: tenants.debug_text("mixed"),
    )
    message = condition(tenants.status("mixed"), "Training")["message"]
    assert "Pod mixed-1 belongs to ReplicaSet shop" in message
    command = shlex.split(message[message.index("kubectl delete") :])
    assert command[:5] == ["kubectl", "delete", "--ignore-not-found", "-n", NAMESPACE]
    assert set(command[5:]) == free, "none that another controller owns"
    assert tenants.get("pod", "mixed-1")["metadata"]["ownerReferences"][0]["uid"] == "shop"
    assert tenants.pods("mixed") == []
    tenants.kubectl(*command[1:], "pod/mixed-1")
    tenants.wait_for_pods("mixed", 4)
    wait_for(lambda: own_objects(tenants, "mixed") == before, lambda: tenants.debug_text("mixed"))
    tenants.kubectl("delete", "ft", "mixed", IN)
    clear(tenants)


def test_two_jobs_with_the_same_service_name_conflict(tenants: Tenants) -> None:
    tenants.apply("1")
    tenants.wait_for_pods("1", 2)
    tenants.apply("ft-1")
    message = tenants.wait("ft-1", "Training", "NameConflict")
    assert "Service ft-1 already exists and belongs to FluxTraining 1" in message
    assert "kubectl delete" not in message, "that would be the other job's"
    tenants.kubectl("delete", "ft", "1", IN)
    tenants.kubectl("delete", "service", "ft-1", IN)
    tenants.wait_for_pods("ft-1", 2)
    tenants.kubectl("delete", "ft", "ft-1", IN)
    clear(tenants)


@pytest.mark.parametrize(
    ("cascade", "reason"), [("orphan", "NameConflict"), ("background", "PredecessorTerminating")]
)
def test_a_recreated_job_does_not_adopt_the_pods_of_the_previous_one(
    tenants: Tenants, cascade: str, reason: str
) -> None:
    """The API server has no garbage collector: the test does its work."""
    tenants.apply("again")
    tenants.wait_for_pods("again", 2)
    done = {"status": {"phase": "Succeeded", "containerStatuses": [FINISHED]}}
    tenants.kubectl(
        "patch", "ft", "again", IN, "--type=merge", '--patch={"metadata":{"finalizers":null}}'
    )
    tenants.kubectl("delete", "ft", "again", IN, "--cascade=background")
    if cascade == "orphan":
        for kind in (
            "pod/again-0",
            "pod/again-rendezvous",
            "service/again",
            "networkpolicy/again-network",
        ):
            tenants.kubectl(
                "patch", kind, IN, "--type=merge", '--patch={"metadata":{"ownerReferences":null}}'
            )
    tenants.kubectl(
        "patch",
        "pod",
        "again-0",
        IN,
        "--subresource=status",
        "--type=merge",
        f"--patch={json.dumps(done)}",
    )
    tenants.apply("again")
    tenants.wait("again", "Training", reason)
    time.sleep(3)
    assert tenants.pods("again") == []
    assert tenants.status("again")["phase"] == "Pending"
    clear(tenants)
    tenants.wait_for_pods("again", 2)
    tenants.kubectl("delete", "ft", "again", IN)
    clear(tenants)


FINISHED = {
    "name": "trainer",
    "image": "a:1",
    "imageID": "a",
    "ready": False,
    "restartCount": 0,
    "state": {"terminated": {"exitCode": 0}},
}


def test_an_exceeded_quota_is_reported_and_waited_for(tenants: Tenants) -> None:
    tenants.kubectl("create", "quota", "small", IN, "--hard=pods=1")
    used = {"status": {"hard": {"pods": "1"}, "used": {"pods": "0"}}}
    patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps(used)}")
    tenants.kubectl("patch", "quota", "small", IN, *patch)  # as its controller would
    tenants.apply("big", nodes={"min": 2, "max": 2})
    message = tenants.wait("big", "Admitted", "QuotaExceeded")
    assert "exceeded quota: small" in message
    time.sleep(8)
    assert tenants.warnings("big").count("QuotaExceeded") == 1
    tenants.kubectl("delete", "quota", "small", IN)
    tenants.wait_for_pods("big", 3)
    assert tenants.status("big")["restarts"]["pod"] == 0
    tenants.kubectl("delete", "ft", "big", IN)
    clear(tenants)


PROBE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "probe"},
    "spec": {"containers": [{"name": "a", "image": "a:1"}]},
}
LEVEL = "pod-security.kubernetes.io/enforce"
NET_ADMIN = [{"name": "trainer", "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}]
"""This API server accepts no privileged containers anyway."""
HOOKS = "validatingwebhookconfigurations.admissionregistration.k8s.io"


def wait_until_probed(tenants: Tenants, text: str) -> None:
    """Wait until the API server refuses an ordinary pod with ``text``, or accepts it if that is empty."""

    def answer() -> str:
        return tenants.kubectl.server.create(f"/api/v1/namespaces/{NAMESPACE}/pods", PROBE).message

    wait_for(lambda: bool(answer()) == bool(text) and text in answer(), answer, seconds=30)


def check_waiting(tenants: Tenants, job: str, reason: str) -> None:
    """Check that a refused job waits through its retries, and that one event reports it."""
    time.sleep(8)
    assert f"{job}-0" not in tenants.pods(job)
    assert tenants.warnings(job).count(reason) == 1
    status = tenants.status(job)
    assert (status["phase"], "startTime" in status) == ("Pending", False)
    assert (
        condition(status, "Admitted")["status"]
        == condition(status, "Training")["status"]
        == "False"
    )


def check_started(tenants: Tenants, job: str, num_pods: int) -> None:
    """Check that a job that was refused starts, and that nothing is counted as a restart."""
    tenants.wait_for_pods(job, num_pods)
    tenants.wait(job, "Training", "PodsPending")
    restarts = tenants.status(job)["restarts"]
    assert (restarts["pod"], restarts.get("charged") or 0) == (0, 0)
    tenants.kubectl("delete", "ft", job, IN)
    clear(tenants)


def test_pods_that_violate_pod_security_are_reported_until_the_template_is_changed(
    tenants: Tenants,
) -> None:
    tenants.kubectl("label", "namespace", NAMESPACE, f"{LEVEL}=restricted")
    try:
        wait_until_probed(tenants, "violates PodSecurity")
        tenants.apply("root", podTemplate={"spec": {"containers": NET_ADMIN}})
        message = tenants.wait("root", "Training", "PodSecurity")
        assert "NET_ADMIN" in message
        check_waiting(tenants, "root", "PodSecurity")
        tenants.apply("plain")
        check_started(tenants, "plain", 2)  # our own pods are restricted
        tenants.apply("root", podTemplate={})
        check_started(tenants, "root", 2)
    finally:
        tenants.kubectl("label", "namespace", NAMESPACE, f"{LEVEL}-")
        wait_until_probed(tenants, "")


def test_a_webhook_without_endpoints_is_reported_until_it_is_removed(tenants: Tenants) -> None:
    tenants.create("Service", "absent", spec={"ports": [{"port": 443}]})
    tenants.kubectl("create", "--filename=-", stdin=json.dumps(WEBHOOK))
    try:
        wait_until_probed(tenants, "failed calling webhook")
        tenants.apply("hooked", nodes={"min": 2, "max": 3})
        message = tenants.wait("hooked", "Admitted", "PodsRefused")
        assert "failed calling webhook" in message
        assert "pods.example.com" in message
        check_waiting(tenants, "hooked", "PodsRefused")
    finally:
        tenants.kubectl("delete", HOOKS, "pods.example.com")
        tenants.kubectl("delete", "service", "absent", IN)
    wait_until_probed(tenants, "")
    check_started(tenants, "hooked", 4)


WEBHOOK = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingWebhookConfiguration",
    "metadata": {"name": "pods.example.com"},
    "webhooks": [
        {
            "name": "pods.example.com",
            "clientConfig": {"service": {"namespace": NAMESPACE, "name": "absent"}},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
            "rules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "resources": ["pods"],
                    "operations": ["CREATE"],
                }
            ],
            "failurePolicy": "Fail",
            "timeoutSeconds": 1,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
    ],
}


def test_an_object_that_replaced_ours_is_not_changed(tenants: Tenants) -> None:
    tenants.apply("swap")
    tenants.wait_for_pods("swap", 2)
    tenants.operator.stop()  # it would create its own again at once
    tenants.kubectl("delete", "networkpolicy", "swap-network", IN)
    tenants.create("NetworkPolicy", "swap-network", **NETWORK_POLICY)
    tenants.operator.start()
    before = tenants.get("networkpolicy", "swap-network")
    tenants.apply("swap", run={"preset": "micro", "logging": {"metrics_port": 9500}})
    tenants.wait("swap", "Healthy", "NameConflict")
    assert tenants.get("networkpolicy", "swap-network") == before
    tenants.kubectl("delete", "ft", "swap", IN)
    clear(tenants)


def test_another_metrics_port_changes_the_service_and_the_network_policy(tenants: Tenants) -> None:
    tenants.apply("port")
    tenants.wait_for_pods("port", 2)
    uid = tenants.get("service", "port")["metadata"]["uid"]
    tenants.apply("port", run={"preset": "micro", "logging": {"metrics_port": 9500}})

    def ports() -> list[int]:
        service = tenants.get("service", "port")
        assert service["metadata"]["uid"] == uid, "changed in place"
        return sorted(port["port"] for port in service["spec"]["ports"])

    wait_for(lambda: 9500 in ports(), "the new port", seconds=20)
    assert ports() == [9500, 29500]
    policy = tenants.get("networkpolicy", "port-network")
    assert "9500" in json.dumps(policy["spec"])
    assert "9464" not in json.dumps(policy["spec"])
    tenants.kubectl("delete", "ft", "port", IN)
    clear(tenants)


@pytest.mark.parametrize(
    ("kind", "name"), [("service", "heal"), ("networkpolicy", "heal-network"), ("configmap", "")]
)
def test_a_deleted_object_comes_back_within_seconds(tenants: Tenants, kind: str, name: str) -> None:
    tenants.apply("heal")
    tenants.wait_for_pods("heal", 2)
    name = name or tenants.status("heal")["revision"]
    before, pods = tenants.get(kind, name)["metadata"]["uid"], tenants.pods("heal")
    tenants.kubectl("delete", kind, name, IN)

    def is_back() -> bool:
        found = tenants.kubectl("get", kind, name, IN, "--ignore-not-found", "--output=json")
        return bool(found) and json.loads(found)["metadata"]["uid"] != before

    wait_for(is_back, f"another {kind} {name}", seconds=20)
    assert tenants.pods("heal") == pods
    tenants.kubectl("delete", "ft", "heal", IN)
    clear(tenants)


def lose_a_pod(tenants: Tenants, name: str) -> None:
    tenants.kubectl("delete", "pod", name, IN, "--grace-period=0", "--force")


def test_a_revision_is_restored_before_a_pod_mounts_it(tenants: Tenants) -> None:
    tenants.apply("frozen", nodes={"min": 2, "max": 2})
    tenants.wait_for_pods("frozen", 3)
    name = tenants.status("frozen")["revision"]
    before = tenants.get("configmap", name)
    assert before["immutable"] is True
    tenants.kubectl("delete", "configmap", name, IN)
    lose_a_pod(tenants, "frozen-1")
    tenants.wait_for_pods("frozen", 3)
    after = tenants.get("configmap", name)
    assert (after["data"], after["immutable"]) == (before["data"], True)
    owners = after["metadata"]["ownerReferences"]
    labels, notes = after["metadata"]["labels"], after["metadata"]["annotations"]
    tenants.operator.stop()
    tenants.kubectl("delete", "configmap", name, IN)
    metadata = {"name": name, "ownerReferences": owners, "labels": labels, "annotations": notes}
    data = {**before["data"], "config.json": "{}"}
    tenants.create("ConfigMap", name, metadata=metadata, data=data, immutable=True)
    lose_a_pod(tenants, "frozen-1")
    tenants.operator.start()
    message = tenants.wait("frozen", "Training", "ConfigMapRefused")
    assert "immutable" in message
    assert len(tenants.pods("frozen")) == 2
    tenants.kubectl("delete", "configmap", name, IN)
    tenants.wait_for_pods("frozen", 3)
    assert tenants.get("configmap", name)["data"] == before["data"]
    assert tenants.status("frozen")["attempt"] == 1
    tenants.kubectl("delete", "ft", "frozen", IN)
    clear(tenants)


def test_a_list_that_is_too_long_is_refused_on_apply(tenants: Tenants) -> None:
    aliases = [{"ip": "192.0.2.1", "hostnames": [f"h{n}"]} for n in range(20_000)]
    with pytest.raises(ClusterError, match="hostAliases"):
        tenants.apply("lines", podTemplate={"spec": {"hostAliases": aliases}})


LARGE = {"a": [{"b": "c" * 20, "d": n} for n in range(10_000)]}


@pytest.mark.parametrize(
    ("affinity", "says"),
    [
        (DEEP, "must be nested at most 32 deep"),
        (json.dumps(LARGE), f"must be at most {MAX_BYTES['spec'] >> 10} KiB"),
    ],
    ids=["deep", "large"],
)
def test_an_oversized_job_is_refused_and_others_continue(
    tenants: Tenants, affinity: str, says: str
) -> None:
    tenants.kubectl("create", "--filename=-", IN, stdin=oversized_job(affinity))
    message = tenants.wait("much", "Failed", "InvalidSpec")
    assert says in message
    check_others(tenants)
    tenants.operator.stop()
    tenants.operator.start()  # it lists the oversized job
    check_others(tenants)
    tenants.kubectl("delete", "ft", "much", IN)


def oversized_job(affinity: str) -> str:
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


def check_others(tenants: Tenants) -> None:
    tenants.apply("small")
    tenants.wait_for_pods("small", 2)
    tenants.kubectl("delete", "ft", "small", IN)
    clear(tenants)
    assert tenants.operator.process is not None
    assert tenants.operator.process.poll() is None, tenants.operator.log()


def test_all_pending_pods_of_a_failed_job_are_deleted(tenants: Tenants) -> None:
    """The watch often reports the deletion before the response to the delete request arrives."""
    for number in range(5):
        tenants.apply(f"late-{number}", lifecycle={"activeDeadlineSeconds": 2})
    for number in range(5):
        tenants.wait(f"late-{number}", "Failed", "DeadlineExceeded")
        tenants.wait_for_pods(f"late-{number}", 0, seconds=30)


def test_a_rendezvous_pod_meets_a_quota_on_limits_and_a_limit_range(tenants: Tenants) -> None:
    hard = {"limits.cpu": "8", "limits.memory": "16Gi"}
    tenants.create("ResourceQuota", "limits", spec={"hard": hard})
    status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
    tenants.patch("quota", "limits", status, "--subresource=status")  # as its controller would
    bounds = {"type": "Container", "max": {"memory": "1Gi"}, "min": {"cpu": "100m"}}
    tenants.create("LimitRange", "bounds", spec={"limits": [bounds]})
    own = {"limits": {"cpu": "1", "memory": "1Gi"}}
    tenants.apply("bound", resources=own)
    message = tenants.wait("bound", "Admitted", "PodsRefused")
    assert "bound-rendezvous" in message
    assert tenants.pods("bound") == []
    rendezvous = {"requests": {"cpu": "100m"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
    tenants.apply("bound", resources={**own, "rendezvous": rendezvous})
    tenants.wait_for_pods("bound", 2)
    (container,) = tenants.get("pod", "bound-rendezvous")["spec"]["containers"]
    assert container["resources"] == {**rendezvous, "requests": {"cpu": "100m", "memory": "256Mi"}}
    assert tenants.status("bound")["restarts"]["pod"] == 0
    tenants.kubectl("delete", "ft", "bound", IN)
    tenants.kubectl("delete", "quota/limits", "limitrange/bounds", IN)
    clear(tenants)


PAIR = ("pair-a", "pair-b")


def phase_of(kubectl: Kubectl, name: str, namespace: str) -> str:
    """Return the phase of a job, empty until the operator has seen it."""
    status = kubectl.get("ft", name, f"--namespace={namespace}")["status"]
    return str(status.get("phase", ""))


def test_the_trouble_of_one_namespace_is_only_its_own(
    kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    for namespace in PAIR:
        kubectl("create", "namespace", namespace)
        kubectl("create", "serviceaccount", "default", f"--namespace={namespace}")
    config = make_account(kubectl, PAIR[0], folder)
    for namespace in PAIR:
        grant(kubectl, PAIR[0], namespace)
    options = ["--watch-nodes=false"]
    operator = Operator(
        kubectl, PAIR[0], folder, kubeconfig=config, others=PAIR[1:], options=options
    )

    def serve(name: str, namespace: str, *, served: bool = True) -> None:
        kubectl.apply(make_job(name, {}), namespace=namespace)
        if not served:
            time.sleep(15)
            assert not phase_of(kubectl, name, namespace)
            return
        wait_for(lambda: bool(phase_of(kubectl, name, namespace)), operator.log, seconds=60)

    operator.start()
    try:
        for namespace in PAIR:
            serve("first", namespace)
        kubectl("delete", "rolebinding", GRANT, f"--namespace={PAIR[1]}")
        wait_for(lambda: f"namespaces/{PAIR[1]}/" in operator.log(), operator.log, seconds=90)
        serve("second", PAIR[0])
        serve("second", PAIR[1], served=False)
        code, text = probe(operator, "readyz")
        assert code == 200
        assert text.startswith("ok\n")
        grant(kubectl, PAIR[0], PAIR[1])
        serve("third", PAIR[1])
        assert len(kubectl.get("pods", f"--namespace={PAIR[1]}")["items"]) > 0
        assert operator.process is not None
        assert operator.process.poll() is None
    finally:
        operator.stop()
        for namespace in PAIR:
            kubectl("delete", "ft", "--all", f"--namespace={namespace}")


def probe(operator: Operator, path: str) -> tuple[int, str]:
    """Return status and text of a probe."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_crd_may_come_late_and_go_and_come_back(
    programs: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    crd = f"--filename={ROOT / 'manifests' / 'crd.yaml'}"
    with empty_api_server(tmp_path_factory.mktemp("late")) as kubectl:
        kubectl("create", "serviceaccount", "default")
        operator = Operator(kubectl, "default", tmp_path_factory.mktemp("late-operator"))
        operator.start()

        def is_seen(name: str) -> bool:
            return bool(phase_of(kubectl, name, "default"))

        def wait_for_probe(status: int, text: str) -> None:
            def seen() -> bool:
                with suppress(OSError):
                    found, answer = probe(operator, "readyz")
                    return found == status and text in answer
                return False

            wait_for(seen, operator.log, seconds=90)

        try:
            for number in range(2):
                wait_for_probe(503, "default is not served: /apis/fluxtrain.dev")
                kubectl("apply", "--server-side", crd)
                kubectl.wait_for_crds()
                wait_for_probe(200, "ok")
                name = f"job-{number}"
                kubectl.apply(make_job(name, {}), namespace="default")
                wait_for(partial(is_seen, name), operator.log)
                kubectl("delete", CRD)
            wait_for_probe(503, "default is not served")
            assert operator.process is not None
            assert operator.process.poll() is None
        finally:
            operator.stop()
